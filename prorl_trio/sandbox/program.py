"""An interactive program in a sandbox: input is sent and output received piece by piece while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec
import trio

from prorl_ipc.sandbox_calls import Exec, ExecInput, ExecInputTaken, ExecResult
from prorl_trio.types.errors import RolloutError, SandboxCallFailed, SandboxLost

if TYPE_CHECKING:
    from prorl_ipc.sandbox_calls import SandboxCall

INPUT_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Size limit of the pieces of input, well below the largest frame."""

MAX_UNREAD_BYTES: Final = 64 * 1024 * 1024
"""Limit of a program's output that was not received. A program that exceeds it is ended."""

T = TypeVar("T", bound=msgspec.Struct)

OnOutput = Callable[[str, bytes], None]
"""Called with the name of a stream, `stdout` or `stderr`, and its next piece. An exception ends the program."""


class CallSandbox(Protocol):
    """The type of `Sandbox.call`."""

    async def __call__(
        self, request: SandboxCall, reply_type: type[T], timeout_s: float, on_output: OnOutput | None = None
    ) -> T:
        """See `Sandbox.call`."""


class Program:
    """A running program. `Sandbox.open_program` creates it; one task sends, one receives.

    Failures are raised by `receive_some` and `wait`: a failed start, more than `MAX_UNREAD_BYTES` of unreceived output
    (`SandboxCallFailed`), and all other errors of `Sandbox.exec`.
    """

    def __init__(
        self, call: CallSandbox, request: Exec, timeout_s: float, timing: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._call = call
        self._request = request
        self._timeout_s = timeout_s
        self._timing = timing
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._news = trio.Event()
        self._result: ExecResult | None = None
        self._failure: Exception | None = None
        self._sending = trio.CancelScope()
        self.max_stderr_bytes = math.inf
        """Limit of all its standard errors. A program that exceeds it is ended."""
        self._stderr_bytes = 0
        self.is_late = False
        """True after a line that was later than its `own_limit_s`. The reader resets it."""

    def __repr__(self) -> str:
        return f"<Program {self._request.argv[0]!r}: {'running' if self._result is None else self._result.exit_code}>"

    async def send(self, data: bytes, *, own_limit_s: float = 0.0) -> None:
        """Write to its standard input. Returns when the program's pipe has accepted all but the last piece.

        Args:
            data: the bytes to write.
            own_limit_s: seconds of its own time (elapsed time without waits for a CPU) that the program may use until
                it has written the next line; 0: the rest of the previous limit. After that the program is ended, and
                `wait` returns a result that is `timed_out`.

        Raises:
            trio.BrokenResourceError: it has ended in any way, or closed its input.
        """
        for start in range(0, len(data), INPUT_PIECE_BYTES):
            piece = data[start : start + INPUT_PIECE_BYTES]
            await self._send(piece, last=False, own_limit_s=0.0 if start else own_limit_s)

    async def send_eof(self) -> None:
        """Close its input. Errors as `send`."""
        await self._send(b"", last=True)

    async def _send(self, data: bytes, *, last: bool, own_limit_s: float = 0.0) -> None:
        piece = ExecInput(input_id=self._request.input_id, data=data, last=last, own_limit_s=own_limit_s)
        is_taken = False
        if self._result is None and self._failure is None:
            # A piece that arrives after the program's end would wait there for a program with its number.
            with suppress(SandboxLost), self._timing(), trio.CancelScope() as self._sending:
                is_taken = (await self._call(piece, ExecInputTaken, self._timeout_s)).wanted
        if not is_taken:
            raise trio.BrokenResourceError(f"{self._request.argv[0]} reads no more")

    async def receive_some(self) -> bytes:
        """Return the next bytes of its standard output, as soon as there are any; empty at the end."""
        await trio.lowlevel.checkpoint()
        while not self._pieces and self._result is None:
            await self._wait_news()
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._unread_bytes = 0
        return data

    async def wait(self) -> ExecResult:
        """Return its result when it has ended: `stderr` as in `exec`, `stdout` empty, since that was received."""
        await trio.lowlevel.checkpoint()
        while self._result is None:
            await self._wait_news()
        return self._result

    async def _wait_news(self) -> None:
        self._raise_failure()
        self._news = trio.Event()
        with self._timing():
            await self._news.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def serve(self) -> None:
        try:
            result = await self._call(self._request, ExecResult, self._timeout_s, self._take)
            self._result = msgspec.structs.replace(result, stdout=b"", stdout_dropped_bytes=0)
        except (OSError, ValueError, RolloutError) as exc:
            self._failure = exc
        self._news.set()
        self._sending.cancel()

    def _take(self, stream: str, data: bytes) -> None:
        if stream != "stdout":
            self.is_late |= stream == "late"
            self._stderr_bytes += len(data)
            if self._stderr_bytes > self.max_stderr_bytes:
                raise SandboxCallFailed(f"{self._request.argv[0]} wrote {self._stderr_bytes} bytes of errors")
            return
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            program = self._request.argv[0]
            raise SandboxCallFailed(f"{program} wrote more than {MAX_UNREAD_BYTES} bytes that nobody has read")
        self._pieces.append(data)
        self._news.set()
