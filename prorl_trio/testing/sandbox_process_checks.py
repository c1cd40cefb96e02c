"""Guarantees of a sandbox provider that starts processes on this machine."""

from __future__ import annotations

import hashlib
import math
import os
import random
import secrets
import signal
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.file_calls import EditFile
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.reaper import descendants, is_alive, kill
from prorl_trio.testing.sandbox_check import (
    ACTION_TIMEOUT_S,
    CHECK_TIMEOUT_S,
    Contract,
    assert_no_more,
    bash,
    checked_sandbox,
    command_of,
    open_and_close,
    planted_secret,
    raises,
    traces,
)
from prorl_trio.types.errors import SandboxLost, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from prorl_trio.sandbox.reaper import ProcessId
    from prorl_trio.sandbox.sandbox import Sandbox


LOSS_TOLD_WITHIN_S: Final = 2.0
"""Time limit for failing a call in flight after the death of its daemon."""


async def check_files_that_may_not_be_written(contract: Contract) -> None:
    """A file is replaced only if a program may open it for writing. For root on its machine, this is any file."""
    async with checked_sandbox(contract) as sandbox:
        home = (await sandbox.exec(["sh", "-c", "echo $HOME"], timeout_s=ACTION_TIMEOUT_S)).stdout.decode().strip()
        path = f"{home}/fixed"
        await sandbox.write_file(path, b"old", mode=0o444)
        writable = (await sandbox.exec(["test", "-w", path], timeout_s=ACTION_TIMEOUT_S)).exit_code == 0
        edit = EditFile(command="str_replace", path=path, old_str="old", new_str="edited")
        assert (await sandbox.edit_file(edit)).ok == writable
        try:
            await sandbox.write_file(path, b"new")
        except PermissionError:
            assert not writable
            assert await sandbox.read_file(path) == b"old"
        else:
            assert writable
            assert await sandbox.read_file(path) == b"new"


async def check_what_exec_leaves(contract: Contract) -> None:
    """None of its processes keep running, wherever they moved; background processes of the shell do."""
    seconds = 10**6 + secrets.randbelow(10**6)  # distinguishes these processes from others
    stay = f"sleep {seconds}1 & setsid sleep {seconds}2 & (setsid -f sleep {seconds}3)"
    leave = f"setsid sleep {seconds}4 & setsid -f env -i sleep {seconds}5; (setsid -f sh -c 'sleep {seconds}6; :' &)"
    async with checked_sandbox(contract) as sandbox:
        await sandbox.bash(stay, timeout_s=ACTION_TIMEOUT_S)
        assert (await sandbox.exec(["sh", "-c", leave], timeout_s=ACTION_TIMEOUT_S)).exit_code == 0
        listed = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], timeout_s=ACTION_TIMEOUT_S)
        running = [number for number in range(1, 7) if f"sleep {seconds}{number}".encode() in listed.stdout]
        assert running == [1, 2, 3]


async def check_long_input(contract: Contract) -> None:
    """Input larger than a frame arrives bit for bit, whether the program reads it, ignores it, or cannot start."""
    content = random.Random(1).randbytes(1024) * 24 * 1024
    async with checked_sandbox(contract) as sandbox:
        result = await sandbox.exec(["sha256sum"], timeout_s=ACTION_TIMEOUT_S, stdin=content)
        assert result.stdout.split()[0].decode() == hashlib.sha256(content).hexdigest()
        assert (await sandbox.exec(["head", "-c", "3"], timeout_s=ACTION_TIMEOUT_S, stdin=content)).stdout == content[
            :3
        ]
        assert (await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S, stdin=content)).exit_code == 0
        assert (await sandbox.exec(["sleep", "7000"], timeout_s=0.2, stdin=content)).timed_out
        missing = sandbox.exec(["/no/such/program"], timeout_s=ACTION_TIMEOUT_S, stdin=content)
        await raises(FileNotFoundError, missing)
        assert (await sandbox.exec(["cat"], timeout_s=ACTION_TIMEOUT_S, stdin=b"short")).stdout == b"short"


async def check_streamed_output(contract: Contract) -> None:
    """All output arrives in order, regardless of the result's limit; an exception of the receiver ends the program."""
    content = random.Random(2).randbytes(1024) * 8 * 1024
    came: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    async with checked_sandbox(contract) as sandbox:
        result = await sandbox.exec(
            ["cat"],
            timeout_s=ACTION_TIMEOUT_S,
            stdin=content,
            max_output_bytes=1000,
            on_output=lambda stream, data: came[stream].extend(data),
        )
        assert came == {"stdout": content, "stderr": b""}
        assert result.stdout_dropped_bytes >= len(content) - 1000

        def refuse(stream: str, data: bytes) -> None:
            raise ZeroDivisionError(f"{stream}: {len(data)}")

        await raises(ZeroDivisionError, sandbox.exec(["echo", "x"], timeout_s=ACTION_TIMEOUT_S, on_output=refuse))
        assert (await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S)).exit_code == 0


async def check_programs_that_are_talked_to(contract: Contract) -> None:
    """Each answer arrives before the next question; a program ends with its block, its input or its time."""
    async with checked_sandbox(contract) as sandbox:
        async with sandbox.open_program(["cat"], timeout_s=ACTION_TIMEOUT_S) as program:
            for number in range(20):
                await program.send(b"%d\n" % number)
                assert await program.receive_some() == b"%d\n" % number
            await program.send_eof()
            assert await program.receive_some() == b""
            assert (await program.wait()).exit_code == 0
        async with sandbox.open_program(["cat"], timeout_s=ACTION_TIMEOUT_S):
            pass
        async with sandbox.open_program(["sleep", "7000"], timeout_s=0.2) as program:
            assert await program.receive_some() == b""
            assert (await program.wait()).timed_out
        await raises(FileNotFoundError, _end_of(sandbox, "/no/such/program"))
        with trio.fail_after(ACTION_TIMEOUT_S / 2):
            await raises(FileNotFoundError, _feed(sandbox, "/no/such/program"))
            assert await _feed(sandbox, "true") == 0
        assert (await sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S)).exit_code == 0


async def _end_of(sandbox: Sandbox, program: str) -> None:
    async with sandbox.open_program([program], timeout_s=ACTION_TIMEOUT_S) as running:
        await running.wait()


async def _feed(sandbox: Sandbox, program: str) -> int | None:
    async with sandbox.open_program([program], timeout_s=ACTION_TIMEOUT_S) as running:
        with suppress(trio.BrokenResourceError):
            while True:
                await running.send(b"x\n")
        return (await running.wait()).exit_code


async def check_users(contract: Contract) -> None:
    """A program runs as the sandbox's own user by any of its names; another user works or is refused with a message."""
    async with checked_sandbox(contract) as sandbox:
        who = "id -u; echo $HOME"
        own = (await sandbox.exec(["sh", "-c", who], timeout_s=ACTION_TIMEOUT_S)).stdout
        name = own.split()[0].decode()
        assert (await sandbox.exec(["sh", "-c", who], timeout_s=ACTION_TIMEOUT_S, user=name)).stdout == own
        await raises(ValueError, sandbox.exec(["true"], timeout_s=ACTION_TIMEOUT_S, user="no-such-user"))
        known = (await sandbox.exec(["cat", "/etc/passwd"], timeout_s=ACTION_TIMEOUT_S)).stdout.decode().split("\n")
        others = [line.split(":")[0] for line in known if line and line.split(":")[2] != name]
        refusal = ""
        try:
            result = await sandbox.exec(["id", "-un"], timeout_s=ACTION_TIMEOUT_S, user=others[0])
        except PermissionError as exc:
            refusal = str(exc)
        assert "sandbox.fakeroot" in refusal if refusal else result.stdout.decode().strip() == others[0]


EXEC_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_files_that_may_not_be_written,
    check_what_exec_leaves,
    check_long_input,
    check_streamed_output,
    check_programs_that_are_talked_to,
    check_users,
)


async def check_mathematics(contract: Contract) -> None:
    """NumPy, SciPy and SymPy can be imported and used."""
    code = "import numpy, scipy.optimize, sympy\nroot = scipy.optimize.brentq(lambda x: x * x - 4, 0, 9)\n"
    code += "float(numpy.ones(3).sum()), round(root, 6), sympy.factorint(12)"
    async with checked_sandbox(contract) as sandbox:
        cell = await sandbox.ipython(code, timeout_s=CHECK_TIMEOUT_S / 2)
        assert (cell.error, cell.result) == (None, "(3.0, 2.0, {2: 2, 3: 1})")


async def check_images_of_cells(contract: Contract) -> None:
    """An image displayed by a cell arrives unchanged."""
    code = "class Dot:\n    def _repr_png_(self): return b'\\x89PNG' + bytes(1000)\nDot()"
    async with checked_sandbox(contract) as sandbox:
        cell = await sandbox.ipython(code, timeout_s=ACTION_TIMEOUT_S)
        assert [(display.mime, display.data) for display in cell.displays] == [("image/png", b"\x89PNG" + bytes(1000))]


async def check_cancelled_start(contract: Contract) -> None:
    """A start cancelled at any moment leaves nothing. The delay is doubled until the start succeeds."""
    with trio.fail_after(CHECK_TIMEOUT_S):
        before = traces(contract.base)
        for exponent in range(30):
            with trio.move_on_after(0.001 * 1.5**exponent) as scope:
                await open_and_close(contract, SandboxSpec())
            assert_no_more(before, traces(contract.base))
            if not scope.cancelled_caught:
                return
        raise AssertionError("it never started")


async def check_start_timeout(contract: Contract) -> None:
    """A start that takes too long reports its limit and leaves nothing."""
    with trio.fail_after(CHECK_TIMEOUT_S):
        before = traces(contract.base)
        error = await raises(SandboxUnavailable, open_and_close(contract, SandboxSpec(start_timeout_s=0.004)))
        assert "0.004 s" in str(error)
        assert_no_more(before, traces(contract.base))


async def check_killed_from_outside(contract: Contract) -> None:
    """The death of a daemon is noticed at once, even in the middle of a command."""
    async with checked_sandbox(contract) as sandbox:
        await bash(sandbox, "true")
        assert await _kill_in_flight(sandbox) < LOSS_TOLD_WITHIN_S
        await raises(SandboxLost, sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S))


async def check_what_a_killed_daemon_leaves(contract: Contract) -> None:
    """A daemon killed in the middle of a command loses its sandbox, and leaves no process."""
    async with _sandbox_with_background(contract) as sandbox:
        assert await _kill_in_flight(sandbox) < LOSS_TOLD_WITHIN_S


async def check_what_a_daemon_killed_from_inside_leaves(contract: Contract) -> None:
    """An agent may try to kill its daemon.

    The sandbox is lost or stays usable; in both cases no process outlives it.
    """
    async with _sandbox_with_background(contract) as sandbox:
        try:
            await sandbox.bash(f"kill -9 {_pid_inside(_find_daemon())}", timeout_s=ACTION_TIMEOUT_S)
        except SandboxLost:
            return
        await bash(sandbox, "true")


async def _kill_in_flight(sandbox: Sandbox) -> float:
    """Kill the daemon in the middle of a command; return the seconds until the call failed, or infinity."""
    lost_after_s = math.inf

    async def act() -> None:
        nonlocal lost_after_s
        try:
            await sandbox.bash("sleep 3602", timeout_s=3600)
        except SandboxLost:
            lost_after_s = trio.current_time() - killed_at

    async with trio.open_nursery() as nursery:
        nursery.start_soon(act)
        await _wait_for_commands("sleep 3602")
        killed_at = trio.current_time()
        os.kill(_find_daemon(), signal.SIGKILL)
    return lost_after_s


def _find_daemon() -> int:
    """Return the pid of the only daemon below this process."""
    daemons = [process for process in descendants(os.getpid()) if _is_daemon(process.pid)]
    # The innermost process: without a PID namespace, a guard running the same program is above it.
    (daemon,) = (daemon for daemon in daemons if not descendants(daemon.pid) & {*daemons})
    return daemon.pid


def _is_daemon(pid: int) -> bool:
    arguments = command_of(pid).split()
    return arguments[1:3] == ["-m", "prorl_daemon"]


def _pid_inside(pid: int) -> str:
    """Return the pid of a process in its own PID namespace."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    (pids,) = (line for line in status.splitlines() if line.startswith("NSpid:"))
    return pids.split()[-1]


@asynccontextmanager
async def _sandbox_with_background(contract: Contract) -> AsyncIterator[Sandbox]:
    """Open a sandbox with background processes, and verify afterwards that they have ended. Kills survivors.

    One process is started plainly, one in its own session, and one there that ignores signals.
    """
    mark = 10**6 + secrets.randbelow(10**6)  # distinguishes these processes from others
    stubborn = f"trap '' TERM HUP INT; sleep {mark}3; true"
    started: dict[ProcessId, str] = {}
    try:
        async with checked_sandbox(contract) as sandbox:
            for command in (f"sleep {mark}1 &", f"setsid sleep {mark}2 &", f'(setsid sh -c "{stubborn}" &)'):
                await bash(sandbox, command)
            lines = (f"sleep {mark}1", f"sleep {mark}2", f"sleep {mark}3", f"sh -c {stubborn}")
            started = await _wait_for_commands(*lines)
            yield sandbox
        # The close has already waited for them. Orphaned processes are not in `traces`.
        left = [f"{process.pid} {command}" for process, command in started.items() if is_alive(process)]
        assert not left, f"outlived their sandbox: {left}"
    finally:
        kill(started)


async def _wait_for_commands(*lines: str) -> dict[ProcessId, str]:
    """Return the processes below this one that match these command lines, once each of `lines` matches one."""
    while True:
        running = {process: command_of(process.pid).strip() for process in descendants(os.getpid())}
        found = {process: line for process, line in running.items() if line in lines}
        if {*found.values()} == {*lines}:
            return found
        await trio.sleep(0.01)  # exec in another process gives no event to wait for


async def check_background_processes_end(contract: Contract) -> None:
    """No process started inside outlives the sandbox, even if it left its session or ignores signals."""
    async with _sandbox_with_background(contract):
        pass


async def check_environment_is_clean(contract: Contract) -> None:
    """A tool's environment contains no variable of this process or of the daemon."""
    with planted_secret() as secret:
        async with checked_sandbox(contract) as sandbox:
            seen = await bash(sandbox, "env; cat /proc/$PPID/environ 2>/dev/null | tr '\\0' '\\n'; true")
            cell = await sandbox.ipython("import os; print(dict(os.environ))", timeout_s=ACTION_TIMEOUT_S)
            tools = await bash(sandbox, "env")
    assert secret not in seen + cell.stdout
    assert not [line for line in tools.splitlines() if line.startswith(("PYTHON", "LD_", "APPTAINER"))]


async def check_python_is_the_projects(contract: Contract) -> None:
    """`python3` has the promised packages, in the shell and in IPython."""
    async with checked_sandbox(contract) as sandbox:
        assert await bash(sandbox, "python3 -c 'import numpy, sympy; print(sympy.sqrt(16))'") == "4"
        cell = await sandbox.ipython("import sympy; sympy.sqrt(16)", timeout_s=ACTION_TIMEOUT_S)
        assert cell.result == "4"


PROCESS_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_mathematics,
    check_images_of_cells,
    check_cancelled_start,
    check_start_timeout,
    check_killed_from_outside,
    check_what_a_killed_daemon_leaves,
    check_what_a_daemon_killed_from_inside_leaves,
    check_background_processes_end,
    check_environment_is_clean,
    check_python_is_the_projects,
    *EXEC_CHECKS,
)
