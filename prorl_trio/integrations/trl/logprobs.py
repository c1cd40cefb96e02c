"""The log-probabilities that a policy gradient may divide by: those of the whole, untempered distribution.

TRL's ratio compares them with the trainer's own at `temperature` over the whole vocabulary. A node records what the
engine said: at temperature 1, with nothing cut off, that is the same thing; in every other case it is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.sampling import JobTemplate
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.types.models import Outcome, SamplingParams, TaskInstance

_NOT_FOR_A_NODE: Final = {
    "max_tool_calling_iterations": "Set job=JobTemplate(max_turns=...) of the rollout worker or function instead",
    "chat_template_kwargs": "The node renders prompts: set [model] template_options in its node.toml instead",
    "generation_kwargs": "Set job=JobTemplate(sampling=...) of the rollout function instead",
}
"""Arguments by which TRL itself would make rollouts, and what to set instead."""


class LogprobsRefused(ConfigError):
    """Rollouts were, or would be, sampled in a way whose log-probabilities TRL cannot train with."""


def check_arguments(args: Any) -> None:
    """Check how TRL's arguments say that completions are sampled.

    Args:
        args: a `GRPOConfig` or `AsyncGRPOConfig`.

    Raises:
        LogprobsRefused: not from the policy's own distribution.
        ConfigError: an argument is set that a node would not see.
    """
    neutral = {"temperature": (1.0,), "top_p": (1.0,), "top_k": (0, None), "min_p": (0.0, None)}
    for name, allowed in {**neutral, "repetition_penalty": (1.0,)}.items():
        value = getattr(args, name)
        if value not in allowed:
            raise LogprobsRefused(
                f"{type(args).__name__}.{name} is {value}: only {allowed[0]} can be trained with, since a node records "
                "log-probabilities of the policy's own distribution, and TRL compares those of this one with them"
            )
    for name, instead in _NOT_FOR_A_NODE.items():
        if value := getattr(args, name, None):
            raise ConfigError(f"{type(args).__name__}.{name} is {value}, and does not reach the node. {instead}")


def job_templates(
    job: JobTemplate | Callable[[TaskInstance], JobTemplate], args: Any
) -> Callable[[TaskInstance], JobTemplate]:
    """Return the template of an instance's jobs, in which TRL's `max_completion_length` bounds each row.

    Args:
        job: the fields of each rollout's job; or a function of the instance. A lower bound of its own stays.
        args: a `GRPOConfig` or `AsyncGRPOConfig`.
    """

    def template(instance: TaskInstance) -> JobTemplate:
        own = job if isinstance(job, JobTemplate) else job(instance)
        bounds = list(filter(None, (own.max_completion_tokens, args.max_completion_length)))
        return msgspec.structs.replace(own, max_completion_tokens=min(bounds)) if bounds else own

    return template


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
