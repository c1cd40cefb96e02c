"""A streamed completion of vLLM: server-sent events in, exact tokens out, as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prorl_trio.inference.answers import ContractBroken, Wanted, checked_completion
from prorl_trio.inference.vllm_api import VersionRun, read_part, tokens_of

if TYPE_CHECKING:
    from prorl_trio.inference.engine import Completion, TokenSink

__all__ = ["CompletionStream", "EventLines", "StreamFailed"]

_DONE: Final = b"[DONE]"


class StreamFailed(Exception):
    """The engine reported a failure in the middle of a stream. The message is its own."""


class EventLines:
    """Splits a stream of server-sent events into the data of each. Bounded by what bounds the response."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """The data of every event that `received` completes."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class CompletionStream:
    """Collects one streamed completion. `feed` is what `HttpClient.request` calls with each piece of the body."""

    def __init__(self, wanted: Wanted, sink: TokenSink) -> None:
        """`sink` gets the tokens of each event."""
        self._wanted = wanted
        self._sink = sink
        self._lines = EventLines()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[VersionRun] = []
        self._finish_reason: str | None = None
        self._sampled: int | None = None
        self._done = False
        self.discarded = 0
        """Tokens that came in the same event after the one at which the sink stopped."""

    def feed(self, received: bytes) -> bool:
        """Take a piece of the body. True: the sink has enough.

        Raises:
            ContractBroken: what came cannot be trusted.
            StreamFailed: the engine says that it failed.
        """
        return any(self._event(data) for data in self._lines.feed(received))

    def completion(self) -> Completion:
        """The whole of it.

        Raises:
            ContractBroken: counts differ, or the stream ended before it was complete.
        """
        if not self._done or self._sampled is None:
            raise ContractBroken(
                f"the stream ended after {len(self._token_ids)} tokens, without the engine's own count"
            )
        return checked_completion(
            self._wanted,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            sampled=self._sampled,
            finish_reason=self._finish_reason,
            versions=[(run.version, run.start, run.end) for run in self._versions],
        )

    def _event(self, data: bytes) -> bool:
        if data == _DONE:
            self._done = True
            return False
        if data.startswith(b'{"error"'):
            raise StreamFailed(data.decode("utf-8", "replace"))
        part = read_part(data, self._wanted)
        if part.usage is not None:
            self._sampled = part.usage.completion_tokens
        for choice in part.choices:
            # The event that only says why it ended has neither.
            token_ids, logprobs = tokens_of(choice) if choice.token_ids else ([], [])
            if len(token_ids) != len(logprobs):
                raise ContractBroken(
                    f"it drops token ids or logprobs: {len(token_ids)} ids, {len(logprobs)} logprobs in one event"
                )
            if choice.weight_versions:
                self._versions = choice.weight_versions
            self._finish_reason = choice.finish_reason
            keep = self._sink(token_ids, logprobs) if token_ids else None
            if keep is not None and choice.finish_reason is None:
                self._take(token_ids[:keep], logprobs[:keep])
                self.discarded = len(token_ids) - keep
                self._finish_reason, self._sampled, self._done = "tool_call", len(self._token_ids), True
                return True
            self._take(token_ids, logprobs)
        return False

    def _take(self, token_ids: list[int], logprobs: list[float]) -> None:
        self._token_ids += token_ids
        self._logprobs += logprobs
