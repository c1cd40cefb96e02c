"""A completion over several attempts: a pause or a failure cuts it, and it is continued from what was sampled.

Continuing from the sampled tokens draws from the same distribution as going on would have; sampling anew would favour
short completions, as they are cut less often. So no token that was received is ever sampled again.
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
    """The tokens sampled after one prompt so far. Belongs to one task; survives the attempts, and a change of backend.

    Attributes:
        request: what all attempts together are to answer.
        stop: asked, after each token that came, with all ids so far, whether it is enough; None: never stop early.
        stream: have tokens sent as they are sampled, so that those of an attempt that fails are kept.
        slice_tokens: have it answered in slices where it is not streamed, the first of so many tokens, each further one
            as long as all before it, so that no more than half of it is lost at once; 0: in one piece. One that is kept
            to a form is never continued: what is sampled of it when an attempt ends is all.
        admit: told, before an attempt, which version it would sample under, and those of the tokens so far; what it
            raises ends the completion.
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
        """The ids of `_token_ids` and, after them, those that the present attempt has streamed."""
        self._streamed_logprobs = array("f")
        self._streamed_under: list[tuple[int, str]] = []
        """From which streamed token on which version was in force."""
        self._info: Callable[[], EngineInfo] | None = None
        self._before: EngineInfo | None = None

    def __len__(self) -> int:
        """Return the number of tokens sampled so far."""
        return len(self._token_ids)

    @property
    def begun(self) -> bool:
        """Return True once an attempt was made."""
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
        """The number of tokens to ask the next attempt for, where it is answered in one piece."""
        slices = self.slice_tokens if self.request.guide is None else 0
        return min(self.room, max(slices, len(self))) if slices else self.room

    def begin_attempt(self, info: Callable[[], EngineInfo]) -> Completion | None:
        """Return the completion, if what was sampled before is all of it already. Otherwise an attempt may begin.

        Args:
            info: what is known of the engine; the version it tells may change while the attempt lasts.

        Raises:
            Whatever `admit` does.
        """
        self._so_far, self._streamed_logprobs, self._streamed_under = self._token_ids[:], array("f"), []
        self._info, self._before = info, info()
        if self._token_ids and self._token_ids[-1] in self.request.sampling.stop_token_ids:
            return self.whole("stop")
        if self._token_ids and self.stop is not None and self.stop(self._token_ids):
            return self.whole("tool_call")
        if self._token_ids and self.request.guide is not None:  # it would begin with its form anew
            return self.whole("abort")
        if self.room < 1 or (self._token_ids and self.prompt_tokens >= self._before.max_model_len):
            return self.whole("length")
        if self.admit is not None:
            self.admit(self._before.policy_version, [span.policy_version for span in self._spans])
        return None

    def add(self, completion: Completion) -> Completion:
        """Add what an attempt ended with, and return the completion, with what earlier ones sampled in front.

        Its spans are those that the engine tells, by `version_name`. If it tells none, they are of the version that was
        in force when the attempt began, or each streamed token came; but if it says at the end that its weights have
        another name than anybody gave them, of these.
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
        """Keep the tokens that an attempt had streamed that ended without a completion. Returns how many these are."""
        streamed = len(self._streamed_logprobs)
        self._append(self._so_far[len(self) :], self._streamed_logprobs, self._streamed_spans(streamed))
        return streamed

    def _engine(self) -> EngineInfo:
        assert self._info is not None, "begin_attempt comes first"
        return self._info()

    def receive(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> int | None:
        """Add the next tokens of a stream; this is a `TokenSink`.

        Returns how many of them to keep, if the completion is to stop there; None: go on.
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
        """Return the spans of the first `count` tokens that were streamed.

        Each is under the version that was in force when its tokens came.
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
        # An answer in one piece stays the engine's own arrays. Those given away in `whole` are never changed.
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
        """Return what was sampled so far, as a completion that ended so."""
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
    """Return what weights are recorded as that the engine calls `label`.

    `before` is what was known of it when the attempt began, and `after` what is when it ended: the label of its
    weights, and the version of the policy that the pool knows them by. A label that is neither's is of weights that
    only the engine was told of, and stands for itself. Where the engine was told nothing, the version is the one
    before.
    """
    if label == before.label:
        return before.policy_version
    return after.policy_version if label == after.label or not after.label else label
