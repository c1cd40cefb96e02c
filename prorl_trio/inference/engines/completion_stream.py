"""A streamed completion: server-sent events in, exact tokens out, as they arrive."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_trio.inference.engines.answers import ContractBroken, NotStreamed, Wanted, checked_completion, is_refusal
from prorl_trio.inference.engines.protocol import RequestRefused
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.inference.engines.protocol import Completion

MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""Limit for one event. An event of SGLang contains all tokens so far, with up to 40 bytes each."""

_DONE: Final = b"[DONE]"
_ERRORS: Final = (b'{"error"', b'{"object":"error"', b'{"object": "error"')
"""The wording depends on the engine's version."""


class StreamPart(NamedTuple):
    """The content of one event.

    Attributes:
        token_ids, logprobs: the new tokens.
        finish_reason: None until the engine reports it; a later None does not revoke it.
        sampled: the engine's own count of all tokens so far; None if the event lacks it.
        versions: runs of `(version of the weights, start, end)` over all tokens so far; empty if the event lacks them.
        label: the engine's name for its weights when it sent this event; empty if unreported.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    sampled: int | None = None
    versions: Sequence[tuple[str, int, int]] = ()
    label: str = ""


class EventLines:
    """Splits a stream of server-sent events into the data of each event. Buffers at most `MAX_EVENT_BYTES`."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._begun_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of every event that `received` completes.

        Raises:
            ContractBroken: an event is larger than `MAX_EVENT_BYTES`.
        """
        *lines, rest = received.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._begun, lines[0]))
            self._begun, self._begun_bytes = [], 0
        self._begun.append(rest)
        self._begun_bytes += len(rest)
        if self._begun_bytes > MAX_EVENT_BYTES:
            raise ContractBroken(f"an event of its stream is larger than {MAX_EVENT_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class CompletionStream:
    """Collects one streamed completion. `HttpClient.request` calls `feed` with each piece of the body."""

    def __init__(self, wanted: Wanted, read: Callable[[bytes, Wanted, int], StreamPart]) -> None:
        """Create an empty collector.

        `read` decodes an event, given the number of tokens before it; the sink gets the tokens of each event.
        """
        assert wanted.sink is not None, "nobody to stream to"
        self._wanted = wanted
        self._sink = wanted.sink
        self._read = read
        self._lines = EventLines()
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._versions: Sequence[tuple[str, int, int]] = ()
        self._label = ""
        self._finish_reason: str | None = None
        self._sampled: int | None = None
        self._dropped = 0
        self._done = False
        self._events = 0

    def feed(self, received: bytes) -> bool:
        """Parse a piece of the response body and pass its tokens to the sink; return True when the sink has enough.

        Raises:
            ContractBroken: the engine's answer breaks its contract.
            BackendError: retryable: the engine reports a failure.
        """
        events = self._lines.feed(received)
        self._events += len(events)
        return any(self._event(data) for data in events)

    def completion(self) -> Completion:
        """Return the whole completion.

        Raises:
            ContractBroken: counts differ.
            NotStreamed: the response was not a stream.
            BackendError: retryable: the stream ended before the completion was complete.
        """
        if not self._events:
            raise NotStreamed("it does not stream what it is asked to stream")
        ended = f"the stream ended after {len(self._token_ids)} tokens"
        if not self._done:
            raise BackendError(f"{self._wanted.info.url}: {ended}, in the middle of the answer", retryable=True)
        if self._sampled is None:
            raise ContractBroken(f"{ended}, without the engine's own count")
        return checked_completion(
            self._wanted,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            sampled=self._sampled,
            finish_reason=self._finish_reason,
            versions=self._versions,
            label=self._label,
            dropped=self._dropped,
        )

    def _event(self, data: bytes) -> bool:
        if data == _DONE:
            self._done = True
            return False
        if data.startswith(_ERRORS):
            url, words = self._wanted.info.url, data.decode("utf-8", "replace")
            if not self._token_ids and is_refusal(data):
                raise RequestRefused(f"{url}: the engine refused what it was asked for: {words}")
            raise BackendError(f"{url}: the engine failed in the middle of an answer: {words}", retryable=True)
        part = self._read(data, self._wanted, len(self._token_ids))
        token_ids, logprobs = part.token_ids, part.logprobs
        if len(token_ids) != len(logprobs):
            raise ContractBroken(
                f"it drops token ids or logprobs: {len(token_ids)} ids, {len(logprobs)} logprobs in one event"
            )
        self._count(len(self._token_ids) + len(token_ids), part.sampled)
        self._finish_reason = part.finish_reason or self._finish_reason
        self._versions = part.versions or self._versions
        self._label = part.label or self._label
        keep = self._sink(token_ids, logprobs) if token_ids else None
        stopped = keep is not None and part.finish_reason is None
        if stopped:
            self._dropped = len(token_ids[keep:])
            token_ids, logprobs = token_ids[:keep], logprobs[:keep]
            self._finish_reason, self._done = "tool_call", True
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        if stopped:
            self._sampled = len(self._token_ids)
            self._versions = _first(self._versions, self._sampled)
        return stopped

    def _count(self, came: int, sampled: int | None) -> None:
        """Check the tokens so far against the request, and against the engine's own count if reported."""
        if came > self._wanted.max_tokens:
            raise ContractBroken(f"asked for at most {self._wanted.max_tokens} tokens, it sampled {came} and goes on")
        if sampled is not None:
            self._sampled = sampled
            if sampled != came:
                raise ContractBroken(f"it drops or repeats tokens: counts differ: {came} ids, {sampled} in its usage")


def _first(runs: Sequence[tuple[str, int, int]], count: int) -> Sequence[tuple[str, int, int]]:
    """Return the runs of the first `count` tokens; empty if the runs do not cover all these tokens."""
    kept = [(version, start, min(end, count)) for version, start, end in runs if start < count]
    return kept if kept and kept[-1][2] == count else ()
