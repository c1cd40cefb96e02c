"""A sandbox whose calls go to the daemon inside over one channel."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from ipc.errors import CallFailed, CallTimedOut, FrameTooLarge, IpcError
from ipc.sandbox_calls import BashResult, CellResult, ExecResult
from prorl_trio.sandbox.sandbox import Sandbox, ShellBusy, ShellIdle
from prorl_trio.types.errors import SandboxCallFailed, SandboxLost, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ipc.limits import Breach
    from ipc.rpc import RpcClient
    from ipc.sandbox_calls import SandboxCall
    from prorl_trio.sandbox.program import OnOutput

__all__ = ["DaemonSandbox"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)


class DaemonSandbox(Sandbox):
    """A sandbox at the other end of `rpc`, which it does not own.

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
        super().__init__(sandbox_id)
        self._rpc = rpc
        self._explain = explain
        self._next_breach = next_breach or _no_breach
        self._ended_from_inside = ended_from_inside or _nobody_knows
        self._lost = ""
        self._lost_from_inside = False

    def __repr__(self) -> str:
        return f"<DaemonSandbox {self.sandbox_id}: {f'lost: {self._lost}' if self._lost else 'live'}>"

    async def wait_lost(self) -> None:
        await self._rpc.wait_closed()

    async def call(
        self, request: SandboxCall, reply_type: type[T], timeout_s: float, on_output: OnOutput | None = None
    ) -> T:
        if self._lost:
            raise SandboxLost(self._lost, from_inside=self._lost_from_inside, before_the_call=True)
        was_gone = self._rpc.closed
        try:
            reply = await self._rpc.call(request, reply_type, timeout_s=timeout_s, on_chunk=on_output)
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
        raise SandboxLost(self._lost, from_inside=self._lost_from_inside, before_the_call=was_gone) from failure

    def _with_breach(self, reply: T) -> T:
        if isinstance(reply, BashResult | CellResult | ExecResult):
            breach, breach_text = self._next_breach()
            if breach and not reply.breach:
                return msgspec.structs.replace(reply, breach=breach, breach_text=breach_text)
        return reply

    def _error_of(self, failure: CallFailed) -> Exception:
        """Return the error that a caller of `Sandbox` catches for a failure the daemon reported."""
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
            case "not_absolute" | "too_large" | "unsafe" | "bad_request" | "no_user":
                return ValueError(failure.message)
            case "busy":
                return ShellBusy(message)
            case "not_running":
                return ShellIdle(message)
            case "no_kernel" | "no_shell" | "no_ipython":
                return SandboxUnavailable(message)
            case "shell_lost" | "ipython_lost":
                return SandboxCallFailed(message)
            case _:
                logger.error("sandbox %s: its daemon lives, but failed: %s", self.sandbox_id, failure)
                return SandboxCallFailed(f"sandbox {self.sandbox_id}: its daemon lives, but failed: {failure}")


def _no_breach() -> tuple[Breach, str]:
    return "", ""


async def _nobody_knows() -> bool:
    await trio.lowlevel.checkpoint()
    return False
