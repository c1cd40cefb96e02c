"""A sandbox whose calls go to the daemon inside over one channel."""

from __future__ import annotations

import errno
import logging
import math
import socket
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from prorl_ipc.errors import CallFailed, CallTimedOut, FrameTooLarge, IpcError, Unencodable
from prorl_ipc.sandbox_calls import BashResult, CellResult, ExecResult, PortOpen, PortOpened
from prorl_trio.sandbox.sandbox import Sandbox, ShellBusy, ShellIdle
from prorl_trio.sandbox.silence import MAX_STANDSTILL_S
from prorl_trio.types.errors import SandboxCallFailed, SandboxLost, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_ipc.client import RpcClient
    from prorl_ipc.limits import Breach
    from prorl_ipc.sandbox_calls import SandboxCall
    from prorl_trio.sandbox.program import OnOutput
    from prorl_trio.sandbox.silence import Silence

logger = logging.getLogger(__name__)

PORT_TIMEOUT_S = 10.0
MAX_PORT_BYTES = 256

T = TypeVar("T", bound=msgspec.Struct)


class DaemonSandbox(Sandbox):
    """A sandbox at the other end of `rpc`, which it does not own.

    Args:
        sandbox_id: its name.
        rpc: the channel to the daemon.
        explain: adds the output of the process to a message.
        next_breach: returns the kernel-enforced limit that the sandbox has hit since the last call, and a sentence
            about it; both empty if none.
        ended_from_inside: called when it is lost: returns whether something inside caused that. Default: unknown.
        silence: checks whether the sandbox could run while it was silent. By default its silence is never excused.
        ports: the socket on which the daemon sends sockets of the sandbox's own network; None without such a network.
    """

    def __init__(
        self,
        sandbox_id: str,
        rpc: RpcClient,
        explain: Callable[[str], str],
        next_breach: Callable[[], tuple[Breach, str]] | None = None,
        ended_from_inside: Callable[[], Awaitable[bool]] | None = None,
        silence: Silence | None = None,
        ports: socket.socket | None = None,
    ) -> None:
        super().__init__(sandbox_id)
        self._rpc = rpc
        self._explain = explain
        self._next_breach = next_breach or _no_breach
        self._ended_from_inside = ended_from_inside or _nobody_knows
        self._silence = silence
        self._ports = ports
        self._lost = ""
        self._lost_from_inside = False

    def __repr__(self) -> str:
        return f"<DaemonSandbox {self.sandbox_id}: {f'lost: {self._lost}' if self._lost else 'live'}>"

    async def wait_lost(self) -> None:
        await self._rpc.wait_closed()

    async def open_port(self, port: int = 0) -> trio.SocketListener:
        if self._ports is None:
            return await super().open_port(port)
        opened = await self.call(PortOpen(port), PortOpened, PORT_TIMEOUT_S)
        # The daemon sent it before it answered, so this never waits.
        _, descriptors, _, _ = socket.recv_fds(self._ports, MAX_PORT_BYTES, 1, socket.MSG_DONTWAIT)
        if len(descriptors) != 1:
            raise SandboxCallFailed(f"sandbox {self.sandbox_id}: port {opened.port} came without its socket")
        listening = socket.socket(fileno=descriptors[0])
        listening.setblocking(False)
        return trio.SocketListener(trio.socket.from_stdlib_socket(listening))

    async def call(
        self, request: SandboxCall, reply_type: type[T], timeout_s: float, on_output: OnOutput | None = None
    ) -> T:
        if self._lost:
            raise SandboxLost(self._lost, from_inside=self._lost_from_inside, before_the_call=True)
        was_gone = self._rpc.closed
        try:
            reply = await self._rpc.call(
                request, reply_type, timeout_s=timeout_s, on_chunk=on_output, on_silence=self._excuses()
            )
        except CallFailed as exc:
            raise self._error_of(exc) from exc
        except (FrameTooLarge, Unencodable) as exc:
            raise ValueError(f"sandbox {self.sandbox_id}: {exc}") from exc
        except IpcError as exc:
            failure = exc
        else:
            return self._with_breach(reply)
        what = "did not keep to its deadline" if isinstance(failure, CallTimedOut) else "is gone"
        if self._silence is not None and self._silence.is_too_long:
            what = f"stood still for {MAX_STANDSTILL_S:g} s"
        breach, breach_text = self._next_breach()
        self._lost = self._explain(f"sandbox {self.sandbox_id} {what}: {failure}{breach_text and f'; {breach_text}'}")
        self._lost_from_inside = breach == "memory" or await self._was_lost_from_inside()
        raise SandboxLost(self._lost, from_inside=self._lost_from_inside, before_the_call=was_gone) from failure

    async def _was_lost_from_inside(self) -> bool:
        silence = self._silence
        if silence is not None and silence.is_too_long:  # at once: budgets must not run out before
            return False
        return await self._ended_from_inside() and not (silence is not None and await silence.stands_still())

    def on_standstill(self, uncount: Callable[[float], None]) -> None:
        if self._silence is not None:
            self._silence.on_standstill = uncount

    def _excuses(self) -> Callable[[], Awaitable[float]] | None:
        """Return the function to call while an answer is missing, see `RpcClient.call`."""
        silence = self._silence
        if silence is None:
            return None
        known_s = silence.total_s

        async def excused_s() -> float:
            nonlocal known_s
            await silence.look()
            before_s, known_s = known_s, silence.total_s
            return -math.inf if silence.is_too_long else known_s - before_s

        return excused_s

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
