"""The log-probabilities that a policy gradient may divide by: those of the whole, untempered distribution.

TRL's ratio compares them with the trainer's own at `temperature` over the whole vocabulary. A node records what the
engine said: at temperature 1, with nothing cut off, that is the same thing; in every other case it is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from prorl_trio.types.models import Outcome, SamplingParams


class LogprobsRefused(ConfigError):
    """Rollouts were, or would be, sampled in a way whose log-probabilities TRL cannot train with."""


def check_arguments(args: Any) -> None:
    """Check how TRL's arguments say that completions are sampled.

    Args:
        args: a `GRPOConfig` or `AsyncGRPOConfig`.

    Raises:
        LogprobsRefused: not from the policy's own distribution.
    """
    neutral = {"temperature": (1.0,), "top_p": (1.0,), "top_k": (0, None), "min_p": (0.0, None)}
    for name, allowed in {**neutral, "repetition_penalty": (1.0,)}.items():
        value = getattr(args, name)
        if value not in allowed:
            raise LogprobsRefused(
                f"{type(args).__name__}.{name} is {value}: only {allowed[0]} can be trained with, since a node records "
                "log-probabilities of the policy's own distribution, and TRL compares those of this one with them"
            )


def check_sampling(sampling: SamplingParams) -> None:
    """Check the sampling parameters of jobs to be.

    Raises:
        LogprobsRefused: as `check_arguments`.
    """
    if why := _bent(sampling.temperature, sampling.top_p, sampling.top_k):
        raise LogprobsRefused(f"the jobs' sampling parameters have {why}; TRL trains with temperature 1 and no cuts")


def check_recorded(outcome: Outcome) -> None:
    """Check what was recorded of a rollout's sampled tokens.

    Raises:
        LogprobsRefused: the engine's log-probabilities are not those of the policy's own distribution, or nobody knows.
    """
    for index, segment in enumerate(outcome.trajectory.segments if outcome.trajectory is not None else []):
        for span in (each for each in segment.spans if each.constraint is None):  # the others are not trained on
            why = _bent(span.temperature, span.top_p, span.top_k)
            if not why and span.logprob_kind != "raw":
                why = f"{span.logprob_kind} log-probabilities (of {span.engine}; vLLM: --logprobs-mode raw_logprobs)"
            if why:
                raise LogprobsRefused(
                    f"job {outcome.job_id}, segment {index}, tokens {span.start} to {span.end} were recorded with "
                    f"{why}: TRL needs those of the policy's own distribution"
                )


def _bent(temperature: float, top_p: float, top_k: int) -> str:
    if temperature != 1.0:
        return f"temperature {temperature:g}"
    if top_p != 1.0:
        return f"top_p {top_p:g}"
    return f"top_k {top_k}" if top_k > 0 else ""
