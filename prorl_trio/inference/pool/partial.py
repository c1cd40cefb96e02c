"""A completion over several attempts: after a pause or a failure it continues from the sampled tokens.

Continuing from the sampled tokens draws from the same distribution as an uninterrupted completion. Sampling anew would
favour short completions, because they are cut less often. So received tokens are never sampled again.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from prorl_trio.inference.engines.protocol import Completion, span_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.inference.engines.protocol import CompletionRequest, EngineInfo
    from prorl_trio.types.models import FinishReason, PolicySpan


class PartialCompletion:
    """The tokens sampled after one prompt so far. Belongs to one task; survives attempts and a change of backend.

    Attributes:
        request: the request that all attempts together answer.
        stop: called after each token with all ids so far; returns whether they are enough. None: never stop early.
        stream: stream tokens as they are sampled, so that the tokens of a failed attempt are kept.
        slice_tokens: size of the first slice of an unstreamed completion; 0: one piece. Each further slice is as long
            as all before it, so at most half of the completion is lost at once. A guided completion is never continued:
            the tokens sampled when an attempt ends are all.
        admit: called before an attempt with the version it would sample under, and the versions of the tokens so far.
            Its exceptions end the completion.
    """

    def __init__(
        self,
        request: CompletionRequest,
        *,
        stop: Callable[[Sequence[int]], bool] | None = None,
        stream: bool = False,
        admit: Callable[[str, Sequence[str]], None] | None = None,
        slice_tokens: int = 0,
    ) -> None:
        prompt = request.prompt_token_ids
        self._prompt = prompt if isinstance(prompt, array) else array("i", prompt)
        self.request = msgspec.structs.replace(request, prompt_token_ids=self._prompt)
        self.slice_tokens = slice_tokens
        self.stop = stop
        self.stream = stream or stop is not None
        self.admit = admit
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._spans: list[PolicySpan] = []
        self._so_far = array("i")
        """The ids of `_token_ids`, followed by the streamed ids of the current attempt."""
        self._streamed_logprobs = array("f")
        self._streamed_under: list[tuple[int, str]] = []
        """The version in force from each streamed token on."""
        self._info: Callable[[], EngineInfo] | None = None
        self._before: EngineInfo | None = None

    def __len__(self) -> int:
        """Return the number of tokens sampled so far."""
        return len(self._token_ids)

    @property
    def begun(self) -> bool:
        """Return True after the first attempt has started."""
        return self._info is not None

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Return the ids that the next attempt continues."""
        return self._prompt + self._token_ids if self._token_ids else self._prompt

    @property
    def prompt_tokens(self) -> int:
        """Return the number of ids that the next attempt continues."""
        return len(self._prompt) + len(self)

    @property
    def room(self) -> int:
        """Return the number of tokens that may still be sampled."""
        return self.request.max_tokens - len(self)

    @property
    def next_tokens(self) -> int:
        """Return the number of tokens to request in the next unstreamed attempt."""
        slices = self.slice_tokens if self.request.guide is None else 0
        return min(self.room, max(slices, len(self))) if slices else self.room

    def begin_attempt(self, info: Callable[[], EngineInfo]) -> Completion | None:
        """Return the completion if the tokens so far already complete it. Otherwise an attempt may begin.

        Args:
            info: returns the known facts about the engine; its version may change during the attempt.

        Raises:
            Exceptions of `admit`.
        """
        self._so_far, self._streamed_logprobs, self._streamed_under = self._token_ids[:], array("f"), []
        self._info, self._before = info, info()
        if self._token_ids and self._token_ids[-1] in self.request.sampling.stop_token_ids:
            return self.whole("stop")
        if self._token_ids and self.stop is not None and self.stop(self._token_ids):
            return self.whole("tool_call")
        if self._token_ids and self.request.guide is not None:  # a new attempt would restart its grammar
            return self.whole("abort")
        if self.room < 1 or (self._token_ids and self.prompt_tokens >= self._before.max_model_len):
            return self.whole("length")
        if self.admit is not None:
            self.admit(self._before.policy_version, [span.policy_version for span in self._spans])
        return None

    def add(self, completion: Completion) -> Completion:
        """Add the result of an attempt, and return the completion with the tokens of earlier attempts in front.

        Its spans are those reported by the engine, by `version_name`. Without a report they have the version in force
        when the attempt began, or when each streamed token arrived. But if the engine reports an unknown name for its
        weights at the end, they get that name.
        """
        before, after = self._before, self._engine()
        assert before is not None, "begin_attempt comes first"
        count, last = len(completion.token_ids), version_name(completion.label, before, after)
        if completion.versions_told:
            spans = [
                msgspec.structs.replace(span, policy_version=version_name(span.policy_version, before, after))
                for span in completion.spans
            ]
        elif last not in ("", before.policy_version, after.policy_version):
            spans = [self._span(0, count, last)]
        elif self._streamed_under:
            spans = self._streamed_spans(count)
        else:
            spans = [self._span(0, count, before.policy_version)]
        self._append(completion.token_ids, completion.logprobs, spans)
        return self.whole(completion.finish_reason, completion.dropped_tokens)

    def cut(self) -> int:
        """Keep the streamed tokens of an attempt that ended without a completion. Returns their number."""
        streamed = len(self._streamed_logprobs)
        self._append(self._so_far[len(self) :], self._streamed_logprobs, self._streamed_spans(streamed))
        return streamed

    def _engine(self) -> EngineInfo:
        assert self._info is not None, "begin_attempt comes first"
        return self._info()

    def receive(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> int | None:
        """Add the next tokens of a stream; this is a `TokenSink`.

        Returns how many of these tokens to keep if the completion must stop there; None to continue.
        """
        version = self._engine().policy_version
        if not self._streamed_under or self._streamed_under[-1][1] != version:
            self._streamed_under.append((len(self._streamed_logprobs), version))
        if self.stop is None:
            self._so_far.extend(token_ids)
            self._streamed_logprobs.extend(logprobs)
            return None
        for index, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), 1):
            self._so_far.append(token_id)
            self._streamed_logprobs.append(logprob)
            if self.stop(self._so_far):
                return index
        return None

    def _streamed_spans(self, count: int) -> list[PolicySpan]:
        """Return the spans of the first `count` streamed tokens.

        Each has the version that was in force when its tokens arrived.
        """
        ends = [*(start for start, _ in self._streamed_under[1:]), count]
        return [
            self._span(min(start, count), min(end, count), version)
            for (start, version), end in zip(self._streamed_under, ends, strict=False)
        ]

    def _span(self, start: int, end: int, version: str) -> PolicySpan:
        return span_of(self._engine(), self.request.sampling, self.request.guide, start, end, version)

    def _append(self, token_ids: array[int], logprobs: array[float], spans: Sequence[PolicySpan]) -> None:
        offset = len(self)
        # An unstreamed answer stays in the engine's own arrays. Arrays returned by `whole` are never modified.
        self._token_ids = self._token_ids + token_ids if offset else token_ids
        self._logprobs = self._logprobs + logprobs if offset else logprobs
        for span in spans:
            if span.start < span.end:
                moved = msgspec.structs.replace(span, start=span.start + offset, end=span.end + offset)
                last = self._spans[-1] if self._spans else None
                if last is not None and msgspec.structs.replace(last, start=moved.start, end=moved.end) == moved:
                    self._spans[-1] = msgspec.structs.replace(last, end=moved.end)
                else:
                    self._spans.append(moved)

    def whole(self, finish_reason: FinishReason, dropped_tokens: int = 0) -> Completion:
        """Return the tokens so far as a completion with this finish reason."""
        last = self._spans[-1] if self._spans else None
        return Completion(
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            finish_reason=finish_reason,
            policy_version=last.policy_version if last else "",
            engine=last.engine if last else "",
            spans=list(self._spans),
            dropped_tokens=dropped_tokens,
        )


def version_name(label: str, before: EngineInfo, after: EngineInfo) -> str:
    """Return the recorded version of weights that the engine calls `label`.

    `before` and `after` are the known facts at the beginning and end of the attempt: the label of its weights, and the
    pool's version for them. A label that matches neither belongs to weights announced only to the engine, and stands
    for itself. If no label was sent to the engine, the version is that of `before`.
    """
    if label == before.label:
        return before.policy_version
    return after.policy_version if label == after.label or not after.label else label
