"""Processes that a cell forks: none of them answers for the kernel, and none goes on as one."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from prorl_daemon.processes import read_process_table
from prorl_ipc.errors import CallFailed
from prorl_ipc.sandbox_calls import CellResult, IpythonRun

CALL_TIMEOUT_S = 60
GONE_TIMEOUT_S = 20


async def cell(sandbox, code, *, timeout_s=30.0, **options):
    with trio.fail_after(CALL_TIMEOUT_S + 10):
        request = IpythonRun(code=code, timeout_s=timeout_s, **options)
        return await sandbox.call(request, CellResult, timeout_s=CALL_TIMEOUT_S)


async def assert_one_answers(sandbox, kernel):
    """Often enough that a second reader of the cells would get its turn."""
    for number in range(8):
        result = await cell(sandbox, f"import os; ({number} + 100, os.getpid())")
        assert (result.error, result.restarted) == (None, False)
        assert result.result == repr((number + 100, kernel))


async def wait_alone(kernel):
    """Until all that the kernel has forked has ended: only their zombies are left, for whoever waits for them."""
    with trio.fail_after(GONE_TIMEOUT_S):
        await trio.lowlevel.checkpoint()
        while any(entry.alive for entry in read_process_table().descendants(kernel)):
            await trio.sleep(0.01)


FORKS = {
    "os.fork": "pid = os.fork()",
    "os.fork, and the mother goes on first": "pid = os.fork()\nif not pid: time.sleep(0.3)",
    "os.fork as the last expression": "pid = 0\nos.fork()",
    "os.forkpty": "pid, master = os.forkpty()",
    "pty.fork": "import pty\npid, master = pty.fork()",
    "a fork of a fork": "pid = os.fork()\nif not pid: os.fork()",
    "the system call itself": "import ctypes\npid = ctypes.CDLL(None).fork()",
    "a child that raises": "pid = os.fork()\nif not pid: raise RuntimeError('of the child')",
    "a child that exits": "pid = os.fork()\nif not pid: raise SystemExit(7)",
    "a child that says exit()": "pid = os.fork()\nif not pid: exit()",
    "a child that is interrupted": "pid = os.fork()\nif not pid: raise KeyboardInterrupt",
    "in a session of its own": "pid = os.fork()\nif not pid: os.setsid()",
    "in a function": "def f():\n    return os.fork()\npid = f()",
    "in an await": "import asyncio\nawait asyncio.sleep(0)\npid = os.fork()",
    "a child that closes everything": "pid = os.fork()\nif not pid: os.closerange(3, 256)",
    "a child whose output is closed": "pid = os.fork()\nif not pid: sys.stdout.close(); sys.stderr.close()",
}


@pytest.mark.parametrize("code", FORKS.values(), ids=FORKS)
async def test_a_child_that_returns_from_its_cell_ends_and_answers_nothing(sandbox, code):
    kernel = int((await cell(sandbox, "import os, sys, time; os.getpid()")).result)
    result = await cell(sandbox, code)
    assert (result.error, result.restarted, result.execution_count) == (None, False, 2)
    await assert_one_answers(sandbox, kernel)
    await wait_alone(kernel)


async def test_a_child_ends_as_that_of_a_script_does(sandbox):
    """Its output is the cell's, what it raises is told on standard error, and its exit code is a script's."""
    await cell(sandbox, "import os, sys")
    for ending, exit_code, said in (
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('a last word')", 1, "a last word\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ):
        result = await cell(
            sandbox,
            f"print('once, ', end='')\npid = os.fork()\nif not pid:\n    print('the child')\n    {ending}\n"
            "else:\n    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n'the value'",
        )
        assert (result.error, result.result) == (None, "'the value'"), ending
        assert result.stdout == f"once, the child\n{exit_code}\n", ending
        assert said in result.stderr, ending
        assert bool(said) == bool(result.stderr), ending


async def test_the_kernel_ends_in_favour_of_its_child(sandbox):
    """The idiom of a program that becomes a daemon: the kernel is lost, and told so; its child is none."""
    result = await cell(sandbox, "import os\nif os.fork(): os._exit(3)\nprint('in the child')")
    assert (result.error.name, result.restarted) == ("KernelDied", True)
    assert "exit code 3" in result.error.value
    await assert_one_answers(sandbox, int((await cell(sandbox, "import os; os.getpid()")).result))


async def test_a_child_outlives_its_cell_and_what_it_writes_then_is_in_a_later_output(sandbox, tmp_path):
    gate = tmp_path / "gate"
    wait = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    code = f"import os, time\npid = os.fork()\nif not pid:\n    {wait}\n    print('late')"
    assert (await cell(sandbox, code)).stdout == ""
    assert (await cell(sandbox, "1 + 1")).stdout == ""
    gate.touch()
    result = await cell(sandbox, "os.waitpid(pid, 0)[1]")
    assert (result.result, result.stdout) == ("0", "late\n")


async def test_an_interrupt_ends_the_child_too(sandbox):
    code = "import os, time\npid = os.fork()\ntime.sleep(100)"
    result = await cell(sandbox, code, timeout_s=0.5)
    assert (result.timed_out, result.restarted, result.error.name) == (True, False, "KeyboardInterrupt")
    result = await cell(sandbox, "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])")
    assert result.result == "130"


WORKS = {
    "multiprocessing": """
import multiprocessing, os
context = multiprocessing.get_context("fork")
results = context.Queue()
process = context.Process(target=lambda: results.put(os.getpid()))
process.start()
other = results.get()
process.join()
(other != os.getpid(), process.exitcode)
""",
    "a pool, used by a later cell too": """
import concurrent.futures, multiprocessing
pool = concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
(sum(pool.map(abs, range(-4, 0))) == 10, 0)
""",
    "a fork in a thread": """
import os, threading
status = []
def work():
    pid = os.fork()
    if pid:
        status.append(os.waitpid(pid, 0)[1])
thread = threading.Thread(target=work)
thread.start()
thread.join()
(True, status[0])
""",
    "a subprocess with a preexec_fn": """
import os, subprocess
done = subprocess.run(["echo", "hello"], preexec_fn=os.setpgrp, stdout=subprocess.PIPE, check=False)
(done.stdout == b"hello\\n", done.returncode)
""",
    "a pty's other end": """
import os, pty
pid, master = pty.fork()
if not pid:
    print("from the child")
else:
    seen = os.read(master, 100)
(pid == 0 or seen == b"from the child\\r\\n", os.waitpid(pid, 0)[1] if pid else 0)
""",
}


@pytest.mark.parametrize("code", WORKS.values(), ids=WORKS)
async def test_what_forks_for_good_reasons_works_on(sandbox, code):
    kernel = int((await cell(sandbox, "import os; os.getpid()")).result)
    for _ in range(2):
        result = await cell(sandbox, code)
        assert (result.error, result.result) == (None, "(True, 0)"), result
    await assert_one_answers(sandbox, kernel)


async def test_a_copy_made_while_python_starts_is_no_kernel(start_daemon, tmp_path, monkeypatch):
    """A module that Python imports at its start, if the sandbox has one, is the agent's."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'prorl_daemon.ipython_child' in sys.orig_argv: os.fork()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    daemon = start_daemon()
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        kernel = int((await cell(sandbox, "import os; os.getpid()")).result)
        await assert_one_answers(sandbox, kernel)
        await wait_alone(kernel)


async def test_an_answer_to_another_cell_is_not_taken(sandbox):
    """Even one that comes over the kernel's own socket."""
    await cell(sandbox, "1")
    forged = """
import sys
from prorl_daemon.child_wire import CellDone

def control():
    frame = sys._getframe()
    while frame.f_code.co_name != "_serve":
        frame = frame.f_back
    return frame.f_locals["control"]

control().send(CellDone(result="forged", error=None, execution_count=9, dropped_bytes=0, number=1))
"mine"
"""
    assert (await cell(sandbox, forged)).result == "'mine'"
    assert (await cell(sandbox, "1 + 1")).result == "2"


FORGED_FRAMES = {
    "text that is no UTF-8": r"b'\x82\xa4type\xa8CellDone\xa6result\xa2\xff\xfe'",
    "endless nesting": r"b'\x82\xa4type\xa8CellDone\xa8displays' + b'\x91' * 100_000",
    "the largest numbers": "answer(None, execution_count=2**64 - 1, dropped_bytes=2**64 - 1)",
    "more than a frame": "answer('x' * 20_000_000, execution_count=1, dropped_bytes=0)",
}


async def test_no_frame_of_a_cell_ends_the_daemon(sandbox):
    for name, frame in FORGED_FRAMES.items():
        code = f"""
import sys
from msgspec.msgpack import encode

def serving():
    frame = sys._getframe()
    while frame.f_code.co_name != "_serve":
        frame = frame.f_back
    return frame.f_locals

def answer(result, **counts):
    fields = {{"type": "CellDone", "result": result, "error": None, "number": serving()["cell"].number}}
    return encode({{**fields, **counts}})

frame = {frame}
serving()["control"]._socket.sendall(len(frame).to_bytes(4, "little") + frame)
"""
        with suppress(CallFailed):
            await cell(sandbox, code)
        assert (await cell(sandbox, "1 + 1")).result == "2", name
