"""A program in a sandbox that is talked to while it runs: input goes in and output comes out piece by piece."""

from __future__ import annotations

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
"""Input travels in pieces of at most this size: well below the largest frame."""

MAX_UNREAD_BYTES: Final = 64 * 1024 * 1024
"""Largest output of a program that nobody has taken. A program that writes more without being read is ended."""

T = TypeVar("T", bound=msgspec.Struct)

OnOutput = Callable[[str, bytes], None]
"""Called with the name of a stream, `stdout` or `stderr`, and its next piece. What it raises ends the program."""


class CallSandbox(Protocol):
    """`Sandbox.call`."""

    async def __call__(
        self, request: SandboxCall, reply_type: type[T], timeout_s: float, on_output: OnOutput | None = None
    ) -> T:
        """See `Sandbox.call`."""


class Program:
    """A running program. Made by `Sandbox.open_program`; one task sends, one receives.

    What went wrong with it is raised by `receive_some` and `wait`: that it could not be started, that it wrote more
    than `MAX_UNREAD_BYTES` which nobody received (`SandboxCallFailed`), and all else that `Sandbox.exec` names.
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
        self.is_late = False
        """True after a line that came later than its `own_limit_s`. The reader resets it."""

    def __repr__(self) -> str:
        return f"<Program {self._request.argv[0]!r}: {'running' if self._result is None else self._result.exit_code}>"

    async def send(self, data: bytes, *, own_limit_s: float = 0.0) -> None:
        """Write to its standard input. Returns when the program's pipe has taken all but the last piece.

        Args:
            data: what is written.
            own_limit_s: seconds of its own time that the program may use until it has written the next line, which is
                the time that passes without that in which it waits for a CPU; 0: what is left of the limit before. The
                program is ended after it, and `wait` returns a result that is `timed_out`.

        Raises:
            trio.BrokenResourceError: it has ended, in whatever way, or closed its input.
        """
        for start in range(0, len(data), INPUT_PIECE_BYTES):
            piece = data[start : start + INPUT_PIECE_BYTES]
            await self._send(piece, last=False, own_limit_s=0.0 if start else own_limit_s)

    async def send_eof(self) -> None:
        """End its input. Errors as `send`."""
        await self._send(b"", last=True)

    async def _send(self, data: bytes, *, last: bool, own_limit_s: float = 0.0) -> None:
        piece = ExecInput(input_id=self._request.input_id, data=data, last=last, own_limit_s=own_limit_s)
        is_taken = False
        if self._result is None and self._failure is None:
            # A piece that comes after the program's end would wait over there for a program of its number.
            with suppress(SandboxLost), self._timing(), trio.CancelScope() as self._sending:
                is_taken = (await self._call(piece, ExecInputTaken, self._timeout_s)).wanted
        if not is_taken:
            raise trio.BrokenResourceError(f"{self._request.argv[0]} reads no more")

    async def receive_some(self) -> bytes:
        """Return the next bytes that it wrote to its standard output, as soon as there are any; nothing at the end."""
        await trio.lowlevel.checkpoint()
        while not self._pieces and self._result is None:
            await self._wait_news()
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._unread_bytes = 0
        return data

    async def wait(self) -> ExecResult:
        """Return its result when it has ended: `stderr` as `exec` has it, `stdout` empty, for that was received."""
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
        """Run it to its end, whatever that is."""
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
            return
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            program = self._request.argv[0]
            raise SandboxCallFailed(f"{program} wrote more than {MAX_UNREAD_BYTES} bytes that nobody has read")
        self._pieces.append(data)
        self._news.set()
