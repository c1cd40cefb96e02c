"""Jobs made from SkyRL's prompts and sampling parameters. Pure, without SkyRL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.integrations.verl.jobs import JobTemplate, Sampling, plain, sampling_of, task_of_row
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.types.models import JobSpec, TaskInstance

NEUTRAL: Final = {"min_p": 0.0, "stop": None, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0}
"""SkyRL's sampling parameters that a node does not support, and the value that each must have."""
IGNORED: Final = frozenset({"min_tokens", "skip_special_tokens", "include_stop_str_in_output", "logprobs"})
"""SkyRL's sampling parameters about text, which no rollout reads, and about what a node always returns."""


def sampling_and_limit(params: Mapping[str, Any]) -> tuple[Sampling, int]:
    """Return SkyRL's sampling parameters as a node has them, and the limit of a turn's tokens.

    Raises:
        ConfigError: a node does not support a parameter.
    """
    for name, neutral in NEUTRAL.items():
        if name in params and params[name] != neutral and not (neutral is None and not params[name]):
            raise ConfigError(f"generator.sampling_params.{name}={params[name]}: rollouts on a node need {neutral}")
    rest = {name: value for name, value in params.items() if name not in NEUTRAL and name not in IGNORED}
    limit = rest.pop("max_tokens", None)
    if not limit:
        raise ConfigError("generator.sampling_params.max_generate_length: set the limit of a turn's tokens")
    return sampling_of({"temperature": 1.0, "top_p": 1.0, "top_k": -1, **rest}), int(limit)


def spec_of(
    template: JobTemplate,
    row: Mapping[str, Any],
    trajectory_id: Any,
    params: Mapping[str, Any],
    *,
    trains: bool,
) -> JobSpec:
    """Return the job of one trajectory: its group is the prompt's `uid`, and an evaluation overtakes training.

    Raises:
        ConfigError: a parameter is not supported, or the row is no task.
    """
    sampling, limit = sampling_and_limit(params)
    named = {**row, "uid": trajectory_id.instance_id, "session_id": trajectory_id.repetition_id}
    spec = template.spec_of(named, sampling)
    return msgspec.structs.replace(
        spec,
        sampling=msgspec.structs.replace(spec.sampling, max_output_tokens=limit),
        priority="train" if trains else "eval",
    )


def row_of(prompt: Any, env_class: str, extras: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a data row: the columns of SkyRL's data set, and its `prompt` and `env_class`."""
    return {**(extras or {}), "prompt": prompt, "env_class": env_class}


def task_of_prompt(row: Mapping[str, Any]) -> TaskInstance:
    """Return the task of a data row: the one in its column `task`, or else a mathematical problem.

    `task` holds a `TaskInstance`: `instance_id`, `handler` and `payload`. A mathematical problem has the form of
    SkyRL's own data sets: the question is the last message of `prompt`, the answer is `reward_spec["ground_truth"]`.

    Raises:
        ConfigError: the row holds neither.
    """
    extra = {**(plain(row.get("extra_info")) or {}), "task": plain(row.get("task"))}
    problem = {
        "extra_info": extra,
        "reward_model": row.get("reward_spec") or row.get("reward_model"),
        "raw_prompt": row["prompt"],
        "data_source": row.get("data_source", row["env_class"]),
        "uid": row["uid"],
    }
    try:
        return task_of_row(problem)
    except ConfigError as exc:
        raise ConfigError(
            f"prompt {row['uid']!r} has no column `task`, and no question with reward_spec['ground_truth'] either "
            f"({exc}): pass the generator task='package.module:function'"
        ) from exc
