"""The user's view of a sandbox: verbs, all built on one call to the inside."""

from __future__ import annotations

import abc
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import trio

from prorl_ipc.errors import CallFailed
from prorl_ipc.file_calls import EditFile, FileData, FileEdited, FileRead, FileWrite, FileWritten
from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.sandbox_calls import (
    BashInput,
    BashRestart,
    BashRestarted,
    BashResult,
    BashRun,
    CellResult,
    Exec,
    ExecInput,
    ExecInputTaken,
    ExecResult,
    IpythonRestart,
    IpythonRestarted,
    IpythonRun,
    Ping,
    Pong,
    SandboxCall,
)
from prorl_ipc.tree import TreeRefused
from prorl_trio.sandbox.program import Program
from prorl_trio.sandbox.transfer import DEFAULT_TRANSFER, download_tree, upload_tree
from prorl_trio.sandbox.use import spoilt
from prorl_trio.types.errors import HandlerError, SandboxLost, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from prorl_trio.sandbox.program import OnOutput
    from prorl_trio.sandbox.transfer import TransferOptions, TransferReport

FILE_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Size limit of the pieces of files and of programs' input, well below the largest frame."""

MAX_STDIN_BYTES: Final = 1024**3
"""Limit of a program's input, which is in the node's memory all the time; a file need not be."""

MAX_OUTPUT_BYTES: Final = 2 * 1024 * 1024
"""Limit of an action's `max_output_bytes`: the result must fit into a frame, even if each byte becomes three."""

ACTION_MARGIN_S: Final = 15.0
"""Time for the daemon beyond an action's own timeout: to interrupt, to kill, to start a new shell."""

FILE_TIMEOUT_S: Final = 60.0
"""Time limit for one piece of a file, or one edit."""

KERNEL_START_S: Final = 75.0
"""Time limit for the start of a Jupyter kernel of any language, in addition to `ACTION_MARGIN_S`."""

RESTART_TIMEOUT_S: Final = 30.0
PING_TIMEOUT_S: Final = 5.0

T = TypeVar("T", bound=msgspec.Struct)
E = TypeVar("E", bound=Exception)


class ShellBusy(HandlerError):
    """An earlier command is still running; the new one was not started."""


class ShellIdle(HandlerError):
    """No command is running that could receive keys or be awaited."""


class Sandbox(abc.ABC):
    """A live sandbox. One action at a time; a second concurrent one waits for the first.

    Every method raises `SandboxLost` once the sandbox died or its channel broke. A cancelled call cancels the action
    inside: the command's process group is killed before the call returns, or the sandbox is closed. Actions are never
    sent twice.

    To implement another kind of sandbox, implement `call` and `wait_lost`.
    """

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self._turn = trio.Lock()
        self._transfer_ids = count(1)
        self._input_ids = count(1)

    @abc.abstractmethod
    async def call(
        self, request: SandboxCall, reply_type: type[T], timeout_s: float, on_output: OnOutput | None = None
    ) -> T:
        """Carry out `request` inside, and return its answer, a `reply_type`.

        The verbs below make one call at a time, except for the input of a program, which is sent while it runs.
        `on_output` is called, in this task and in order, with the streamed output of a request with `stream`; an
        exception ends the call.

        Raises:
            SandboxLost: it is gone, or did not answer within `timeout_s`, after which it is ended.
            SandboxCallFailed, SandboxUnavailable, ShellBusy, ShellIdle, OSError, ValueError: it lives, but the request
                failed for a reason listed at the verbs.
        """

    @abc.abstractmethod
    async def wait_lost(self) -> None:
        """Return when the sandbox is known to be lost, or is closed, whether or not anything uses it."""

    def on_standstill(self, uncount: Callable[[float], None]) -> None:  # noqa: B027 - optional for subclasses
        """Call `uncount` with the seconds of each standstill of the sandbox that a waiting call has detected.

        In a standstill its machine or container was suspended or frozen, so nothing inside ran. Default: none is
        detected.
        """

    async def open_port(self, port: int = 0) -> trio.SocketListener:
        """Return a socket that listens on `port` of 127.0.0.1 inside, unreachable from outside the sandbox.

        0 means any free port; the socket's address has the number. The caller closes the socket.

        Raises:
            SandboxUnavailable: the sandbox lacks its own network.
            OSError: the port is in use inside.
        """
        del port
        await trio.lowlevel.checkpoint()
        raise SandboxUnavailable(f"sandbox {self.sandbox_id} has no network of its own, in which it alone could ask")

    async def bash(
        self,
        command: str,
        *,
        timeout_s: float,
        quiet_timeout_s: float | None = None,
        max_output_bytes: int = 64 * 1024,
        raw: bool = False,
    ) -> BashResult:
        """Run `command` in the persistent shell (started on first use). A non-zero exit is a result, not an error.

        After `timeout_s` it is stopped. If no output arrives for `quiet_timeout_s`, the result is `running` and the
        command continues; `bash_input` continues it, and until it has ended no other command can run. The output is
        plain text (no escape sequences, progress bars in their last state) unless `raw`.

        Raises:
            ShellBusy: a command is still running; this one was not started.
        """
        _check_limits(timeout_s, max_output_bytes)
        call = BashRun(
            command=command,
            timeout_s=timeout_s,
            quiet_timeout_s=quiet_timeout_s,
            max_output_bytes=max_output_bytes,
            raw=raw,
        )
        return await self._act(call, BashResult, timeout_s + ACTION_MARGIN_S, runs=True)

    async def bash_input(
        self,
        keys: bytes,
        *,
        timeout_s: float,
        quiet_timeout_s: float | None = None,
        max_output_bytes: int = 64 * 1024,
        raw: bool = False,
    ) -> BashResult:
        """Type `keys` for the running command, and wait for it as `bash` does.

        `b"\x03"` is C-c, `b"\x04"` C-d, `b"\x1a"` C-z; empty keys only wait. Keys never reach the shell itself.

        Raises:
            ShellIdle: no command is running, or its end was already returned.
        """
        _check_limits(timeout_s, max_output_bytes)
        call = BashInput(
            keys=keys,
            timeout_s=timeout_s,
            quiet_timeout_s=quiet_timeout_s,
            max_output_bytes=max_output_bytes,
            raw=raw,
        )
        return await self._act(call, BashResult, timeout_s + ACTION_MARGIN_S, runs=True)

    async def restart_bash(self) -> None:
        """End the shell with all its processes, and start a new one."""
        await self._act(BashRestart(), BashRestarted, RESTART_TIMEOUT_S)

    async def ipython(
        self, code: str, *, timeout_s: float, max_output_bytes: int = 64 * 1024, kernel: str = ""
    ) -> CellResult:
        """Run one cell in a persistent shell (started on first use). An exception in it is a result.

        Args:
            code: the cell, as IPython reads it.
            timeout_s: time limit, after which the cell is interrupted, and its kernel killed if that does not help.
            max_output_bytes: limit of its text, beyond which only the first and the last half are kept.
            kernel: empty for the IPython that every sandbox has, or the name of a Jupyter kernelspec installed in it.
                Each has its own shell.

        Raises:
            SandboxUnavailable: the kernel does not exist or cannot be started. The sandbox itself lives on.
        """
        _check_limits(timeout_s, max_output_bytes)
        call = IpythonRun(code=code, timeout_s=timeout_s, max_output_bytes=max_output_bytes, kernel=kernel)
        at_most_s = timeout_s + (KERNEL_START_S if kernel else ACTION_MARGIN_S)
        return await self._act(call, CellResult, at_most_s, runs=True)

    async def restart_ipython(self, *, kernel: str = "") -> None:
        """Discard the state of a kernel's shell. `kernel` and errors as in `ipython`."""
        await self._act(
            IpythonRestart(kernel=kernel), IpythonRestarted, KERNEL_START_S if kernel else RESTART_TIMEOUT_S
        )

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = 1024 * 1024,
        user: str = "",
        on_output: OnOutput | None = None,
        own_limit_s: float = 0.0,
        lenient: bool = False,
        linger_s: float = 0.0,
        watch: Sequence[str] = (),
    ) -> ExecResult:
        """Run a program once, without a shell, in a fresh session: for evaluators. All its processes are ended.

        This includes daemons. Start processes that must survive from `bash`.

        Args:
            argv: program (looked up in PATH unless it is a path) and arguments.
            timeout_s: time limit, after which the program is killed with all its processes; then `exit_code` is None.
            cwd: working directory; empty: where shells start.
            env: added to the tools' environment.
            stdin: the program's whole input, 1 GiB at most (`MAX_STDIN_BYTES`). It is sent in pieces, as the program
                reads it.
            max_output_bytes: limit for stdout and for stderr, beyond which only the first and the last half are kept.
            user: user name or number of the image; empty: the sandbox's user. A sandbox has one user, and another is
                refused. The exception is Apptainer with `sandbox.fakeroot`, where tools are root and may become any
                user, if the node's user has a range of users (/etc/subuid).
            on_output: called with `stdout` or `stderr` and each piece of output as it arrives, regardless of
                `max_output_bytes`. An exception ends the program.
            own_limit_s: limit of the program's own time (elapsed time without waits for a CPU), after which it is
                killed; 0: no limit. The result has the time used in `own_s`.
            lenient: a program that has waited for a CPU may use as much more, up to twice `own_limit_s`.
            linger_s: the seconds for leftover processes to end by themselves; `outlived` of the result describes
                others.
            watch: with `linger_s`, files that must not change after the program's end; `outlived` describes changes.

        Raises:
            FileNotFoundError, PermissionError: the program, `cwd` or `user`, as seen inside. It did not run.
            ValueError: an argument or a limit is not possible, or the image lacks the `user`.
        """
        _check_limits(timeout_s, max_output_bytes)
        if len(stdin) > MAX_STDIN_BYTES:
            size = len(stdin)
            raise ValueError(f"stdin has {size} bytes; the limit is {MAX_STDIN_BYTES}: upload a file for it to read")
        call = Exec(
            argv=list(argv),
            timeout_s=timeout_s,
            cwd=cwd,
            env=dict(env or {}),
            stdin=stdin[:FILE_PIECE_BYTES],
            max_output_bytes=max_output_bytes,
            user=user,
            input_id=next(self._input_ids) if len(stdin) > FILE_PIECE_BYTES else 0,
            stream=on_output is not None,
            own_limit_s=own_limit_s,
            lenient=lenient,
            linger_s=linger_s,
            watch=list(watch),
        )
        if not call.input_id:
            async with self._action(runs=True):
                return await self.call(call, ExecResult, timeout_s + ACTION_MARGIN_S, on_output)
        async with self._action(runs=True), open_single_nursery() as nursery:
            nursery.start_soon(self._send_input, call.input_id, stdin, timeout_s + ACTION_MARGIN_S)
            result = await self.call(call, ExecResult, timeout_s + ACTION_MARGIN_S, on_output)
            nursery.cancel_scope.cancel()
        return result

    @asynccontextmanager
    async def open_program(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        max_stderr_bytes: int = 64 * 1024,
        lenient: bool = False,
        is_service: bool = False,
    ) -> AsyncIterator[Program]:
        """Run an interactive program: for evaluators that send it one request after the other.

        It is the sandbox's one action during the block: other verbs wait for its end. On exit it is killed, with all
        its processes. Arguments as in `exec`; at most `max_stderr_bytes` of its stderr are kept. With `is_service`, it
        runs beside all actions instead, and its time is charged to nobody.

        The methods of the program raise the errors of `exec`.
        """
        _check_limits(timeout_s, max_stderr_bytes)
        call = Exec(
            argv=list(argv),
            timeout_s=timeout_s,
            cwd=cwd,
            env=dict(env or {}),
            max_output_bytes=max_stderr_bytes,
            user=user,
            input_id=next(self._input_ids),
            stream=True,
            lenient=lenient,
        )
        timing = nullcontext if is_service else partial(self._timing, runs=True)
        async with nullcontext() if is_service else self._turn, open_single_nursery() as nursery:
            program = Program(self.call, call, timeout_s + ACTION_MARGIN_S, timing)
            nursery.start_soon(program.serve)
            try:
                yield program
            finally:
                nursery.cancel_scope.cancel()

    async def read_file(self, path: str, *, max_bytes: int = 64 * 1024 * 1024) -> bytes:
        """Return the whole file at the absolute `path` inside.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError: as seen inside.
            ValueError: it is larger than `max_bytes`.
        """
        content = bytearray()
        async with self._action():
            while True:
                call = FileRead(path=path, offset=len(content), max_bytes=FILE_PIECE_BYTES)
                piece = await self.call(call, FileData, FILE_TIMEOUT_S)
                content += piece.data
                if max(len(content), piece.size_bytes) > max_bytes:
                    size = max(len(content), piece.size_bytes)
                    message = f"{path} has {size} bytes; the limit is {max_bytes}"
                    raise self._of_content(ValueError(message)) from CallFailed("too_large", message)
                if piece.eof or not piece.data:
                    return bytes(content)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace the file at the absolute `path` inside; parents are made. Errors as `read_file`.

        A file that may not be written (mode 0444, for example) is a `PermissionError`, and stays unchanged.
        """
        async with self._action():
            for start in range(0, max(1, len(data)), FILE_PIECE_BYTES):
                piece = data[start : start + FILE_PIECE_BYTES]
                call = FileWrite(path=path, data=piece, append=start > 0, mode=mode)
                await self.call(call, FileWritten, FILE_TIMEOUT_S)

    async def edit_file(self, edit: EditFile) -> FileEdited:
        """View or edit a text file inside, in the manner of agents' editors; errors of the call are in the result."""
        return await self._act(edit, FileEdited, FILE_TIMEOUT_S)

    async def upload(
        self,
        local: Path,
        remote: str,
        *,
        options: TransferOptions = DEFAULT_TRANSFER,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> TransferReport:
        """Copy the file or folder `local` to the absolute path `remote` inside.

        It appears there completely or not at all.

        Missing parents are made. Permission bits are copied (not set-user-id), and so are symbolic links, as links, if
        they stay in the folder; hard links stay hard links. One piece of about 1 MiB is in memory at a time. A
        cancelled or failed transfer leaves nothing on either side. Other actions wait for its end.

        Args:
            local: a file or a folder of this machine.
            remote: an absolute path inside, below one of `options.remote_roots`.
            options: limits, and whether to replace an existing path.
            on_progress: called with the number of entries and of bytes so far, after each piece.

        Raises:
            FileExistsError: the path exists, and `options.overwrite` is not set.
            FileNotFoundError, PermissionError, OSError: as seen here or inside; also outside of `remote_roots`.
            ValueError: a limit is exceeded; `remote` is not absolute; `local` is neither a file nor a folder.
        """
        async with self._action():
            return await upload_tree(self.call, next(self._transfer_ids), local, remote, options, on_progress)

    async def download(
        self,
        remote: str,
        local: Path,
        *,
        options: TransferOptions = DEFAULT_TRANSFER,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> TransferReport:
        """Copy the file or folder `remote` inside to `local`. The reverse of `upload`.

        Whatever code inside does at the same time, nothing outside of `local` is written or read, and no link in it
        leads out. Its owner can read all the copied files.

        Raises:
            ValueError: besides the above: the received data is not a tree of files, or this disk cannot store it.
        """
        async with self._action():
            try:
                return await download_tree(self.call, next(self._transfer_ids), remote, local, options, on_progress)
            except ValueError as exc:
                if isinstance(exc.__cause__, TreeRefused):
                    self._of_content(exc)
                raise

    async def ping(self) -> Pong:
        """Return when the sandbox answers, after the current action. It is not itself an action."""
        return await self._act(Ping(), Pong, PING_TIMEOUT_S)

    @property
    def is_used(self) -> bool:
        """Return True if a policy is known to have acted in it. See `prorl_trio.sandbox.use`."""
        return False

    def _timing(self, *, runs: bool) -> AbstractContextManager[None]:
        """Return a block that charges an action's time. `runs`: it runs a program."""
        del runs
        return nullcontext()

    def _of_content(self, error: E) -> E:
        """Return an error of the sandbox's content, blamed on the policy if it has acted there."""
        return spoilt(error) if self.is_used else error

    @asynccontextmanager
    async def _action(self, *, runs: bool = False) -> AsyncIterator[None]:
        """Wait for the end of the current action, and make others wait."""
        with self._timing(runs=runs):
            async with self._turn:
                yield

    async def _act(self, request: SandboxCall, reply_type: type[T], timeout_s: float, *, runs: bool = False) -> T:
        async with self._action(runs=runs):
            return await self.call(request, reply_type, timeout_s)

    async def _send_input(self, input_id: int, stdin: bytes, timeout_s: float) -> None:
        """Send the input beyond the `Exec` itself, as fast as it is read, until the program wants no more."""
        with suppress(SandboxLost):  # the task that waits for the result is notified
            for start in range(FILE_PIECE_BYTES, len(stdin), FILE_PIECE_BYTES):
                end = start + FILE_PIECE_BYTES
                piece = ExecInput(input_id=input_id, data=stdin[start:end], last=end >= len(stdin))
                if not (await self.call(piece, ExecInputTaken, timeout_s)).wanted:
                    return


def _check_limits(timeout_s: float, max_output_bytes: int) -> None:
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
    if not 0 < max_output_bytes <= MAX_OUTPUT_BYTES:
        raise ValueError(f"max_output_bytes must be in 1 to {MAX_OUTPUT_BYTES}, got {max_output_bytes}")
