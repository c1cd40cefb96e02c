"""The persistent IPython session, through a real daemon."""

from __future__ import annotations

import time
from functools import partial

import pytest
import trio

from prorl_daemon.child_wire import NO_MEMORY_EXIT
from prorl_daemon.processes import read_process_table
from prorl_ipc.errors import CallFailed
from prorl_ipc.sandbox_calls import BashResult, BashRun, CellResult, IpythonRestart, IpythonRestarted, IpythonRun
from support.cancel_sweep import cancel_sweep

CALL_TIMEOUT_S = 60


async def cell(sandbox, code, *, timeout_s=30.0, on_chunk=None, **options):
    with trio.fail_after(CALL_TIMEOUT_S + 10):
        request = IpythonRun(code=code, timeout_s=timeout_s, **options)
        return await sandbox.call(request, CellResult, timeout_s=CALL_TIMEOUT_S, on_chunk=on_chunk)


def running(pids: set[int]) -> set[int]:
    return {entry.pid for entry in read_process_table().with_descendants(lambda entry: entry.alive)} & pids


async def test_a_kernel_that_had_no_memory_left_between_two_cells_is_named_by_the_next(sandbox):
    end = f"import os, threading; threading.Timer(0.3, os._exit, [{NO_MEMORY_EXIT}]).start(); os.getpid()"
    kernel = int((await cell(sandbox, end)).result)
    with trio.fail_after(CALL_TIMEOUT_S):
        await trio.sleep(0.3)
        while running({kernel}):
            await trio.sleep(0.01)
    after = await cell(sandbox, "1")
    assert (after.result, after.error, after.restarted, after.breach) == ("1", None, True, "memory")
    assert "no memory left" in after.breach_text
    assert (await cell(sandbox, "1")).breach == ""


@pytest.mark.parametrize("error", ["MemoryError()", "SystemError('error return without exception set')"])
async def test_a_lack_of_memory_outside_of_the_users_code_is_named_however_python_says_it(sandbox, tmp_path, error):
    left = tmp_path / "left"
    lacking = f"def run(*_, **_options):\n    raise {error}\ntype(get_ipython()).run = run\n"
    await cell(sandbox, f"import atexit, pathlib\natexit.register(pathlib.Path({str(left)!r}).touch)\n{lacking}")
    lost = await cell(sandbox, "1")
    assert (lost.error.name, lost.restarted) == ("MemoryError", True)
    assert "the kernel had no memory left" in lost.error.value
    assert not left.exists(), "no code of the user's runs at the end"


async def test_the_systems_number_of_an_error_is_told_whatever_its_class_makes_of_it(sandbox):
    await cell(sandbox, "class Own(OSError):\n    errno = property(lambda self: 1 / 0)")
    expected = {
        "open('/none/such')": 2,
        "raise OSError(27, 'File too large')": 27,
        "raise Own(5, 'x')": 5,
        "raise OSError('[Errno 27] File too large')": None,
        "raise OSError('ENOSPC', 'x')": None,
        "raise OSError(10**30, 'x')": None,
        "raise ValueError('[Errno 27] File too large')": None,
    }
    for code, number in expected.items():
        assert (await cell(sandbox, code)).error.errno == number, code


async def test_a_session_of_good_cells(sandbox, tmp_path):
    expected = [
        ("x = 20", "", None),
        ("x + 1", "", "21"),
        ("_ + 1", "", "22"),
        ("Out[2], _2", "", "(21, 21)"),
        ("x;", "", None),
        ("print('hello'); x", "hello\n", "20"),
        ("print('no newline', end='')", "no newline", None),
        ("def f(a):\n    return a * 2\n\nf(x)", "", "40"),
        ("'text'", "", "'text'"),
        ("None", "", None),
        ("import asyncio\nawait asyncio.sleep(0)\n7", "", "7"),
        ("display({'a': 1})", "{'a': 1}\n", None),
        ("!echo from the shell", "from the shell\n", None),
        ("word = 'of mine'\n!echo $word {x}", "of mine 20\n", None),
        ("print('a', end='')\n!echo b", "ab\n", None),
        ("%%bash\necho magic", "magic\n", None),
        ("lines = !echo captured\nlines", "", "['captured']"),
        ("import os; os.system('echo by C') or None", "by C\n", None),
        ("import subprocess; subprocess.run(['echo', 'by a child']).returncode", "by a child\n", "0"),
        (f"%cd -q {tmp_path}\nos.getcwd()", "", repr(str(tmp_path))),
        ("__name__", "", "'__main__'"),
        ("import sys; sys.argv, sys.path[0]", "", "([''], '')"),
        ("'é€' * 2", "", "'é€é€'"),
        ("print('\\ud800')", "\\ud800\n", None),
        ("print('x', flush=True); os.write(1, b'raw\\xff\\n') and None", "x\nraw\ufffd\n", None),
        ("import multiprocessing\nwith multiprocessing.Pool(2) as pool: r = pool.map(abs, [-1, 2])\nr", "", "[1, 2]"),
        ("list(range(1500))[-1:]", "", "[1499]"),
        ("", "", None),
    ]
    for code, stdout, shown in expected:
        result = await cell(sandbox, code)
        assert result.error is None, (code, result)
        assert (result.stdout, result.result, result.stderr) == (stdout, shown, ""), code
        assert not result.timed_out
        assert not result.restarted
    # An empty cell does not count; every other one does.
    assert result.execution_count == len(expected) - 1


async def test_errors_are_results_and_the_session_lives_on(sandbox):
    failing = [
        ("1/0", "ZeroDivisionError", "division by zero"),
        ("raise ValueError('of é and \\udc80')", "ValueError", "of é and \\udc80"),
        ("def f(:", "SyntaxError", None),
        ("  x = 1\n y = 2", "IndentationError", None),
        ("exit()", "SystemExit", None),
        ("quit", None, None),
        ("import sys; sys.exit(3)", "SystemExit", "3"),
        ("raise SystemExit", "SystemExit", ""),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("input('name? ')", "EOFError", None),
        ("import getpass; getpass.getpass()", "EOFError", None),
        ("%no_such_magic", "UsageError", None),
        ("class Odd(Exception):\n    def __str__(self): raise RuntimeError\nraise Odd", None, None),
        ("class E(BaseException): pass\nraise E", "E", ""),
    ]
    await cell(sandbox, "x = 1")
    for code, name, value in failing:
        result = await cell(sandbox, code)
        assert not result.restarted, (code, result)
        if name is not None:
            assert result.error is not None, (code, result)
            assert result.error.name == name, code
            assert value is None or result.error.value == value, code
            assert "\x1b" not in result.error.traceback, code
        assert result.stdout == "", code
    assert (await cell(sandbox, "x")).result == "1"


async def test_the_history_of_the_session(sandbox):
    for code in ("x = 1", "!true", "1/0", "exit()", "def f(:"):
        await cell(sandbox, code)
    shown = await cell(sandbox, "_i, _ii, _iii, _i2, In[1], len(In), get_ipython().execution_count")
    assert shown.result == repr(("def f(:", "1/0", "!true", "!true", "x = 1", 6, 7))
    assert (await cell(sandbox, "%history -n 1-2")).stdout == "   1: x = 1\n   2: !true\n"
    kept = "kept = get_ipython().history_manager.exceptions; sorted(kept), kept[3]['ename'], kept[3]['evalue']"
    assert (await cell(sandbox, kept)).result == "([3, 4, 5], 'ZeroDivisionError', 'division by zero')"
    assert "1/0" in (await cell(sandbox, "'\\n'.join(kept[3]['traceback'])")).result
    assert (await cell(sandbox, "get_ipython().last_execution_succeeded")).result == "True"
    await cell(sandbox, "%reset -f")
    assert (await cell(sandbox, "'x' in globals(), In[-1]")).result == "(False, \"'x' in globals(), In[-1]\")"


async def test_the_traceback_shows_the_users_code_and_none_of_ours(sandbox):
    await cell(sandbox, "def inner():\n    return 1 / 0")
    result = await cell(sandbox, "inner()")
    assert "return 1 / 0" in result.error.traceback
    assert "ZeroDivisionError: division by zero" in result.error.traceback
    assert "prorl_daemon" not in result.error.traceback


async def test_standard_error_is_apart(sandbox):
    result = await cell(sandbox, "import sys, os; print('e', file=sys.stderr); print('o'); os.system('echo e2 >&2')")
    assert (result.stdout, result.stderr) == ("o\n", "e\ne2\n")


async def test_the_users_namespace_and_environment_hold_nothing_of_ours(sandbox):
    names = (await cell(sandbox, "sorted(n for n in dir() if not n.startswith('_'))")).result
    assert names == "['In', 'Out', 'exit', 'get_ipython', 'open', 'quit']"
    environment = (await cell(sandbox, "import os; dict(os.environ)")).result
    assert "MPLBACKEND" in environment
    for unwanted in ("PYTHONPATH", "LD_", "SECRET"):
        assert unwanted not in environment
    result = await cell(sandbox, "!env; cat /proc/$PPID/environ /proc/self/environ; ls /proc/self/fd | wc -l")
    assert "NODE_SECRET" not in result.stdout
    assert "PYTHONPATH" not in result.stdout.partition("MPLBACKEND")[0]
    assert result.stdout.endswith("4\n")
    assert (await cell(sandbox, "import os; os.listdir(os.path.expanduser('~'))")).result == "[]"


async def test_an_environment_of_the_callers_reaches_the_cells(start_daemon, tmp_path):
    (tmp_path / "mine.py").write_text("answer = 42")
    daemon = start_daemon(env={"PYTHONPATH": str(tmp_path), "MY": "own"}, cwd=str(tmp_path))
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        assert (await cell(sandbox, "import mine, os; mine.answer, os.environ['MY'], os.getcwd()")).result == repr(
            (42, "own", str(tmp_path))
        )
        assert (await cell(sandbox, "!echo $PYTHONPATH")).stdout == f"{tmp_path}\n"
    assert await daemon.wait_ended() == (0, "")


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(100)",
        "while True: pass",
        "!sleep 100",
        "import subprocess as s; s.run(['cat', '/dev/zero'], stdout=s.DEVNULL)",
        "import numpy as np\nwhile True: np.ones((300, 300)) @ np.ones((300, 300))",
        "%timeit -n 1000000000 -r 1 pass\nimport time; time.sleep(100)",
        "%%bash\necho begun\nsleep 100",
    ],
)
async def test_a_cell_that_runs_out_of_time_is_interrupted_and_the_state_is_kept(sandbox, code):
    await cell(sandbox, "x = 'kept'")
    begin = "" if code.startswith("%%") else "print('begun')\n"
    result = await cell(sandbox, begin + code, timeout_s=0.5)
    assert result.timed_out
    assert not result.restarted
    assert result.stdout.startswith("begun\n")
    assert code[0] in "!%" or result.error.name == "KeyboardInterrupt"
    assert (await cell(sandbox, "x")).result == "'kept'"


async def test_a_cell_that_ignores_the_interrupt_is_killed_with_what_it_started(sandbox):
    await cell(sandbox, "x = 1")
    code = """
import subprocess, time
child = subprocess.Popen(["sh", "-c", "trap '' INT; sleep 100"])
print(child.pid)
while True:
    try:
        time.sleep(100)
    except BaseException:
        pass
"""
    result = await cell(sandbox, code, timeout_s=0.5)
    assert (result.timed_out, result.restarted, result.error.name) == (True, True, "KernelDied")
    assert not running({int(result.stdout)})
    result = await cell(sandbox, "'x' in globals()")
    assert (result.result, result.restarted, result.execution_count) == ("False", False, 1)


async def test_a_loop_in_c_that_sees_no_interrupt_is_killed_and_told(sandbox):
    await cell(sandbox, "x = 1")
    result = await cell(sandbox, "print('begun')\nsum(range(10**15))", timeout_s=0.5)
    assert (result.timed_out, result.restarted, result.error.name, result.stdout) == (
        True,
        True,
        "KernelDied",
        "begun\n",
    )
    assert "did not react to an interrupt" in result.error.value
    assert "all variables, functions and imports are lost" in result.error.value
    assert (await cell(sandbox, "'x' in globals()")).result == "False"


async def test_a_kernel_whose_first_thread_ended_is_killed_all_the_same(sandbox):
    code = "import ctypes, os, threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()\n"
    code += "print(os.getpid(), flush=True); ctypes.CDLL(None).pthread_exit(None)"
    result = await cell(sandbox, code, timeout_s=0.5)
    assert (result.timed_out, result.restarted, result.error.name) == (True, True, "KernelDied")
    assert not running({int(result.stdout)})
    assert (await cell(sandbox, "1")).result == "1"


async def test_a_cell_beyond_the_memory_limit_gets_a_memory_error(start_daemon):
    limit_bytes = 512 * 1024 * 1024
    daemon = start_daemon(limits={"memory_bytes": limit_bytes})
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        await cell(sandbox, "x = 'kept'")
        for code in (f"bytearray({limit_bytes})", f"import numpy; numpy.ones({limit_bytes})"):
            result = await cell(sandbox, code)
            assert (result.error.name, result.restarted) == ("MemoryError", False), result
            assert f"may use {limit_bytes} bytes" in result.error.value
            assert f"may use {limit_bytes} bytes" in result.error.traceback
        assert (await cell(sandbox, "x")).result == "'kept'"
    assert await daemon.wait_ended() == (0, "")


async def test_magics(sandbox, tmp_path):
    expected = [
        ("%timeit -n 1 -r 1 pass", "per loop"),
        ("%%timeit -n 1 -r 1\npass", "per loop"),
        ("%time 1", "Wall time"),
        (f"%cd {tmp_path}", str(tmp_path)),
        ("%pwd", ""),
        ("%env ANSWER=42", "env: ANSWER=42"),
        ("!echo $ANSWER", "42"),
        ("%%writefile script.py\nprint('of a script')\n", "Writing script.py"),
        ("%run script.py", "of a script"),
        ("%%sh\necho by sh", "by sh"),
        ("%%capture kept\nprint('captured')", ""),
        ("print(kept.stdout)", "captured"),
        ("%who", ""),
        ("%history -n 1", ""),
        ("%pip --version", "pip"),
        ("sum?", "sum"),
    ]
    for code, stdout in expected:
        result = await cell(sandbox, code)
        assert result.error is None, (code, result)
        assert stdout in result.stdout, (code, result)
        assert not result.restarted
        assert "\x1b" not in result.stdout, code


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import os; print('last words', flush=True); os._exit(7)", 7),
        ("import os, signal; print('last words'); os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import ctypes; print('last words'); ctypes.string_at(0)", 139),
    ],
)
async def test_the_death_of_the_kernel_is_a_result(sandbox, code, exit_code):
    await cell(sandbox, "x = 1")
    result = await cell(sandbox, code)
    assert (result.error.name, result.restarted, result.timed_out) == ("KernelDied", True, False)
    assert f"exit code {exit_code}" in result.error.value
    assert result.stdout == "last words\n"
    result = await cell(sandbox, "'x' in globals()")
    assert (result.result, result.restarted) == ("False", False)


async def test_a_kernel_that_dies_between_cells_is_reported_with_the_next(sandbox):
    pid = int((await cell(sandbox, "import os, threading; os.getpid()")).result)
    await cell(sandbox, "gate = threading.Event()")
    with trio.fail_after(20):
        await sandbox.call(BashRun(command=f"kill -9 {pid}", timeout_s=10), BashResult, timeout_s=20)
        result = await cell(sandbox, "'gate' in globals()")
        if result.error is None:
            assert (result.result, result.restarted) == ("False", True)
        else:  # it died when the cell was already on its way
            assert (result.error.name, result.restarted) == ("KernelDied", True)
    assert not running({pid})


async def test_restart_throws_the_state_away(sandbox):
    await cell(sandbox, "x = 1")
    with trio.fail_after(60):
        pid = (await sandbox.call(IpythonRestart(), IpythonRestarted, timeout_s=60)).pid
    result = await cell(sandbox, "import os; 'x' in globals(), os.getpid()")
    assert (result.result, result.restarted) == (f"(False, {pid})", False)


async def test_restart_before_the_first_cell_starts_it(sandbox):
    with trio.fail_after(60):
        pid = (await sandbox.call(IpythonRestart(), IpythonRestarted, timeout_s=60)).pid
    assert (await cell(sandbox, "import os; os.getpid()")).result == str(pid)


async def test_output_results_and_tracebacks_are_capped(sandbox):
    code = "import sys; print('o' * 100000); print('e' * 100000, file=sys.stderr); 'r' * 100000"
    result = await cell(sandbox, code, max_output_bytes=1000)
    assert result.dropped_bytes == 3 * 99_000 + 1 + 1 + 2
    for text in (result.stdout, result.stderr, result.result):
        assert "bytes left out" in text
        assert len(text) < 1100
    result = await cell(sandbox, "raise ValueError('v' * 100000)", max_output_bytes=1000)
    assert len(result.error.value) < 1100
    assert len(result.error.traceback) < 1100


async def test_much_output(sandbox):
    result = await cell(sandbox, "for i in range(200000): print(i, 'y' * 50)")
    assert result.stdout.startswith("0 yyy")
    assert result.stdout.endswith("yyy\n")
    assert "199999" in result.stdout
    assert result.dropped_bytes == sum(len(str(i)) + 52 for i in range(200_000)) - 64 * 1024


async def test_output_is_streamed_while_the_cell_runs(sandbox, tmp_path):
    chunks = []
    go = tmp_path / "go"
    first = trio.Event()

    def on_chunk(stream, data):
        chunks.append((stream, data))
        first.set()

    async def go_on():
        await first.wait()
        await trio.to_thread.run_sync(go.write_text, "on", abandon_on_cancel=True)

    code = f"import os, sys\nos.mkfifo({str(go)!r})\nprint('one')\nprint(open({str(go)!r}).read(), file=sys.stderr)\n"
    code += "print('two')"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on)
        result = await cell(sandbox, code, stream=True, on_chunk=on_chunk)
    assert result.error is None, result
    assert (result.stdout, result.stderr) == ("one\ntwo\n", "on\n")
    for name, whole in (("stdout", result.stdout), ("stderr", result.stderr)):
        assert b"".join(data for stream, data in chunks if stream == name).decode() == whole


async def test_what_a_thread_prints_between_cells_begins_the_next_output(sandbox, tmp_path):
    code = f"""
import os, threading
os.mkfifo({str(tmp_path / "go")!r}); os.mkfifo({str(tmp_path / "done")!r})
def late():
    open({str(tmp_path / "go")!r}).read()
    print('late')
    open({str(tmp_path / "done")!r}, 'w').close()
threading.Thread(target=late).start()
"""
    await cell(sandbox, code)
    with trio.fail_after(20):
        await trio.to_thread.run_sync((tmp_path / "go").write_text, "", abandon_on_cancel=True)
        await trio.to_thread.run_sync((tmp_path / "done").read_text, abandon_on_cancel=True)
    assert (await cell(sandbox, "print('now')")).stdout == "late\nnow\n"


async def test_a_cancelled_cell_has_ended_when_the_call_returns(sandbox):
    pids = set()
    with trio.CancelScope() as scope:

        def on_chunk(stream, data):
            pids.add(int(data))
            scope.cancel()

        await cell(sandbox, "!sh -c 'echo $$; exec sleep 100'", stream=True, on_chunk=on_chunk)
    assert scope.cancelled_caught
    assert len(pids) == 1
    assert not running(pids)
    assert (await cell(sandbox, "1")).result == "1"


async def test_a_cell_cancelled_at_any_step_leaves_a_working_session(sandbox):
    await cell(sandbox, "x = 'kept'")

    async def check(run):
        result = await cell(sandbox, "print(x)")
        assert (result.error, result.stdout, result.restarted) == (None, "kept\n", False)

    assert await cancel_sweep(partial(cell, sandbox, "x"), check) > 1


async def test_a_cell_that_an_interrupt_is_lost_on_gets_another_before_it_is_killed(sandbox):
    await cell(sandbox, "x = 'kept'")
    loses_one = """
import time
class Slow:
    def __del__(self):  # what is raised in here is told to nobody
        began = time.monotonic()
        while time.monotonic() - began < 0.6: pass
slow = Slow()
del slow
while True: pass
"""
    result = await cell(sandbox, loses_one, timeout_s=0.3)
    assert (result.timed_out, result.restarted) == (True, False)
    assert (await cell(sandbox, "x")).result == "'kept'"


@pytest.mark.alone
@pytest.mark.parametrize("delay_s", [0, 0.0005, 0.001, 0.002, 0.005, 0.02])
async def test_a_cell_cancelled_early_is_interrupted_and_not_waited_for(sandbox, delay_s):
    await cell(sandbox, "x = 'kept'")
    for code in ("while True: pass", "!sleep 100", "import time; time.sleep(100)"):
        started = time.monotonic()
        with trio.move_on_after(delay_s) as scope:
            await cell(sandbox, code)
        assert scope.cancelled_caught
        assert time.monotonic() - started < 1.4  # before anything is killed
        result = await cell(sandbox, "x")
        assert (result.result, result.restarted) == ("'kept'", False)


async def test_a_cell_that_breaks_the_childs_own_machinery_is_survived(sandbox):
    for code in (
        "import sys; sys.stdout.close()",
        "import sys; sys.stdout = sys.stderr = None",
        "import os; [os.close(fd) for fd in range(3, 50)] ",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "import builtins; del builtins.print, builtins.len",
    ):
        await cell(sandbox, code, timeout_s=5)
        await cell(sandbox, "1", timeout_s=5)
    with trio.fail_after(60):
        await sandbox.call(IpythonRestart(), IpythonRestarted, timeout_s=60)
    assert (await cell(sandbox, "print(len('abc'))")).stdout == "3\n"


@pytest.mark.parametrize(
    "call",
    [
        IpythonRun(code="1", timeout_s=-1),
        IpythonRun(code="1", timeout_s=1, max_output_bytes=-1),
        IpythonRun(code="1", timeout_s=1, max_output_bytes=1 << 40),
    ],
)
async def test_a_bad_request_is_refused(sandbox, call):
    with pytest.raises(CallFailed) as failed:
        await sandbox.call(call, CellResult, timeout_s=10)
    assert failed.value.code == "bad_request"


async def test_a_prestarted_kernel_is_there_without_a_cell(start_daemon):
    daemon = start_daemon("--prestart-ipython")
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        started = time.monotonic()
        assert (await cell(sandbox, "1 + 1")).result == "2"
        assert time.monotonic() - started < 20
    assert await daemon.wait_ended() == (0, "")
