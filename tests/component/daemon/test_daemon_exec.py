"""One-shot commands through a real daemon."""

from __future__ import annotations

import os
import sys

import pytest
import trio
import trio.testing

from prorl_ipc.errors import CallFailed
from prorl_ipc.sandbox_calls import Exec, ExecInput, ExecInputTaken, ExecResult, Ping, Pong
from support.processes import command_line

CALLS = 8
"""A call that leaks a file descriptor is told by so many of them: a young daemon's own number varies by a few."""


async def run(sandbox, *argv, timeout_s=10, **options):
    with trio.fail_after(30):
        call = Exec(argv=list(argv), timeout_s=timeout_s, **options)
        return await sandbox.call(call, ExecResult, timeout_s=timeout_s + 10)


async def test_streams_come_apart_and_the_exit_code_is_a_result(sandbox):
    result = await run(sandbox, "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (7, b"out\n", b"err\n", False)


async def test_input_goes_in_and_comes_out_bit_for_bit(sandbox):
    content = os.urandom(3_000_000)
    result = await run(sandbox, "cat", stdin=content, max_output_bytes=4_000_000)
    assert (result.stdout, result.stdout_dropped_bytes) == (content, 0)


async def test_a_program_that_reads_nothing_does_not_wait_for_its_input(sandbox):
    assert (await run(sandbox, "true", stdin=b"x" * 1_000_000)).exit_code == 0


async def test_input_in_pieces_may_come_before_its_program(sandbox):
    async def send(data, *, last):
        piece = ExecInput(input_id=7, data=data, last=last)
        return await sandbox.call(piece, ExecInputTaken, timeout_s=20)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: send(b"two ", last=False))
            await trio.testing.wait_all_tasks_blocked()  # it is sent
            await sandbox.call(Ping(), Pong, timeout_s=5)  # it has come, and waits
            nursery.start_soon(lambda: run(sandbox, "sleep", "0.1"))  # which wants none of it
            results = []

            async def run_cat():
                results.append(await run(sandbox, "cat", stdin=b"one ", input_id=7))

            nursery.start_soon(run_cat)
            assert (await send(b"three", last=True)).wanted
        assert sorted(results[0].stdout.split()) == [b"one", b"three", b"two"]


async def test_input_that_nobody_reads_is_not_wanted_and_leaves_nothing(sandbox):
    with trio.fail_after(60):
        for number in range(1, CALLS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda number=number: run(sandbox, "true", input_id=number))
                wanted = True
                with trio.move_on_after(1):
                    await trio.lowlevel.checkpoint()
                    while wanted:
                        piece = ExecInput(input_id=number, data=bytes(1_000_000), last=False)
                        wanted = (await sandbox.call(piece, ExecInputTaken, timeout_s=20)).wanted
        assert (await run(sandbox, "cat", stdin=b"fine")).stdout == b"fine"


async def test_two_programs_cannot_have_one_input(sandbox):
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: run(sandbox, "cat", input_id=3))
            await sandbox.call(ExecInput(input_id=3, data=b"x", last=False), ExecInputTaken, timeout_s=20)
            with pytest.raises(CallFailed, match="another program's"):
                await run(sandbox, "cat", input_id=3)
            await sandbox.call(ExecInput(input_id=3, data=b"", last=True), ExecInputTaken, timeout_s=20)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user: run as root, as CI does")
async def test_another_user_has_its_own_home_groups_and_the_limits_of_all(start_daemon):
    daemon = start_daemon(limits={"memory_bytes": 300 << 20})
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        script = "id -un; id -gn; echo $HOME $USER; ulimit -d"
        result = await run(sandbox, "bash", "-c", script, user="nobody", cwd="/")
        name, group, home, limit = result.stdout.decode().splitlines()
        assert (name, group, home, limit) == ("nobody", "nogroup", "/nonexistent nobody", str(300 << 10))
        result = await run(
            sandbox, "sh", "-c", "setsid -f sleep 3700; echo $HOME", user="nobody", env={"HOME": "/"}, cwd="/"
        )
        assert result.stdout == b"/\n"
        assert not [entry for entry in daemon.descendants() if b"sleep" in command_line(entry.pid)]
    assert await daemon.wait_ended() == (0, "")


async def test_environment_and_directory_are_as_told(sandbox, tmp_path):
    result = await run(sandbox, "sh", "-c", "echo $FLAVOUR $HOME; pwd; env", env={"FLAVOUR": "mint"}, cwd="/")
    assert result.stdout.decode().splitlines()[:2] == [f"mint {tmp_path / 'home'}", "/"]
    assert b"SECRET" not in result.stdout
    assert (await run(sandbox, "pwd")).stdout.decode().strip() == str(tmp_path / "home")


async def test_a_signal_is_128_and_its_number(sandbox):
    assert (await run(sandbox, "sh", "-c", "kill -9 $$")).exit_code == 137


async def test_each_stream_is_capped_by_itself_head_and_tail(sandbox):
    script = "import sys; sys.stdout.write('a' * 50000 + 'z' * 50000); sys.stderr.write('e' * 10)"
    result = await run(sandbox, sys.executable, "-c", script, max_output_bytes=1000)
    assert result.stdout.startswith(b"a" * 500)
    assert result.stdout.endswith(b"z" * 500)
    assert (result.stdout_dropped_bytes, result.stderr, result.stderr_dropped_bytes) == (99_000, b"e" * 10, 0)


async def test_the_timeout_kills_the_whole_session_also_who_ignores_signals(sandbox, tmp_path):
    script = f"trap '' TERM INT HUP; sleep 3700 & echo $! > {tmp_path}/pid; echo started; wait; sleep 3700"
    result = await run(sandbox, "sh", "-c", script, timeout_s=1)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"started\n")
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text().strip()}")


async def test_what_a_command_leaves_running_is_ended_and_not_waited_for(sandbox, tmp_path):
    result = await run(sandbox, "sh", "-c", f"sleep 3700 & echo $! > {tmp_path}/pid; echo done")
    assert (result.exit_code, result.stdout) == (0, b"done\n")
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text().strip()}")


async def test_a_detached_process_that_holds_the_pipes_does_not_hold_up_the_answer(sandbox):
    started = trio.current_time()
    result = await run(sandbox, "sh", "-c", "setsid -f sleep 3700; echo done")
    assert (result.exit_code, result.stdout) == (0, b"done\n")
    assert trio.current_time() - started < 8


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (Exec(argv=[], timeout_s=1), "bad_request"),
        (Exec(argv=["a\0b"], timeout_s=1), "bad_request"),
        (Exec(argv=["true"], timeout_s=0), "bad_request"),
        (Exec(argv=["true"], timeout_s=1, env={"A=B": "c"}), "bad_request"),
        (Exec(argv=["no-such-program"], timeout_s=1), "not_found"),
        (Exec(argv=["true"], timeout_s=1, cwd="/no/such/folder"), "not_found"),
        (Exec(argv=["/etc/passwd"], timeout_s=1), "permission"),
        (Exec(argv=["true", "x" * 3_000_000], timeout_s=1), "too_large"),
        (Exec(argv=["true"], timeout_s=1, max_output_bytes=1 << 30), "too_large"),
        (Exec(argv=["true"], timeout_s=1, user="no-such-user"), "no_user"),
        (Exec(argv=["true"], timeout_s=1, user="1234567"), "no_user"),
        (Exec(argv=["true"], timeout_s=1, user="-1"), "no_user"),
        (Exec(argv=["true"], timeout_s=1, user="9" * 30), "no_user"),
    ],
)
async def test_what_could_not_be_run_has_a_code_and_leaves_nothing(sandbox, call, code):
    with trio.fail_after(20):
        before = await sandbox.call(Ping(), Pong, timeout_s=5)
        for _ in range(CALLS):
            with pytest.raises(CallFailed) as failed:
                await sandbox.call(call, ExecResult, timeout_s=10)
            assert failed.value.code == code
        after = await sandbox.call(Ping(), Pong, timeout_s=5)
    assert after.open_fds < before.open_fds + CALLS


async def test_cancelled_at_any_moment_nothing_runs_on_and_no_fd_is_left(sandbox, tmp_path):
    pid_file = tmp_path / "pid"
    with trio.fail_after(60):
        before = await sandbox.call(Ping(), Pong, timeout_s=5)
        for exponent in range(2 * CALLS):
            with trio.move_on_after(0.0005 * 1.4**exponent):
                await run(sandbox, "sh", "-c", f"echo $$ > {pid_file}; sleep 3700")
            assert not pid_file.exists() or not os.path.exists(f"/proc/{pid_file.read_text().strip() or 0}")
        after = await sandbox.call(Ping(), Pong, timeout_s=5)
    assert after.open_fds < before.open_fds + CALLS
