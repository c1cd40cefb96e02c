"""What every sandbox provider promises, as checks anyone can run against theirs.

`CORE_CHECKS` hold for any provider, also an in-memory fake; `PROCESS_CHECKS` for those that start processes here;
`ISOLATION_CHECKS` for those that say `isolated`. A check takes a `Contract` and raises AssertionError. Each has its own
deadline. They use what a sandbox itself offers, so they hold for whatever is inside.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import tempfile
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import trio

import prorl_trio
from ipc.file_calls import EditFile
from prorl_trio.errors import SandboxLost, SandboxUnavailable
from prorl_trio.sandbox.provider import SandboxSpec, ShellBusy, ShellIdle, TransferOptions
from prorl_trio.sandbox.reaper import descendants, is_alive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from prorl_trio.sandbox.provider import Sandbox, SandboxProvider
    from prorl_trio.sandbox.reaper import ProcessId

__all__ = ["CORE_CHECKS", "ISOLATION_CHECKS", "PROCESS_CHECKS", "Contract"]

CHECK_TIMEOUT_S: Final = 60.0
ACTION_TIMEOUT_S: Final = 20.0


E = TypeVar("E", bound=Exception)


class Contract(NamedTuple):
    """Whom to check. `base` is the provider's `runtime_dir`, empty, and used by nobody else."""

    provider: SandboxProvider
    base: Path


@asynccontextmanager
async def _sandbox(contract: Contract, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
    """A sandbox to look at, and afterwards proof that nothing is left of it."""
    with trio.fail_after(CHECK_TIMEOUT_S):
        before = _traces(contract.base)
        async with contract.provider.open_sandbox(spec or SandboxSpec()) as sandbox:
            yield sandbox
        _assert_no_more(before, _traces(contract.base))


class _Traces(NamedTuple):
    processes: frozenset[str]
    mounts: frozenset[str]
    files: frozenset[str]
    open_fds: int


def _traces(base: Path) -> _Traces:
    return _Traces(
        frozenset(f"{process.pid} {_command_of(process.pid)}" for process in descendants(os.getpid())),
        frozenset(Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()),
        frozenset(str(path) for path in base.rglob("*")),
        len(os.listdir("/proc/self/fd")),
    )


def _assert_no_more(before: _Traces, after: _Traces) -> None:
    assert after.processes <= before.processes, f"processes left: {after.processes - before.processes}"
    assert after.mounts <= before.mounts, f"mounts left: {after.mounts - before.mounts}"
    assert after.files <= before.files, f"files left: {after.files - before.files}"
    assert after.open_fds <= before.open_fds, f"{after.open_fds - before.open_fds} file descriptors left open"


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


async def _bash(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.bash(command, timeout_s=ACTION_TIMEOUT_S)
    assert result.exit_code == 0, f"{command!r} exited with {result.exit_code}: {result.output}"
    return result.output.strip()


# ---------------------------------------------------------------- any provider


async def check_bash_keeps_state(contract: Contract) -> None:
    """Variables and the working directory persist from one command to the next."""
    async with _sandbox(contract) as sandbox:
        await _bash(sandbox, "greeting=hello\ncd /tmp")
        assert await _bash(sandbox, "echo $greeting") == "hello"
        result = await sandbox.bash("pwd", timeout_s=ACTION_TIMEOUT_S)
        assert (result.output.strip(), result.cwd) == ("/tmp", "/tmp")


async def check_exit_code_is_a_result(contract: Contract) -> None:
    """A command that fails is no error."""
    async with _sandbox(contract) as sandbox:
        assert (await sandbox.bash("false", timeout_s=ACTION_TIMEOUT_S)).exit_code == 1
        assert (await sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S)).exit_code == 0
        ended = await sandbox.bash("exit 3", timeout_s=ACTION_TIMEOUT_S)
        assert (ended.exit_code, ended.restarted) == (3, True)
        assert await _bash(sandbox, "echo again") == "again"


async def check_bash_timeout(contract: Contract) -> None:
    """A command that does not end in time is ended, and the sandbox lives on."""
    async with _sandbox(contract) as sandbox:
        result = await sandbox.bash("echo before\nsleep 3600", timeout_s=0.3)
        assert result.timed_out
        assert result.output.startswith("before")
        assert await _bash(sandbox, "echo after") == "after"


async def check_environment_is_as_specified(contract: Contract) -> None:
    """Variables of the spec reach the tools."""
    async with _sandbox(contract, SandboxSpec(env={"FLAVOUR": "vanilla"})) as sandbox:
        assert await _bash(sandbox, "echo $FLAVOUR") == "vanilla"


async def check_ipython_keeps_state(contract: Contract) -> None:
    """Names persist, the last expression is the result, an exception is a result too, a restart forgets."""
    async with _sandbox(contract) as sandbox:
        first = await sandbox.ipython("x = 41", timeout_s=ACTION_TIMEOUT_S)
        assert (first.result, first.error) == (None, None)
        second = await sandbox.ipython("print(x)\nx + 1", timeout_s=ACTION_TIMEOUT_S)
        assert (second.stdout, second.result) == ("41\n", "42")
        failed = await sandbox.ipython("1 / 0", timeout_s=ACTION_TIMEOUT_S)
        assert failed.error is not None
        assert failed.error.name == "ZeroDivisionError"
        await sandbox.restart_ipython()
        forgotten = await sandbox.ipython("x", timeout_s=ACTION_TIMEOUT_S)
        assert forgotten.error is not None
        assert forgotten.error.name == "NameError"


async def check_unknown_kernel(contract: Contract) -> None:
    """A Jupyter kernel that is not there is refused by its name; the sandbox and its own shell live on."""
    async with _sandbox(contract) as sandbox:
        await sandbox.ipython("x = 41", timeout_s=ACTION_TIMEOUT_S)
        error = await _raises(
            SandboxUnavailable, sandbox.ipython("1", timeout_s=ACTION_TIMEOUT_S, kernel="no-such-kernel")
        )
        assert "no-such-kernel" in str(error)
        await _raises(SandboxUnavailable, sandbox.restart_ipython(kernel="no-such-kernel"))
        assert (await sandbox.ipython("x", timeout_s=ACTION_TIMEOUT_S)).result == "41"


async def check_files_round_trip(contract: Contract) -> None:
    """5 MB come back bit for bit; what cannot be read says so as a file would."""
    content = os.urandom(5 * 1024 * 1024)
    async with _sandbox(contract) as sandbox:
        await sandbox.write_file("/tmp/new/folder/file.bin", content)
        assert await sandbox.read_file("/tmp/new/folder/file.bin") == content
        await sandbox.write_file("/tmp/new/folder/file.bin", b"")
        assert await sandbox.read_file("/tmp/new/folder/file.bin") == b""
        await sandbox.write_file("/tmp/three", b"123")
        await _raises(FileNotFoundError, sandbox.read_file("/tmp/none"))
        await _raises(IsADirectoryError, sandbox.read_file("/tmp/new"))
        await _raises(ValueError, sandbox.read_file("/tmp/three", max_bytes=2))
        await _raises(ValueError, sandbox.read_file("three"))


async def check_exec_is_one_shot(contract: Contract) -> None:
    """A program's streams come apart and exact, its exit code and its timeout are results, an unknown one is not."""
    async with _sandbox(contract) as sandbox:
        echoed = await sandbox.exec(["echo", "two  words"], timeout_s=ACTION_TIMEOUT_S)
        assert (echoed.exit_code, echoed.stdout, echoed.stderr) == (0, b"two  words\n", b"")
        content = bytes(range(256)) * 1000
        assert (await sandbox.exec(["cat"], timeout_s=ACTION_TIMEOUT_S, stdin=content)).stdout == content
        assert (await sandbox.exec(["false"], timeout_s=ACTION_TIMEOUT_S)).exit_code == 1
        late = await sandbox.exec(["sleep", "3600"], timeout_s=0.2)
        assert (late.exit_code, late.timed_out) == (None, True)
        await _raises(FileNotFoundError, sandbox.exec(["no-such-program"], timeout_s=ACTION_TIMEOUT_S))
        assert await _bash(sandbox, "echo alive") == "alive"


async def check_editor(contract: Contract) -> None:
    """An agent's editor creates once, replaces what is there exactly once, and says what it did not do."""
    async with _sandbox(contract) as sandbox:
        path = f"/tmp/edited-{secrets.token_hex(4)}"
        assert (await sandbox.edit_file(EditFile(command="create", path=path, file_text="a\nb\nb\n"))).ok
        assert not (await sandbox.edit_file(EditFile(command="create", path=path, file_text="other"))).ok
        assert not (await sandbox.edit_file(EditFile(command="str_replace", path=path, old_str="b", new_str="c"))).ok
        assert (await sandbox.edit_file(EditFile(command="str_replace", path=path, old_str="a", new_str="x"))).ok
        viewed = await sandbox.edit_file(EditFile(command="view", path=path))
        assert viewed.ok
        assert viewed.output.endswith("     1\tx\n     2\tb\n     3\tb\n")
        assert await sandbox.read_file(path) == b"x\nb\nb\n"
        await sandbox.bash(f"rm {path}", timeout_s=ACTION_TIMEOUT_S)  # not every provider has a /tmp of its own
        assert not (await sandbox.edit_file(EditFile(command="view", path="/tmp/none"))).ok


async def check_folders_travel(contract: Contract) -> None:
    """A folder goes in and comes out with its files bit for bit; what is there is not overwritten unless told so."""
    async with _sandbox(contract) as sandbox:
        remote = f"/tmp/tree-{secrets.token_hex(4)}"
        with tempfile.TemporaryDirectory() as scratch:
            await _travel(sandbox, Path(scratch), remote)
        await sandbox.bash(f"rm -r {remote}", timeout_s=ACTION_TIMEOUT_S)  # not every provider has a /tmp of its own


async def _travel(sandbox: Sandbox, scratch: Path, remote: str) -> None:
    content = {"deep/er/file": os.urandom(3_000_000), "script": b"#!/bin/sh"}
    for name, data in content.items():
        _write(scratch / "in" / name, data)
    report = await sandbox.upload(scratch / "in", remote)
    assert report.size_bytes == 3_000_009
    assert await sandbox.read_file(f"{remote}/script") == content["script"]
    await _raises(FileExistsError, sandbox.upload(scratch / "in", remote))
    await sandbox.upload(scratch / "in", remote, options=TransferOptions(overwrite=True))
    await sandbox.download(remote, scratch / "out")
    assert _contents(scratch / "out") == content
    await sandbox.download(f"{remote}/script", scratch / "one")
    await _raises(FileExistsError, sandbox.download(remote, scratch / "out"))
    await _raises(FileNotFoundError, sandbox.download("/tmp/none", scratch / "none"))
    small = TransferOptions(max_bytes=1000)
    await _raises(ValueError, sandbox.download(remote, scratch / "large", options=small))
    assert sorted(os.listdir(scratch)) == ["in", "one", "out"]


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def _raises(kind: type[E], action: Awaitable[object]) -> E:
    try:
        await action
    except kind as exc:
        return exc
    raise AssertionError(f"{kind.__name__} was not raised")


async def _open_and_close(contract: Contract, spec: SandboxSpec) -> None:
    async with contract.provider.open_sandbox(spec):
        pass


async def check_output_is_capped(contract: Contract) -> None:
    """Of a long output the first and the last part are kept, and what is missing is counted."""
    async with _sandbox(contract) as sandbox:
        words = " ".join(f"word{i}" for i in range(2000))
        result = await sandbox.bash(f"echo {words}", timeout_s=ACTION_TIMEOUT_S, max_output_bytes=1000)
        assert result.dropped_bytes > 10_000
        assert len(result.output) < 1200
        assert result.output.startswith("word0 ")
        assert result.output.rstrip().endswith("word1999")


async def check_commands_that_go_on(contract: Contract) -> None:
    """A silent command is handed back running, takes input and C-c, and keeps others out; a restart ends it."""
    async with _sandbox(contract) as sandbox:
        result = await sandbox.bash("read name; echo got $name", timeout_s=ACTION_TIMEOUT_S, quiet_timeout_s=0.2)
        assert (result.running, result.exit_code) == (True, None)
        await _raises(ShellBusy, sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S))
        result = await sandbox.bash_input(b"you\n", timeout_s=ACTION_TIMEOUT_S)
        assert (result.running, result.exit_code, result.output) == (False, 0, "got you\n")
        await _raises(ShellIdle, sandbox.bash_input(b"", timeout_s=ACTION_TIMEOUT_S))
        await sandbox.bash("sleep 3604", timeout_s=ACTION_TIMEOUT_S, quiet_timeout_s=0.2)
        result = await sandbox.bash_input(b"\x03", timeout_s=ACTION_TIMEOUT_S)
        assert (result.running, result.exit_code) == (False, 130)
        await sandbox.bash("sleep 3605", timeout_s=ACTION_TIMEOUT_S, quiet_timeout_s=0.2)
        await sandbox.restart_bash()
        assert await _bash(sandbox, "echo anew") == "anew"


async def check_closed_is_lost(contract: Contract) -> None:
    """After the block every call raises SandboxLost, again and again."""
    async with _sandbox(contract) as sandbox:
        pass
    with trio.fail_after(ACTION_TIMEOUT_S):
        await _raises(SandboxLost, sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S))
        await _raises(SandboxLost, sandbox.read_file("/tmp/three"))


async def check_error_in_the_block(contract: Contract) -> None:
    """An error of the user's own comes out as it is, and the sandbox is gone."""
    error = RuntimeError("the user's own")

    async def fail() -> None:
        async with contract.provider.open_sandbox(SandboxSpec()) as sandbox:
            await _bash(sandbox, "true")
            raise error

    with trio.fail_after(CHECK_TIMEOUT_S):
        before = _traces(contract.base)
        assert await _raises(RuntimeError, fail()) is error
        _assert_no_more(before, _traces(contract.base))


async def check_unusable_image(contract: Contract) -> None:
    """The reason is in the message, and nothing is left."""
    with trio.fail_after(CHECK_TIMEOUT_S):
        before = _traces(contract.base)
        error = await _raises(SandboxUnavailable, _open_and_close(contract, SandboxSpec(image="/does/not/exist")))
        assert "/does/not/exist" in str(error)
        _assert_no_more(before, _traces(contract.base))


async def check_one_action_at_a_time(contract: Contract) -> None:
    """Concurrent actions wait for each other, and all get their own answer."""
    async with _sandbox(contract) as sandbox:
        answers: dict[int, str] = {}

        async def ask(number: int) -> None:
            answers[number] = await _bash(sandbox, f"echo {number}")

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask, number)
        assert answers == {number: str(number) for number in range(5)}


async def check_two_at_once(contract: Contract) -> None:
    """Two sandboxes do not see each other's state."""
    async with _sandbox(contract) as first, contract.provider.open_sandbox(SandboxSpec()) as second:
        assert first.sandbox_id != second.sandbox_id
        await _bash(first, "who=first")
        await _bash(second, "who=second")
        assert await _bash(first, "echo $who") == "first"
        assert await _bash(second, "echo $who") == "second"


async def check_cancelled_call(contract: Contract) -> None:
    """A cancelled command has ended when the call returns; the sandbox is usable, or lost for good."""
    async with _sandbox(contract) as sandbox:
        await _bash(sandbox, "true")
        with trio.move_on_after(0.2) as scope:
            await sandbox.bash("sleep 3601", timeout_s=3600)
        assert scope.cancelled_caught
        assert not [pid for pid in descendants(os.getpid()) if "sleep 3601" in _command_of(pid.pid)]
        try:
            assert await _bash(sandbox, "echo alive") == "alive"
        except SandboxLost:
            await _raises(SandboxLost, sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S))


# ---------------------------------------------------------------- providers with processes


async def check_mathematics(contract: Contract) -> None:
    """NumPy, SciPy and SymPy can be imported and work."""
    code = "import numpy, scipy.optimize, sympy\nroot = scipy.optimize.brentq(lambda x: x * x - 4, 0, 9)\n"
    code += "float(numpy.ones(3).sum()), round(root, 6), sympy.factorint(12)"
    async with _sandbox(contract) as sandbox:
        cell = await sandbox.ipython(code, timeout_s=CHECK_TIMEOUT_S / 2)
        assert (cell.error, cell.result) == (None, "(3.0, 2.0, {2: 2, 3: 1})")


async def check_images_of_cells(contract: Contract) -> None:
    """An image that a cell shows arrives as its own bytes."""
    code = "class Dot:\n    def _repr_png_(self): return b'\\x89PNG' + bytes(1000)\nDot()"
    async with _sandbox(contract) as sandbox:
        cell = await sandbox.ipython(code, timeout_s=ACTION_TIMEOUT_S)
        assert [(display.mime, display.data) for display in cell.displays] == [("image/png", b"\x89PNG" + bytes(1000))]


async def check_cancelled_start(contract: Contract) -> None:
    """Cancelled at any moment of its start, nothing of a sandbox is left. Moments are doubled until it succeeds."""
    with trio.fail_after(CHECK_TIMEOUT_S):
        before = _traces(contract.base)
        for exponent in range(30):
            with trio.move_on_after(0.001 * 1.5**exponent) as scope:
                await _open_and_close(contract, SandboxSpec())
            _assert_no_more(before, _traces(contract.base))
            if not scope.cancelled_caught:
                return
        raise AssertionError("it never started")


async def check_start_timeout(contract: Contract) -> None:
    """A start that takes too long says so, with its limit, and leaves nothing."""
    with trio.fail_after(CHECK_TIMEOUT_S):
        before = _traces(contract.base)
        error = await _raises(SandboxUnavailable, _open_and_close(contract, SandboxSpec(start_timeout_s=0.02)))
        assert "0.02 s" in str(error)
        _assert_no_more(before, _traces(contract.base))


async def check_killed_from_outside(contract: Contract) -> None:
    """A daemon that dies is noticed at once, also in the middle of a command."""
    async with _sandbox(contract) as sandbox:
        await _bash(sandbox, "true")
        lost_after_s = math.inf

        async def act() -> None:
            nonlocal lost_after_s
            try:
                await sandbox.bash("sleep 3602", timeout_s=3600)
            except SandboxLost:
                lost_after_s = trio.current_time() - killed_at

        async with trio.open_nursery() as nursery:
            nursery.start_soon(act)
            await _wait_for_command("sleep 3602")
            killed_at = trio.current_time()
            (daemon,) = (process for process in descendants(os.getpid()) if _is_daemon(process.pid))
            os.kill(daemon.pid, signal.SIGKILL)
        assert lost_after_s < 2.0
        await _raises(SandboxLost, sandbox.bash("true", timeout_s=ACTION_TIMEOUT_S))


async def _wait_for_command(command: str) -> None:
    # Another process's exec is no event we could wait for.
    while not any(command in _command_of(process.pid) for process in descendants(os.getpid())):  # noqa: ASYNC110
        await trio.sleep(0.01)


def _is_daemon(pid: int) -> bool:
    arguments = _command_of(pid).split()
    return arguments[1:3] == ["-m", "sandbox_daemon"]


async def check_background_processes_end(contract: Contract) -> None:
    """Nothing that was started inside outlives the sandbox, also what left its session or ignores signals."""
    async with _sandbox(contract) as sandbox:
        stubborn = "(setsid sh -c 'trap \"\" TERM HUP INT; sleep 3603; true' &)"
        for command in ("sleep 3603 &", "setsid sleep 3603 &", stubborn):
            await _bash(sandbox, command)
        started: set[ProcessId] = set()
        while len(started) < 4:  # three sleeps and a sh; another process's exec is no event we could wait for
            await trio.sleep(0.01)
            started = {process for process in descendants(os.getpid()) if "sleep 3603" in _command_of(process.pid)}
    assert not any(map(is_alive, started))


async def check_environment_is_clean(contract: Contract) -> None:
    """Nothing of this process's environment, nor of the daemon's own, is in a tool's."""
    with _planted_secret() as secret:
        async with _sandbox(contract) as sandbox:
            seen = await _bash(sandbox, "env; tr '\\0' '\\n' < /proc/$PPID/environ")
            cell = await sandbox.ipython("import os; print(dict(os.environ))", timeout_s=ACTION_TIMEOUT_S)
            tools = await _bash(sandbox, "env")
    assert secret not in seen + cell.stdout
    assert not [line for line in tools.splitlines() if line.startswith(("PYTHON", "LD_", "APPTAINER"))]


@contextmanager
def _planted_secret() -> Iterator[str]:
    secret = f"planted-{secrets.token_hex(8)}"
    os.environ["PRORL_PLANTED"] = secret
    try:
        yield secret
    finally:
        del os.environ["PRORL_PLANTED"]


async def check_python_is_the_projects(contract: Contract) -> None:
    """`python3` has the packages agents are promised, in the shell and in IPython."""
    async with _sandbox(contract) as sandbox:
        assert await _bash(sandbox, "python3 -c 'import numpy, sympy; print(sympy.sqrt(16))'") == "4"
        cell = await sandbox.ipython("import sympy; sympy.sqrt(16)", timeout_s=ACTION_TIMEOUT_S)
        assert cell.result == "4"


# ---------------------------------------------------------------- isolated providers


async def check_own_processes_only(contract: Contract) -> None:
    """A PID namespace of its own, without capabilities, and no secret of this process in any environment inside."""
    with _planted_secret() as secret:
        async with _sandbox(contract) as sandbox:
            assert int(await _bash(sandbox, "ls -d /proc/[0-9]* | wc -l")) < 15
            assert secret not in await _bash(sandbox, "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true")
            assert int((await _bash(sandbox, "grep CapEff /proc/self/status")).split()[1], 16) == 0
            assert await _bash(sandbox, "cat /proc/sys/kernel/hostname") == "sandbox"


async def check_no_network(contract: Contract) -> None:
    """The host's loopback and its abstract sockets cannot be reached; with `network`, they can."""
    probe = (
        "import socket, sys\n"
        "for family, address in ((socket.AF_INET, ('127.0.0.1', {port})), (socket.AF_UNIX, '\\0{abstract}')):\n"
        "    with socket.socket(family) as client:\n"
        "        client.settimeout(2)\n"
        "        print('yes' if client.connect_ex(address) == 0 else 'no')\n"
    )
    abstract = f"prorl-contract-{secrets.token_hex(4)}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{abstract}")
        unix.listen()
        code = probe.format(port=tcp.getsockname()[1], abstract=abstract)
        for network, expected in ((False, "no\nno\n"), (True, "yes\nyes\n")):
            async with _sandbox(contract, SandboxSpec(network=network)) as sandbox:
                cell = await sandbox.ipython(code, timeout_s=ACTION_TIMEOUT_S)
                assert (cell.stdout, cell.error) == (expected, None), f"network={network}"


async def check_host_is_invisible(contract: Contract) -> None:
    """The home directory, the checkout, other users and the run folder of the host are not there."""
    checkout = Path(next(iter(prorl_trio.__path__)))
    marker = Path.home() / f".prorl-contract-{secrets.token_hex(4)}"
    marker.touch()
    try:
        async with _sandbox(contract) as sandbox:
            hidden = (checkout, marker, contract.base, Path("/etc/shadow"), Path("/etc/fstab"), Path("/sys/kernel"))
            for path in hidden:
                assert await _bash(sandbox, f"test -e '{path}' && echo seen || echo hidden") == "hidden", path
            users = (await _bash(sandbox, "cut -d: -f1 /etc/passwd")).split()
            assert set(users) <= {"root", "agent", "nobody"}
            assert socket.gethostname() not in await _bash(sandbox, "cat /etc/hosts /etc/hostname")
            assert await _bash(sandbox, "echo $HOME; cd; pwd") == "/home/agent\n/home/agent"
    finally:
        marker.unlink()


async def check_read_only(contract: Contract) -> None:
    """Only the home directory, /tmp and /dev/shm can be written; kernel settings cannot, not even by root's sandbox."""
    writable = ("/tmp/x", "/home/agent/x", "/dev/shm/x")
    protected = ("/x", "/usr/x", "/etc/x", "/opt/prorl/lib/x", "$(dirname $(which python3))/x")
    async with _sandbox(contract) as sandbox:
        for path in writable:
            await _bash(sandbox, f"touch {path}")
        for path in protected:
            answer = await _bash(sandbox, f"touch {path} 2>/dev/null && echo written || echo refused")
            assert answer == "refused", path
        setting = "/proc/sys/kernel/panic"
        answer = await _bash(sandbox, f"cat {setting} > /tmp/v; cat /tmp/v > {setting} && echo written || echo refused")
        assert answer.endswith("refused")


async def check_other_sandboxes_are_invisible(contract: Contract) -> None:
    """A sandbox sees no control socket: not another's, nor its own."""
    async with _sandbox(contract) as first, contract.provider.open_sandbox(SandboxSpec()) as second:
        await _bash(second, "touch /tmp/second")
        found = await _bash(first, "find /run /tmp /var /home /mnt /dev -type s 2>/dev/null; true")
        assert found == ""
        assert await _bash(first, "test -e /tmp/second && echo seen || echo hidden") == "hidden"


CORE_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_bash_keeps_state,
    check_exit_code_is_a_result,
    check_bash_timeout,
    check_environment_is_as_specified,
    check_ipython_keeps_state,
    check_unknown_kernel,
    check_exec_is_one_shot,
    check_files_round_trip,
    check_editor,
    check_folders_travel,
    check_output_is_capped,
    check_commands_that_go_on,
    check_closed_is_lost,
    check_error_in_the_block,
    check_unusable_image,
    check_one_action_at_a_time,
    check_two_at_once,
    check_cancelled_call,
)

PROCESS_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_mathematics,
    check_images_of_cells,
    check_cancelled_start,
    check_start_timeout,
    check_killed_from_outside,
    check_background_processes_end,
    check_environment_is_clean,
    check_python_is_the_projects,
)

ISOLATION_CHECKS: Final[tuple[Callable[[Contract], Awaitable[None]], ...]] = (
    check_own_processes_only,
    check_no_network,
    check_host_is_invisible,
    check_read_only,
    check_other_sandboxes_are_invisible,
)
