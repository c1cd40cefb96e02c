"""A sandbox as seen from the node: its calls go to the daemon inside over one channel, one action at a time."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import trio

from ipc.errors import CallFailed, CallTimedOut, FrameTooLarge, IpcError
from ipc.file_calls import EditFile, FileData, FileEdited, FileRead, FileWrite, FileWritten
from ipc.nursery import open_single_nursery
from ipc.sandbox_calls import (
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
from prorl_trio.sandbox.provider import DEFAULT_TRANSFER, Sandbox, ShellBusy, ShellIdle
from prorl_trio.sandbox.transfer import download_tree, upload_tree
from prorl_trio.types.errors import SandboxCallFailed, SandboxLost, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from ipc.limits import Breach
    from ipc.rpc import RpcClient
    from prorl_trio.sandbox.provider import TransferOptions, TransferReport

__all__ = ["FILE_PIECE_BYTES", "MAX_OUTPUT_BYTES", "MAX_STDIN_BYTES", "DaemonSandbox"]

logger = logging.getLogger(__name__)

FILE_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Files, and programs' input, travel in pieces of this size: well below the largest frame."""

MAX_STDIN_BYTES: Final = 1024**3
"""Largest input of a program. It is in the node's memory all the while; a file need not be."""

MAX_OUTPUT_BYTES: Final = 2 * 1024 * 1024
"""Largest `max_output_bytes` of an action: the result must fit into a frame, even if each byte becomes three."""

ACTION_MARGIN_S: Final = 15.0
"""What the daemon may take beyond an action's own timeout: to interrupt, to kill, to start a new shell."""

FILE_TIMEOUT_S: Final = 60.0
"""For one piece of a file, or one edit."""

KERNEL_START_S: Final = 75.0
"""What a Jupyter kernel, of any language, may take to start, and then `ACTION_MARGIN_S`."""

RESTART_TIMEOUT_S: Final = 30.0
PING_TIMEOUT_S: Final = 5.0

T = TypeVar("T", bound=msgspec.Struct)


class DaemonSandbox(Sandbox):
    """Calls of `Sandbox` over `rpc`, which it does not own.

    Args:
        sandbox_id: its name.
        rpc: the daemon is at its other end.
        explain: adds to a message what the process said.
        next_breach: the limit that the kernel kept for the sandbox as a whole since it was last asked, and a sentence
            about it; both empty if none.
        ended_from_inside: asked when it is lost: whether what runs inside brought that about. By default nobody knows.
    """

    def __init__(
        self,
        sandbox_id: str,
        rpc: RpcClient,
        explain: Callable[[str], str],
        next_breach: Callable[[], tuple[Breach, str]] | None = None,
        ended_from_inside: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self._rpc = rpc
        self._explain = explain
        self._next_breach = next_breach or _no_breach
        self._ended_from_inside = ended_from_inside or _nobody_knows
        self._turn = trio.Lock()
        self._transfer_ids = count(1)
        self._input_ids = count(1)
        self._lost = ""
        self._lost_from_inside = False
        self._has_served = False
        """Something was run in it, so that it is not the image that lacks what does not start."""

    def __repr__(self) -> str:
        return f"<DaemonSandbox {self.sandbox_id}: {f'lost: {self._lost}' if self._lost else 'live'}>"

    async def bash(
        self,
        command: str,
        *,
        timeout_s: float,
        quiet_timeout_s: float | None = None,
        max_output_bytes: int = 64 * 1024,
        raw: bool = False,
    ) -> BashResult:
        _check_limits(timeout_s, max_output_bytes)
        call = BashRun(
            command=command,
            timeout_s=timeout_s,
            quiet_timeout_s=quiet_timeout_s,
            max_output_bytes=max_output_bytes,
            raw=raw,
        )
        return await self._act(call, BashResult, timeout_s + ACTION_MARGIN_S)

    async def bash_input(
        self,
        keys: bytes,
        *,
        timeout_s: float,
        quiet_timeout_s: float | None = None,
        max_output_bytes: int = 64 * 1024,
        raw: bool = False,
    ) -> BashResult:
        _check_limits(timeout_s, max_output_bytes)
        call = BashInput(
            keys=keys,
            timeout_s=timeout_s,
            quiet_timeout_s=quiet_timeout_s,
            max_output_bytes=max_output_bytes,
            raw=raw,
        )
        return await self._act(call, BashResult, timeout_s + ACTION_MARGIN_S)

    async def restart_bash(self) -> None:
        await self._act(BashRestart(), BashRestarted, RESTART_TIMEOUT_S)

    async def ipython(
        self, code: str, *, timeout_s: float, max_output_bytes: int = 64 * 1024, kernel: str = ""
    ) -> CellResult:
        _check_limits(timeout_s, max_output_bytes)
        call = IpythonRun(code=code, timeout_s=timeout_s, max_output_bytes=max_output_bytes, kernel=kernel)
        return await self._act(call, CellResult, timeout_s + (KERNEL_START_S if kernel else ACTION_MARGIN_S))

    async def restart_ipython(self, *, kernel: str = "") -> None:
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
    ) -> ExecResult:
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
        )
        if not call.input_id:
            return await self._act(call, ExecResult, timeout_s + ACTION_MARGIN_S)
        async with self._turn, open_single_nursery() as nursery:
            nursery.start_soon(self._send_input, call.input_id, stdin, timeout_s + ACTION_MARGIN_S)
            result = await self._call(call, ExecResult, timeout_s + ACTION_MARGIN_S)
            nursery.cancel_scope.cancel()
        return result

    async def read_file(self, path: str, *, max_bytes: int = 64 * 1024 * 1024) -> bytes:
        content = bytearray()
        async with self._turn:
            while True:
                call = FileRead(path=path, offset=len(content), max_bytes=FILE_PIECE_BYTES)
                piece = await self._call(call, FileData, FILE_TIMEOUT_S)
                content += piece.data
                if max(len(content), piece.size_bytes) > max_bytes:
                    size = max(len(content), piece.size_bytes)
                    raise ValueError(f"{path} has {size} bytes; the limit is {max_bytes}")
                if piece.eof or not piece.data:
                    return bytes(content)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        async with self._turn:
            for start in range(0, max(1, len(data)), FILE_PIECE_BYTES):
                piece = data[start : start + FILE_PIECE_BYTES]
                call = FileWrite(path=path, data=piece, append=start > 0, mode=mode)
                await self._call(call, FileWritten, FILE_TIMEOUT_S)

    async def edit_file(self, edit: EditFile) -> FileEdited:
        return await self._act(edit, FileEdited, FILE_TIMEOUT_S)

    async def upload(
        self,
        local: Path,
        remote: str,
        *,
        options: TransferOptions = DEFAULT_TRANSFER,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> TransferReport:
        async with self._turn:
            return await upload_tree(self._call, next(self._transfer_ids), local, remote, options, on_progress)

    async def download(
        self,
        remote: str,
        local: Path,
        *,
        options: TransferOptions = DEFAULT_TRANSFER,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> TransferReport:
        async with self._turn:
            return await download_tree(self._call, next(self._transfer_ids), remote, local, options, on_progress)

    async def ping(self) -> Pong:
        return await self._act(Ping(), Pong, PING_TIMEOUT_S)

    async def wait_lost(self) -> None:
        await self._rpc.wait_closed()

    async def _send_input(self, input_id: int, stdin: bytes, timeout_s: float) -> None:
        """Send what the `Exec` itself does not hold, as fast as it is read, until the program wants no more."""
        with suppress(SandboxLost):  # whoever waits for the result learns it
            for start in range(FILE_PIECE_BYTES, len(stdin), FILE_PIECE_BYTES):
                end = start + FILE_PIECE_BYTES
                piece = ExecInput(input_id=input_id, data=stdin[start:end], last=end >= len(stdin))
                if not (await self._call(piece, ExecInputTaken, timeout_s)).wanted:
                    return

    async def _act(self, call: SandboxCall, reply_type: type[T], timeout_s: float) -> T:
        async with self._turn:
            return await self._call(call, reply_type, timeout_s)

    async def _call(self, call: SandboxCall, reply_type: type[T], timeout_s: float) -> T:
        if self._lost:
            raise SandboxLost(self._lost, from_inside=self._lost_from_inside)
        try:
            reply = await self._rpc.call(call, reply_type, timeout_s=timeout_s)
        except CallFailed as exc:
            raise self._error_of(exc) from exc
        except (FrameTooLarge, UnicodeEncodeError) as exc:
            raise ValueError(f"sandbox {self.sandbox_id}: {exc}") from exc
        except IpcError as exc:
            failure = exc
        else:
            return self._with_breach(reply)
        what = "did not keep to its deadline" if isinstance(failure, CallTimedOut) else "is gone"
        breach, breach_text = self._next_breach()
        self._lost = self._explain(f"sandbox {self.sandbox_id} {what}: {failure}{breach_text and f'; {breach_text}'}")
        self._lost_from_inside = breach == "memory" or await self._ended_from_inside()
        raise SandboxLost(self._lost, from_inside=self._lost_from_inside) from failure

    def _with_breach(self, reply: T) -> T:
        if isinstance(reply, BashResult | CellResult | ExecResult):
            self._has_served = True
            breach, breach_text = self._next_breach()
            if breach and not reply.breach:
                return msgspec.structs.replace(reply, breach=breach, breach_text=breach_text)
        return reply

    def _error_of(self, failure: CallFailed) -> Exception:
        """What a caller of `Sandbox` catches for a failure the daemon reported."""
        message = f"sandbox {self.sandbox_id}: {failure.message}"
        match failure.code:
            case "not_found":
                return FileNotFoundError(errno.ENOENT, failure.message)
            case "is_directory":
                return IsADirectoryError(errno.EISDIR, failure.message)
            case "permission":
                return PermissionError(errno.EACCES, failure.message)
            case "no_space":
                return OSError(errno.ENOSPC, failure.message)
            case "exists":
                return FileExistsError(errno.EEXIST, failure.message)
            case "io":
                return OSError(errno.EIO, failure.message)
            case "not_absolute" | "too_large" | "unsafe" | "bad_request":
                return ValueError(failure.message)
            case "busy":
                return ShellBusy(message)
            case "not_running":
                return ShellIdle(message)
            case "no_kernel":
                return SandboxUnavailable(message)
            case "no_shell" | "no_ipython":
                return SandboxCallFailed(message) if self._has_served else SandboxUnavailable(message)
            case _:
                logger.error("sandbox %s: its daemon lives, but failed: %s", self.sandbox_id, failure)
                return SandboxCallFailed(f"sandbox {self.sandbox_id}: its daemon lives, but failed: {failure}")


def _no_breach() -> tuple[Breach, str]:
    return "", ""


async def _nobody_knows() -> bool:
    await trio.lowlevel.checkpoint()
    return False


def _check_limits(timeout_s: float, max_output_bytes: int) -> None:
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
    if not 0 < max_output_bytes <= MAX_OUTPUT_BYTES:
        raise ValueError(f"max_output_bytes must be in 1 to {MAX_OUTPUT_BYTES}, got {max_output_bytes}")
