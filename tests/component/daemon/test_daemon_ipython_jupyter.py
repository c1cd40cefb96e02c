"""Jupyter kernels behind the interface of our own IPython, through a real daemon: ipykernel, over IPC."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import trio

from prorl_daemon.jupyter_kernel import without_control_codes
from prorl_daemon.processes import read_process_table
from prorl_ipc.errors import CallFailed
from prorl_ipc.sandbox_calls import BashResult, BashRun, CellResult, IpythonRestart, IpythonRestarted, IpythonRun

pytest.importorskip("ipykernel")
CALL_TIMEOUT_S = 100
KERNEL = "python3"


async def cell(sandbox, code, *, timeout_s=60.0, on_chunk=None, kernel=KERNEL, **options):
    with trio.fail_after(CALL_TIMEOUT_S + 10):
        request = IpythonRun(code=code, timeout_s=timeout_s, kernel=kernel, **options)
        return await sandbox.call(request, CellResult, timeout_s=CALL_TIMEOUT_S, on_chunk=on_chunk)


def running(pids: set[int]) -> set[int]:
    return {entry.pid for entry in read_process_table().with_descendants(lambda entry: entry.alive)} & pids


def sockets_left():
    return sorted(Path("/tmp").glob("jk-*"))


async def test_a_session_of_cells(sandbox, tmp_path):
    expected = [
        ("x = 20", "", None),
        ("x + 1", "", "21"),
        ("print('hello'); x", "hello\n", "20"),
        ("!echo from the shell", "from the shell\n", None),
        ("%%bash\necho magic", "magic\n", None),
        (f"%cd -q {tmp_path}\nimport os; os.getcwd()", "", repr(str(tmp_path))),
        ("'é€' * 2", "", "'é€é€'"),
        ("display({'a': 1})", "{'a': 1}\n", None),
        ("import subprocess; subprocess.run(['echo', 'by a child']).returncode", "by a child\n", "0"),
        ("await __import__('asyncio').sleep(0, 7)", "", "7"),
    ]
    for code, stdout, shown in expected:
        result = await cell(sandbox, code)
        assert result.error is None, (code, result)
        assert (result.stdout.replace("\r\n", "\n"), result.result) == (stdout, shown), code
        assert not result.timed_out
        assert not result.restarted
    assert result.execution_count == len(expected)
    assert result.stderr == ""


async def test_what_is_written_to_descriptors_comes_with_its_cell_however_busy_the_kernel(sandbox):
    threads = "import os, subprocess, sys, threading\nsys.setswitchinterval(0.02)\ndef spin():\n    while True: pass\n"
    await cell(sandbox, f"{threads}[threading.Thread(target=spin, daemon=True).start() for _ in range(2)]")
    for number in range(10):
        result = await cell(sandbox, f"print('one'); _ = os.write(1, b'{number} \\xc3'), os.write(1, b'\\xa9\\n')")
        assert result.stdout == f"one\n{number} é\n"
        result = await cell(sandbox, f"subprocess.run(['sh', '-c', 'echo {number} >&2'], stdout=sys.stdout).returncode")
        assert (result.stderr, result.result) == (f"{number}\n", "0")


async def test_a_cell_that_closes_its_descriptors_goes_on(sandbox):
    assert (await cell(sandbox, "import os; os.close(1); os.close(2)")).error is None
    result = await cell(sandbox, "print('still here'); 'len' in dir(__builtins__), 'publish_descriptors' in globals()")
    assert (result.stdout, result.result, result.execution_count) == ("still here\n", "(True, False)", 2)


@pytest.mark.parametrize("fork", ["os.fork()", "pty.fork()[0]"])
async def test_a_child_that_a_cell_forks_answers_nothing(sandbox, fork):
    kernel = int((await cell(sandbox, "import os, pty, signal; os.getpid()")).result)
    assert (await cell(sandbox, f"pid = {fork}")).error is None
    for number in range(4):
        result = await cell(sandbox, f"({number} + 100, os.getpid())")
        assert (result.result, result.restarted) == (repr((number + 100, kernel)), False)
    assert (await cell(sandbox, "os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)[1]")).result == "9"


async def test_the_shells_are_apart(sandbox):
    await cell(sandbox, "x = 'in jupyter'")
    assert (await cell(sandbox, "'x' in globals()", kernel="")).result == "False"
    assert (await cell(sandbox, "x")).result == "'in jupyter'"


async def test_errors_are_results_without_colour_codes(sandbox):
    for code, name, value in [
        ("1/0", "ZeroDivisionError", "division by zero"),
        ("def f(:", "SyntaxError", None),
        ("input('name? ')", "StdinNotImplementedError", None),
        ("raise ValueError('of mine')", "ValueError", "of mine"),
    ]:
        result = await cell(sandbox, code)
        assert result.error.name == name, result
        assert value is None or result.error.value == value
        assert "\x1b" not in result.error.traceback
        assert name in result.error.traceback
        assert not result.restarted


async def test_displays_stderr_and_caps(sandbox):
    code = "import sys; print('e', file=sys.stderr)\nfrom IPython.display import Image, HTML\n"
    code += "display(HTML('<b></b>'))\nImage(data=b'\\x89PNG\\r\\n\\x1a\\n' + bytes(100), format='png')"
    result = await cell(sandbox, code)
    assert result.stderr == "e\n"
    assert [(d.mime, d.size_bytes, len(d.data)) for d in result.displays] == [
        ("text/html", 7, 0),
        ("image/png", 108, 108),
    ]
    result = await cell(sandbox, "print('o' * 100000); 'r' * 100000", max_output_bytes=1000)
    assert "bytes left out" in result.stdout
    assert "bytes left out" in result.result
    assert result.dropped_bytes > 190_000


async def test_output_is_streamed(sandbox):
    chunks = []
    code = "print('one')\nprint('two')"
    result = await cell(sandbox, code, stream=True, on_chunk=lambda stream, data: chunks.append((stream, data)))
    assert result.stdout == "one\ntwo\n"
    assert b"".join(data for stream, data in chunks if stream == "stdout") == b"one\ntwo\n"


@pytest.mark.parametrize("code", ["import time; time.sleep(100)", "while True: pass", "!sleep 100"])
async def test_a_cell_that_runs_out_of_time_is_interrupted(sandbox, code):
    await cell(sandbox, "x = 'kept'")
    result = await cell(sandbox, f"print('begun', flush=True)\n{code}", timeout_s=1.0)
    assert (result.timed_out, result.restarted) == (True, False), result
    assert result.stdout.startswith("begun\n")
    assert (await cell(sandbox, "x")).result == "'kept'"


async def test_a_cell_that_ignores_the_interrupt_is_killed(sandbox):
    pid = int((await cell(sandbox, "import os; x = 1; os.getpid()")).result)
    result = await cell(sandbox, "sum(range(10**15))", timeout_s=1.0)
    assert (result.timed_out, result.restarted, result.error.name) == (True, True, "KernelDied")
    assert not running({pid})
    result = await cell(sandbox, "'x' in globals()")
    assert (result.result, result.restarted) == ("False", False)


async def test_a_cancelled_cell_has_ended_when_the_call_returns(sandbox):
    await cell(sandbox, "x = 'kept'")
    started = time.monotonic()
    with trio.CancelScope() as scope:
        await cell(
            sandbox,
            "print('on', flush=True)\nwhile True: pass",
            stream=True,
            on_chunk=lambda stream, data: scope.cancel(),
        )
    assert scope.cancelled_caught
    assert time.monotonic() - started < 10
    assert (await cell(sandbox, "x")).result == "'kept'"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import os; print('last words', flush=True); os._exit(7)", "exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code 137 (SIGKILL)"),
    ],
)
async def test_the_death_of_the_kernel_is_a_result(sandbox, code, exit_code):
    await cell(sandbox, "x = 1")
    result = await cell(sandbox, code)
    assert (result.error.name, result.restarted, result.timed_out) == ("KernelDied", True, False)
    assert exit_code in result.error.value
    result = await cell(sandbox, "'x' in globals()")
    assert (result.result, result.restarted) == ("False", False)


async def test_restart_throws_the_state_away(sandbox):
    await cell(sandbox, "x = 1")
    with trio.fail_after(CALL_TIMEOUT_S):
        pid = (await sandbox.call(IpythonRestart(kernel=KERNEL), IpythonRestarted, timeout_s=CALL_TIMEOUT_S)).pid
    assert (await cell(sandbox, "import os; 'x' in globals(), os.getpid()")).result == f"(False, {pid})"


async def test_nothing_of_ours_is_in_its_environment(sandbox):
    environment = (await cell(sandbox, "import os; dict(os.environ)")).result
    for unwanted in ("PYTHONPATH", "LD_SECRET", "NODE_SECRET"):
        assert unwanted not in environment


async def test_an_unknown_kernel_is_refused_with_those_there_are(sandbox):
    with pytest.raises(CallFailed) as failed:
        await cell(sandbox, "1", kernel="no-such-kernel")
    assert failed.value.code == "no_kernel"
    assert "no-such-kernel" in failed.value.message
    assert "installed: python3" in failed.value.message
    assert (await cell(sandbox, "1", kernel="")).result == "1"


async def test_a_kernel_that_cannot_start_says_why(start_daemon, tmp_path):
    folder = tmp_path / "home" / ".local/share/jupyter/kernels"
    for name, argv in {
        "absent": ["/does/not/exist", "{connection_file}"],
        "broken": ["sh", "-c", "echo of the kernel >&2; exit 3", "{connection_file}"],
    }.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": name, "language": "none"}))
    before = sockets_left()
    daemon = start_daemon()
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        for name, reason in (("absent", "/does/not/exist"), ("broken", "of the kernel")):
            with pytest.raises(CallFailed) as failed:
                await cell(sandbox, "1", kernel=name)
            assert failed.value.code == "no_ipython"
            assert reason in failed.value.message
        assert (await cell(sandbox, "1")).result == "1"
        assert len(sockets_left()) > len(before)
        with trio.fail_after(20):
            result = await sandbox.call(BashRun(command="echo still here", timeout_s=10), BashResult, timeout_s=20)
        assert result.output == "still here\n"
    assert await daemon.wait_ended() == (0, "")
    assert sockets_left() == before


def test_control_codes_are_removed():
    assert without_control_codes("\x1b[0;31mred\x1b[0m \x1b]0;title\x07plain \x1b(x") == "red plain \x1b(x"


FORGE = """
session, send = get_ipython().kernel.session, get_ipython().kernel.session.send
def forged(stream, kind, content=None, *args, **fields):
    return send(stream, kind, %s if kind == "execute_reply" else content, *args, **fields)
session.send = forged
"""


@pytest.mark.parametrize("content", ["{'status': 'error', 'traceback': 7}", "{'status': 'error', 'traceback': None}"])
async def test_a_forged_answer_costs_the_kernel_and_is_no_error_of_the_daemon(sandbox, content):
    forged = await cell(sandbox, FORGE % content)
    assert forged.error.name == "KernelDied"
    assert (await cell(sandbox, "2 + 2")).result == "4"
