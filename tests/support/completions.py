"""Completions as tests ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorl_trio.inference.engines.protocol import CompletionRequest
from prorl_trio.inference.pool.partial import PartialCompletion
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLING = SamplingParams()


def asked(
    prompt_token_ids: Sequence[int] = (1, 2, 3),
    max_tokens: int = 8,
    *,
    sampling: SamplingParams = SAMPLING,
    request_id: str = "r-t0",
    timeout_s: float = 10.0,
    **more: Any,
) -> CompletionRequest:
    """Return a request of an engine."""
    return CompletionRequest(
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        request_id=request_id,
        timeout_s=timeout_s,
        **more,
    )


def begun(request: CompletionRequest | None = None, **how: Any) -> PartialCompletion:
    """Return a completion of which there is nothing yet. `how` as `PartialCompletion`."""
    return PartialCompletion(request or asked(), **how)
