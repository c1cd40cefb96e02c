"""The persistent bash session, through a real daemon."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial

import pytest
import trio

from prorl_daemon.processes import read_process_table
from prorl_ipc.errors import CallFailed
from prorl_ipc.file_calls import FileData, FileRead
from prorl_ipc.sandbox_calls import BashInput, BashResult, BashRun, Ping, Pong
from support.cancel_sweep import cancel_sweep

CALL_TIMEOUT_S = 30
"""Of each call's budget on the wire: far more than any command here needs."""
INPUT_SWEEPS = 5


async def bash(sandbox, command, *, timeout_s=20.0, on_chunk=None, **options):
    with trio.fail_after(CALL_TIMEOUT_S + 10):
        request = BashRun(command=command, timeout_s=timeout_s, **options)
        return await sandbox.call(request, BashResult, timeout_s=CALL_TIMEOUT_S, on_chunk=on_chunk)


def running(pids: set[int]) -> set[int]:
    """Those of `pids` that are alive."""
    return {entry.pid for entry in read_process_table().with_descendants(lambda entry: entry.alive)} & pids


# (name, [(command, exit code, output), ...]): one session, command after command.
SESSIONS = [
    ("plain", [("echo hello", 0, "hello\n"), ("true", 0, ""), ("false", 1, "")]),
    ("variables", [("x=5; export y=6", 0, ""), ("echo $x; sh -c 'echo $y'", 0, "5\n6\n")]),
    ("functions", [("greet() { echo hi $1; return 4; }", 0, ""), ("greet you", 4, "hi you\n")]),
    (
        "declare is not local",
        [("declare -a list=(a b); declare -r fixed=1", 0, ""), ("echo ${list[1]} $fixed", 0, "b 1\n")],
    ),
    ("previous exit code", [("(exit 7)", 7, ""), ("echo $?", 0, "7\n"), ("echo $?", 0, "0\n")]),
    ("background job", [("sleep 1000 & echo started", 0, None), ("kill %1; echo still here", 0, None)]),
    ("stdout and stderr in order", [("echo a; echo b >&2; echo c", 0, "a\nb\nc\n")]),
    ("no newline at the end", [("printf abc", 0, "abc"), ("echo next", 0, "next\n")]),
    ("carriage returns", [(r"printf 'a\rb\r\n'", 0, "b\n")]),
    ("tabs and escapes", [(r"printf '\t\033[1mx\033[0m\n'", 0, "\tx\n")]),
    ("invalid UTF-8", [(r"printf 'a\377\376b'", 0, "a\ufffd\ufffdb"), ("echo é€", 0, "é€\n")]),
    ("NUL in the output", [(r"printf 'a\0b'", 0, "ab")]),
    ("many lines", [("for i in 1 2 3\ndo\n  echo $i\ndone\n", 0, "1\n2\n3\n")]),
    ("heredoc", [("cat <<EOF\n$((1+1))\n'quoted'\nEOF", 0, "2\n'quoted'\n")]),
    ("heredoc without an end", [("cat 2>&1 <<EOF\nabc", 0, None), ("echo fine", 0, "fine\n")]),
    ("comment at the end", [("echo a # and so on", 0, "a\n"), ("# nothing", 0, ""), ("", 0, "")]),
    ("backslash at the end", [("echo a \\", 0, None), ("echo fine", 0, "fine\n")]),
    ("open quote", [("echo 'abc", 2, None), ("cat <<EOF\nfine\nEOF", 0, "fine\n")]),
    ("open bracket", [("if true; then (", 2, None), ("{ echo fine; }", 0, "fine\n")]),
    ("not found", [("no_such_command_here", 127, None), ("echo $?", 0, "127\n")]),
    ("set -u", [("set -u; echo $nothing_here; echo not reached", 1, None), ("echo fine", 0, "fine\n")]),
    ("error expansion", [(": ${nothing_here:?is missing}; echo not reached", 1, None), ("echo fine", 0, "fine\n")]),
    (
        "set -x",
        [
            ("set -x; echo a", 0, "++ echo a\na\n"),
            ("echo b", 0, "++ echo b\nb\n"),
            ("set +x; echo c", 0, None),
            ("echo d", 0, "d\n"),
        ],
    ),
    ("set -v", [("set -v; echo a", 0, "a\n"), ("echo b", 0, "b\n")]),
    ("set -e without a failure", [("set -e; true", 0, ""), ("echo fine", 0, "fine\n")]),
    ("noclobber, noglob", [("set -Cf; echo *", 0, "*\n"), ("echo fine", 0, "fine\n")]),
    ("posix mode", [("set -o posix; echo a", 0, "a\n"), ("false", 1, ""), ("set +o posix; echo b", 0, "b\n")]),
    ("IFS", [("IFS=xyz; echo a", 0, "a\n"), ('echo "$IFS"', 0, "xyz\n"), ("(exit 3)", 3, "")]),
    ("prompt taken over", [("PROMPT_COMMAND='echo no'; PS1='no> '; PS2=no", 0, ""), ("echo fine", 0, "fine\n")]),
    ("prompt unset", [("unset PROMPT_COMMAND PS1 PS2; echo a", 0, "a\n"), ("echo b", 0, "b\n")]),
    (
        "our variables unset",
        [
            ("unset ${!__prorl*}; echo a", 0, "a\n"),
            ("set -u; unset ${!__prorl*}; (exit 3)", 3, ""),
        ],
    ),
    (
        "builtins as functions",
        [("printf() { :; }; read() { :; }; set() { :; }; eval() { :; }", 0, ""), ("echo fine", 0, "fine\n")],
    ),
    (
        "builtins as aliases",
        [("alias printf=: read=: set=: eval=: builtin=:; alias cd=:", 0, ""), ("echo fine", 0, "fine\n")],
    ),
    ("aliases work", [("alias hi='echo hello'", 0, ""), ("hi", 0, "hello\n")]),
    (
        "output redirected for good",
        [
            ("exec >$HOME/out; echo to the file", 0, ""),
            ("echo too", 0, ""),
            ("exec >/dev/tty; cat $HOME/out", 0, "to the file\ntoo\n"),
        ],
    ),
    ("output closed", [("exec >&-; echo a", 1, None), ("exec >/dev/tty; echo back", 0, "back\n")]),
    ("descriptors kept", [("exec 7<<<kept", 0, ""), ("cat <&7", 0, "kept\n")]),
    ("trap ERR", [("trap 'echo oops' ERR", 0, ""), ("false; true", 0, "oops\n"), ("echo fine", 0, "fine\n")]),
    ("terminal spoilt", [("stty raw echo opost onlcr; echo a", 0, "a\n"), ("echo b", 0, "b\n")]),
    ("terminal mode after a killed job", [("sh -c 'kill -9 $$'; printf 'a\\nb\\n'", 0, "Killed\na\nb\n")]),
    ("job control off", [("set +m; sleep 0; echo a", 0, "a\n"), ("set -m; echo b", 0, "b\n")]),
    ("pipe status", [("false | true; echo ${PIPESTATUS[@]}", 0, "1 0\n")]),
    ("broken pipe is quiet", [("yes | head -n 1", 0, "y\n")]),
    ("subshell exit", [("(exit 5); echo $?", 0, "5\n")]),
    ("return outside", [("return 3", 2, None), ("echo fine", 0, "fine\n")]),
    ("standard input is a terminal", [("[ -t 0 ] && [ -t 1 ] && echo yes", 0, "yes\n")]),
    ("history expansion is off", [('echo "wow!" !x', 0, "wow! !x\n")]),
    ("no history", [("history; echo ${HISTFILE-none}", 0, "none\n")]),
    ("environment is clean", [("env | grep -E '^(LD_|PYTHON|NODE_|PS|PROMPT|HIST|__prorl)'", 1, "")]),
    ("pagers are off", [("echo $PAGER $GIT_PAGER $TERM $LANG", 0, "cat cat dumb C.UTF-8\n")]),
    ("no descriptors of ours", [("ls /proc/self/fd | wc -l", 0, "4\n")]),
    ("our descriptors are closed", [("echo x >&250", 1, None), ("echo x >&251", 1, None), ("echo x >&252", 1, None)]),
]


@pytest.mark.parametrize("session", [steps for _, steps in SESSIONS], ids=[name for name, _ in SESSIONS])
async def test_session(sandbox, session):
    for command, exit_code, output in session:
        result = await bash(sandbox, command)
        assert result.exit_code == exit_code, (command, result)
        assert output is None or result.output == output, command
        assert "prorl" not in result.output, command
        assert not result.timed_out, command
        assert not result.restarted, command
        assert result.dropped_bytes == 0, command


async def test_the_directory_is_kept_and_told(sandbox, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    assert (await bash(sandbox, f"cd '{folder}'")).cwd == str(folder)
    assert (await bash(sandbox, "pwd")).output == f"{folder}\n"


async def test_a_directory_deleted_under_the_shell(sandbox, tmp_path):
    result = await bash(sandbox, f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone")
    assert result.exit_code == 0
    result = await bash(sandbox, "echo fine")
    assert (result.output, result.cwd) == ("fine\n", f"{tmp_path}/gone")
    assert (await bash(sandbox, "cd /tmp")).cwd == "/tmp"


LOSSES = [
    ("exit 3", 3),
    ("exit", 0),
    ("exec true", 0),
    ("exec false", 1),
    ("set -e; false", 1),
    ("kill -9 $$", 137),
    ("kill -HUP $$", 129),
    ("echo last words; exit 4", 4),
    ("trap 'echo from the trap' EXIT; exit 6", 6),
]


@pytest.mark.parametrize(("command", "exit_code"), LOSSES, ids=[command for command, _ in LOSSES])
async def test_a_lost_shell_is_reported_and_replaced(sandbox, tmp_path, command, exit_code):
    await bash(sandbox, "x=before; cd /")
    result = await bash(sandbox, command)
    assert (result.exit_code, result.restarted, result.timed_out) == (exit_code, True, False)
    assert result.cwd == str(tmp_path / "home")
    for words in ("last words", "from the trap"):
        assert (words in command) == (words in result.output)
    result = await bash(sandbox, "echo ${x-nothing}; pwd")
    assert result.output == f"nothing\n{tmp_path / 'home'}\n"
    assert not result.restarted


async def test_a_shell_that_dies_between_commands_is_reported_with_the_next(sandbox, tmp_path):
    os.mkfifo(tmp_path / "now")
    now = os.open(tmp_path / "now", os.O_RDWR)
    result = await bash(sandbox, f"(read < {tmp_path}/now; kill -9 $$) > /dev/null 2>&1 & echo $$")
    pidfd = os.pidfd_open(int(result.output.split()[-1]))
    try:
        os.write(now, b"\n")
        with trio.fail_after(10):
            await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
        os.close(now)
    result = await bash(sandbox, "echo anew")
    assert (result.exit_code, result.restarted) == (0, True)
    assert result.output == "anew\n"


async def test_a_shell_that_ends_when_it_wants_input_does_not_take_the_next_command_along(sandbox):
    result = await bash(sandbox, "exec <&-; echo a")
    assert result.output.startswith("a\n")
    result = await bash(sandbox, "echo anew")
    assert (result.exit_code, result.restarted, result.output) == (0, True, "anew\n")


async def test_what_a_background_job_of_an_exited_shell_needs_is_left_to_it(sandbox, tmp_path):
    result = await bash(sandbox, "nohup sleep 1000 > /dev/null 2>&1 & echo $!; exit 0")
    assert result.restarted
    pids = {int(line) for line in result.output.splitlines() if line.isdigit()}
    assert running(pids) == pids


async def test_late_output_of_a_background_job_begins_the_next_output(sandbox, tmp_path):
    await bash(sandbox, f"mkfifo {tmp_path}/go {tmp_path}/done")
    await bash(sandbox, f"(cat {tmp_path}/go; echo late; echo > {tmp_path}/done) & :")
    await bash(sandbox, f"echo > {tmp_path}/go; cat {tmp_path}/done > /dev/null")
    result = await bash(sandbox, "echo now")
    whole = result.output
    assert whole.endswith("now\n")


async def test_a_background_job_never_waits_for_somebody_to_read(sandbox, tmp_path):
    os.mkfifo(tmp_path / "done")
    await bash(sandbox, f"(head -c 3000000 /dev/zero | tr '\\0' x; echo > {tmp_path}/done) & :")
    with trio.fail_after(20):
        await trio.to_thread.run_sync((tmp_path / "done").read_bytes, abandon_on_cancel=True)
    result = await bash(sandbox, "echo now")
    assert result.output.endswith("now\n")
    assert "bytes left out" in result.output


async def test_much_output_keeps_head_and_tail(sandbox):
    result = await bash(sandbox, "echo first; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert result.exit_code == 0
    assert result.output.startswith("first\nxxx")
    assert result.output.endswith("xxx\nlast\n")
    assert result.dropped_bytes == 20_000_000 + 6 + 6 - 64 * 1024
    assert f"\n[... {result.dropped_bytes} bytes left out ...]\n" in result.output


async def test_the_cap_is_the_callers(sandbox):
    assert (await bash(sandbox, "seq 1 100000", max_output_bytes=1_000_000)).dropped_bytes == 0
    result = await bash(sandbox, "seq 1 100000", max_output_bytes=10)
    assert result.output == "1\n2\n3\n[... 588885 bytes left out ...]\n0000\n"


async def test_a_large_script_is_read_whole(sandbox):
    script = "\n".join(f"x{i}='{'y' * 100}'" for i in range(9000)) + "\necho $x8999 | wc -c"
    assert len(script) > 900_000
    assert (await bash(sandbox, script)).output == "101\n"


READ_NONCE = """for fd in /proc/$$/fd/*; do
    case $(readlink $fd) in *memfd:nonce*) nonce=$(tr -d '\\0' < $fd);; esac
done"""


async def test_the_mark_of_the_end_is_output_while_the_command_runs(sandbox, tmp_path):
    os.mkfifo(tmp_path / "go")
    nonce_came = trio.Event()

    async def go_on():
        await nonce_came.wait()
        await trio.to_thread.run_sync((tmp_path / "go").write_bytes, b"after", abandon_on_cancel=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on)
        command = f'{READ_NONCE}; printf "%s" "$nonce"; cat {tmp_path}/go; (exit 9)'
        result = await bash(sandbox, command, stream=True, on_chunk=lambda stream, data: nonce_came.set())
    assert result.exit_code == 9
    assert len(result.output) > len("after") + 16
    assert result.output.endswith("after")
    assert (await bash(sandbox, "echo fine")).output == "fine\n"


async def test_records_under_another_name_are_ignored(sandbox):
    forge = (
        r"for fd in /proc/$$/fd/*; do case $(readlink $fd) in pipe:*) printf 'junk\0000\0/forged\0' > $fd;; esac; done"
    )
    result = await bash(sandbox, f"{forge}; (exit 8)")
    assert result.exit_code == 8
    assert result.cwd != "/forged"
    assert (await bash(sandbox, "echo fine")).output.endswith("fine\n")


@pytest.mark.parametrize("code", ["9" * 5000, str(2**80), "256", "-1", "+1", " 1", "1_0", "\u0663", "", "x"])
async def test_a_record_with_an_impossible_exit_code_is_none(sandbox, code):
    """A command can know the nonce and reach the record pipe; what it writes there is its own to spoil, no more."""
    record = f"printf '%s\\0%s\\0/forged\\0x:xtrace\\0\\0\\0\\0\\0' \"$nonce\" '{code}'"
    pipes = f"for fd in /proc/$$/fd/*; do case $(readlink $fd) in pipe:*) {record} >$fd;; esac; done"
    forge = f'{READ_NONCE}; nonce=${{nonce:0:33}}; {pipes}; printf %s "$nonce" >/dev/tty; (exit 8)'
    result = await bash(sandbox, forge)
    assert (result.exit_code, result.cwd == "/forged", result.restarted) == (8, False, False)
    assert (await bash(sandbox, "echo fine")).output == "fine\n"


async def test_output_is_streamed_while_the_command_runs(sandbox, tmp_path):
    os.mkfifo(tmp_path / "go")
    chunks = []
    first = trio.Event()

    def on_chunk(stream, data):
        chunks.append((stream, data))
        first.set()

    async def go_on():
        await first.wait()
        await trio.to_thread.run_sync((tmp_path / "go").write_bytes, b"\n", abandon_on_cancel=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on)
        result = await bash(sandbox, f"echo one; cat {tmp_path}/go; echo two", stream=True, on_chunk=on_chunk)
    assert {stream for stream, _ in chunks} == {"output"}
    assert b"".join(data for _, data in chunks).decode() == result.output == "one\n\ntwo\n"


async def test_a_large_stream_arrives_whole_although_the_result_is_capped(sandbox):
    received = 0

    def on_chunk(stream, data):
        nonlocal received
        received += len(data)

    result = await bash(sandbox, "head -c 5000000 /dev/zero | tr '\\0' x", stream=True, on_chunk=on_chunk)
    assert received == 5_000_000
    assert result.dropped_bytes == 5_000_000 - 64 * 1024


TIMEOUTS = [
    ("sleep 100", False),
    ("trap '' INT TERM; sleep 100", False),
    ("python3 -c 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(100)'", False),
    ("sleep 100 | sleep 100 | cat", False),
    ("while :; do :; done", False),
    ("while :; do sleep 0.1; done", False),
    ("while :; do python3 -c 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(100)'; done", False),
    ("cat", False),
    ("read line", False),
    ("sleep 100; echo not reached", False),
    ("sh -c 'trap \"\" INT; setsid sleep 100; sleep 100'", False),
    ("trap '' INT; while :; do :; done", True),
    ("kill -STOP $$", True),
    ("exec sleep 100", True),
]


@pytest.mark.parametrize(("command", "restarted"), TIMEOUTS, ids=[command for command, _ in TIMEOUTS])
async def test_a_command_that_runs_out_of_time_ends(sandbox, command, restarted):
    await bash(sandbox, "x=kept")
    started = time.monotonic()
    result = await bash(sandbox, f"echo begun; {command}", timeout_s=0.5)
    assert time.monotonic() - started < 10
    assert (result.timed_out, result.exit_code, result.restarted) == (True, None, restarted)
    assert result.output.startswith("begun\n")
    assert "not reached" not in result.output
    result = await bash(sandbox, "echo ${x-lost}")
    assert result.output.endswith("lost\n" if restarted else "kept\n")
    assert not result.restarted


async def test_a_cancelled_command_has_ended_when_the_call_returns(sandbox):
    pids = set()

    with trio.CancelScope() as scope:

        def on_chunk(stream, data):
            pids.add(int(data))
            scope.cancel()

        await bash(sandbox, "sh -c 'trap \"\" INT; echo $$; sleep 100'", stream=True, on_chunk=on_chunk)
    assert scope.cancelled_caught
    assert len(pids) == 1
    assert not running(pids)
    assert (await bash(sandbox, "echo fine")).output.endswith("fine\n")


async def test_a_command_cancelled_at_any_step_leaves_a_working_shell_and_no_output(sandbox):
    await bash(sandbox, "x=kept")

    async def check(run):
        result = await bash(sandbox, "echo $x")
        assert (result.exit_code, result.restarted, result.timed_out) == (0, False, False)
        assert result.output.lstrip("\n") == "kept\n"  # bash answers an interrupt with a newline

    for command in ("true", "/bin/true", "seq 5"):
        assert await cancel_sweep(partial(bash, sandbox, command), check) > 1


@pytest.mark.alone
@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("read line; echo got $line", b"typed\n"),
        ("read line; echo got $line", b"typed\0x=typed\0\n"),
        ("sh -c 'read line; echo $line; sleep 0.01'", b"typed\n"),
    ],
    ids=["read", "read NULs", "program"],
)
async def test_input_cancelled_at_any_step_leaves_a_working_shell_and_no_process(sandbox, command, keys):
    await bash(sandbox, "x=kept")
    shell = int((await bash(sandbox, "echo $$")).output)

    async def press(keys):
        return await sandbox.call(BashInput(keys=keys, timeout_s=20), BashResult, timeout_s=CALL_TIMEOUT_S)

    async def operation():
        assert (await bash(sandbox, command, quiet_timeout_s=0.02)).running
        assert (await press(keys)).exit_code == 0

    async def check(run):
        with suppress(CallFailed):  # not running: the call was sent, so that its cancel has ended the command
            await press(b"\x03")
        result = await bash(sandbox, "echo $x")
        assert (result.exit_code, result.restarted, result.timed_out, result.running) == (0, False, False, False), run
        assert result.output.lstrip("\n") == "kept\n", run
        assert not read_process_table().descendants(shell), run

    for _ in range(INPUT_SWEEPS):  # few steps are ours, and what the shell does meanwhile differs each time
        assert await cancel_sweep(operation, check) > 2


@pytest.mark.alone
@pytest.mark.parametrize("delay_s", [0, 0.0005, 0.001, 0.002, 0.005, 0.02])
async def test_a_command_cancelled_early_is_interrupted_and_not_waited_for(sandbox, delay_s):
    await bash(sandbox, "x=kept")
    for command in ("cat", "sleep 100", "while :; do :; done"):
        started = time.monotonic()
        with trio.move_on_after(delay_s) as scope:
            await bash(sandbox, command)
        assert scope.cancelled_caught
        assert time.monotonic() - started < 0.9  # before anything is killed
        result = await bash(sandbox, "echo $x")
        assert (result.output.lstrip("\n"), result.restarted) == ("kept\n", False)


async def test_a_second_command_waits_for_the_first_and_nothing_else_does(sandbox, tmp_path):
    go, order = tmp_path / "go", tmp_path / "order"
    os.mkfifo(go)
    begun = trio.Event()
    first = partial(bash, stream=True, on_chunk=lambda stream, data: begun.set())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first, sandbox, f"echo begun; cat {go}; echo first >> {order}")
        await begun.wait()
        nursery.start_soon(bash, sandbox, f"echo second >> {order}")
        await sandbox.call(FileRead(path="/proc/version"), FileData, timeout_s=10)
        assert not order.exists()
        await trio.to_thread.run_sync(go.write_bytes, b"\n", abandon_on_cancel=True)
    assert order.read_text() == "first\nsecond\n"


@pytest.mark.parametrize(
    "call",
    [
        BashRun(command="a\0b", timeout_s=1),
        BashRun(command="true", timeout_s=0),
        BashRun(command="true", timeout_s=1, max_output_bytes=-1),
        BashRun(command="true", timeout_s=1, max_output_bytes=1 << 40),
    ],
)
async def test_a_bad_request_is_refused_and_loses_nothing(sandbox, call):
    await bash(sandbox, "x=kept")
    with pytest.raises(CallFailed) as failed:
        await sandbox.call(call, BashResult, timeout_s=10)
    assert failed.value.code == "bad_request"
    assert (await bash(sandbox, "echo $x")).output == "kept\n"


async def test_an_image_without_bash_says_so(start_daemon, tmp_path):
    daemon = start_daemon(env={"PATH": str(tmp_path)})
    daemon.wait_ready()
    async with daemon.connect() as client:
        for _ in range(2):
            with pytest.raises(CallFailed) as failed:
                await bash(client, "true")
            assert failed.value.code == "no_shell"
    assert (await daemon.wait_ended()) == (0, "")


async def test_a_shell_that_was_there_and_cannot_come_back_is_told_from_one_that_never_was(start_daemon, tmp_path):
    (tmp_path / "bash").symlink_to("/bin/bash")
    daemon = start_daemon(env={"PATH": str(tmp_path)})
    daemon.wait_ready()
    async with daemon.connect() as client:
        for command in (f"/bin/rm {tmp_path}/bash; exit", "true"):
            with pytest.raises(CallFailed) as failed:
                await bash(client, command)
            assert failed.value.code == "shell_lost"
        (tmp_path / "bash").symlink_to("/bin/bash")
        assert (await bash(client, "echo back")).output == "back\n"
    assert (await daemon.wait_ended()) == (0, "")


async def test_a_timed_out_shell_takes_its_whole_session_along(sandbox):
    result = await bash(sandbox, "sleep 1000 & echo $!; sleep 1000 & echo $!; disown -a")
    pids = {int(line) for line in result.output.splitlines() if line.isdigit()}
    assert running(pids) == pids
    assert len(pids) == 2
    result = await bash(sandbox, "trap '' INT; while :; do :; done", timeout_s=0.2)
    assert result.restarted
    assert not running(pids)


@pytest.mark.parametrize("prestart", [True, False])
async def test_a_shell_is_there_before_the_first_command_if_it_is_to_be(start_daemon, prestart):
    daemon = start_daemon(prestart_bash=prestart)
    daemon.wait_ready()
    async with daemon.connect() as client:
        with trio.fail_after(CALL_TIMEOUT_S):
            await client.call(Ping(), Pong, timeout_s=CALL_TIMEOUT_S)
            while prestart and not daemon.descendants():
                await trio.sleep(0.01)
        assert bool(daemon.descendants()) is prestart
        assert (await bash(client, "x=5")).restarted is False
        assert (await bash(client, "echo $x")).output == "5\n"
    assert (await daemon.wait_ended()) == (0, "")
