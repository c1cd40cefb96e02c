"""One completion over several attempts: a pause or a failure cuts it, and it is continued from what was sampled.

Continuing from the sampled tokens draws from the same distribution as going on would have; sampling anew would favour
short completions, as they are cut less often. So no token that was received is ever sampled again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from prorl_trio.inference.engine import Completion, TokenSink
from prorl_trio.models import PolicySpan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.inference.engine import EngineInfo
    from prorl_trio.models import FinishReason, SamplingParams

__all__ = ["PartialCompletion", "named_spans"]


class PartialCompletion:
    """What was sampled after one prompt so far. Belongs to one task; survives the attempts, and a change of backend.

    Attributes:
        sampling, max_tokens: of all attempts together.
        stop: asked, after each token that came, with all ids so far, whether it is enough; None: never stop early.
        stream: have tokens sent as they are sampled, so that those of an attempt that fails are kept.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        max_tokens: int,
        *,
        stop: Callable[[list[int]], bool] | None = None,
        stream: bool = False,
    ) -> None:
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop = stop
        self.stream = stream or stop is not None
        self._prompt = prompt_token_ids
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[PolicySpan] = []
        self._received: tuple[list[int], list[float]] = ([], [])

    def __len__(self) -> int:
        """Tokens sampled so far."""
        return len(self._token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        """What the next attempt continues."""
        return self._prompt + self._token_ids

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        return self.max_tokens - len(self)

    @property
    def sink(self) -> TokenSink | None:
        """What the next attempt is to be streamed to."""
        return self._receive if self.stream else None

    def begin_attempt(self) -> Completion | None:
        """The completion, if what was sampled before is all of it already. Otherwise an attempt may begin."""
        self._received = ([], [])
        if self._token_ids and self._token_ids[-1] in self.sampling.stop_token_ids:
            return self._whole("stop")
        return self._whole("length") if self.room < 1 else None

    def add(self, completion: Completion, before: str, after: str) -> Completion:
        """An attempt ended: the completion with what earlier ones sampled in front. See `named_spans`."""
        spans = completion.spans or [
            PolicySpan(
                start=0,
                end=len(completion.token_ids),
                policy_version=completion.policy_version,
                engine=completion.engine,
            )
        ]
        self._append(completion.token_ids, completion.logprobs, named_spans(spans, before, after))
        return self._whole(completion.finish_reason)

    def cut(self, info: EngineInfo, version: str) -> None:
        """An attempt ended without a completion: keep the tokens that it had streamed, sampled under `version`."""
        token_ids, logprobs = self._received
        span = PolicySpan(
            start=0,
            end=len(token_ids),
            policy_version=version,
            engine=info.engine,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            logprob_kind=info.logprob_kind,
        )
        self._append(token_ids, logprobs, [span])

    def _receive(self, token_ids: list[int], logprobs: list[float]) -> int | None:
        ids, values = self._received
        for index, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), 1):
            ids.append(token_id)
            values.append(logprob)
            if self.stop is not None and self.stop(self._token_ids + ids):
                return index
        return None

    def _append(self, token_ids: Sequence[int], logprobs: Sequence[float], spans: Sequence[PolicySpan]) -> None:
        offset = len(self)
        self._token_ids += token_ids
        self._logprobs += logprobs
        for span in spans:
            if span.start < span.end:
                moved = msgspec.structs.replace(span, start=span.start + offset, end=span.end + offset)
                last = self._spans[-1] if self._spans else None
                if last is not None and msgspec.structs.replace(last, start=moved.start, end=moved.end) == moved:
                    self._spans[-1] = msgspec.structs.replace(last, end=moved.end)
                else:
                    self._spans.append(moved)

    def _whole(self, finish_reason: FinishReason) -> Completion:
        last = self._spans[-1] if self._spans else None
        return Completion(
            token_ids=list(self._token_ids),
            logprobs=list(self._logprobs),
            finish_reason=finish_reason,
            policy_version=last.policy_version if last else "",
            engine=last.engine if last else "",
            spans=list(self._spans),
        )


def named_spans(spans: Sequence[PolicySpan], before: str, after: str) -> list[PolicySpan]:
    """An engine's spans under the pool's versions: `before` was in force when the attempt began, `after` when it ended.

    The engine knows where one version ended, the pool what it is called: the first span is of `before`, the last of
    `after`. Where there is one span, and the version changed meanwhile, it is `after` if the engine says so, otherwise
    `before`. Where the pool's did not change, several spans are of versions that only the engine was told of.
    """
    names = [span.policy_version for span in spans]
    if len(spans) == 1:
        names = [after if names[0] == after else before]
    elif before != after:
        names[0], names[-1:] = before, [after]
    return [msgspec.structs.replace(span, policy_version=name) for span, name in zip(spans, names, strict=True)]
