"""Jobs made from verl's data rows and sampling parameters. Pure, without verl."""

from __future__ import annotations

import importlib
import secrets
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import JobSpec, PolicySpan, SamplingParams, TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prorl_trio.integrations.verl.rows import RowLimits

OURS: Final = ("job_id", "instance", "group_id")
"""Fields of a `JobSpec` that a configuration cannot set, because they come from the row."""
ATTEMPTS: Final = 3
"""Default attempts of a rollout when the infrastructure fails, without `retry` in the configuration. A final failure
costs verl a group."""
NEUTRAL: Final = {"repetition_penalty": 1.0, "logprobs": None}
"""Sampling parameters of verl that are not passed on, and their required value; None: any."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """A way of sampling as verl configures it, in this project's terms: `top_k` 0 is all of the vocabulary."""

    temperature: float
    top_p: float
    top_k: int

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0

    def tells(self, span: PolicySpan) -> bool:
        """Return whether a span's log-probabilities equal a trainer's at this temperature.

        Such a trainer takes the softmax of the logits over the temperature, over the whole vocabulary.
        """
        if self.truncated or span.top_p < 1.0 or span.top_k > 0:
            return False
        if span.logprob_kind == "processed":
            return span.temperature == self.temperature
        return self.temperature == 1.0 and (span.logprob_kind == "raw" or span.temperature == 1.0)


class JobTemplate:
    """The fields that all jobs of an agent loop have in common: the `job` of its configuration.

    Args:
        fields: fields of a `JobSpec`; `sampling` without temperature, `top_p` and `top_k`, which verl sets. Without
            `max_output_tokens` a turn may fill the response. Without `max_trajectory_tokens` a segment may fill its
            row. Without `retry` a rollout that the infrastructure fails has `ATTEMPTS` attempts.
        limits: limits of a row.
        task: returns the task of a data row.

    Raises:
        ConfigError: a field is not known, or its value not valid.
    """

    def __init__(
        self, fields: Mapping[str, Any], limits: RowLimits, task: Callable[[Mapping[str, Any]], TaskInstance]
    ) -> None:
        if wrong := [name for name in OURS if name in fields]:
            raise ConfigError(f"job.{wrong[0]}: it comes from the row")
        sampling = dict(fields.get("sampling", {}))
        if wrong := [name for name in ("temperature", "top_p", "top_k") if name in sampling]:
            raise ConfigError(
                f"job.sampling.{wrong[0]}: the trainer's own configuration says that, verl's in "
                f"actor_rollout_ref.rollout.{wrong[0]} and SkyRL's in generator.sampling_params.{wrong[0]}"
            )
        whole = {
            "max_trajectory_tokens": limits.prompt_length + limits.response_length,
            "retry": {"max_attempts": ATTEMPTS},
            **fields,
            "sampling": {"max_output_tokens": limits.response_length, **sampling},
            "job_id": "template",
            "instance": {"instance_id": "", "handler": "", "payload": {}},
        }
        try:
            self._spec = msgspec.convert(whole, JobSpec)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"job: {exc}") from exc
        self._task = task

    def spec_of(self, row: Mapping[str, Any], sampling: Sampling) -> JobSpec:
        """Return the job of one rollout of a row. Each call returns a new job id.

        The group is the row's `uid`, which all rollouts of a prompt share.
        """
        uid = str(row.get("uid") or secrets.token_hex(8))
        member = row.get("session_id")
        number = "" if member is None else f"-{member}"
        # A prompt that verl issues again after a restart keeps its uid, but has new rollouts.
        return msgspec.structs.replace(
            self._spec,
            job_id=f"{uid}{number}-{secrets.token_hex(4)}",
            group_id=uid,
            instance=self._task(row),
            sampling=msgspec.structs.replace(
                self._spec.sampling,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            ),
        )


def sampling_of(params: Mapping[str, Any]) -> Sampling:
    """Return verl's sampling parameters for a rollout, or for its configuration.

    Raises:
        ConfigError: a node does not support these parameters.
    """
    for name, neutral in NEUTRAL.items():
        if neutral is not None and params.get(name, neutral) != neutral:
            raise ConfigError(f"{name} is {params[name]}: rollouts on a node know no such penalty; leave it {neutral}")
    if unknown := sorted(set(params) - {"temperature", "top_p", "top_k", *NEUTRAL}):
        raise ConfigError(f"sampling parameters that rollouts on a node do not know: {', '.join(unknown)}")
    asked = Sampling(
        temperature=float(params["temperature"]), top_p=float(params["top_p"]), top_k=max(0, int(params["top_k"]))
    )
    SamplingParams(temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k)
    return asked


def task_of_row(row: Mapping[str, Any]) -> TaskInstance:
    """Return the task of a data row: the one in its `extra_info["task"]`, or else a mathematical problem.

    `extra_info["task"]` holds a `TaskInstance`: `instance_id`, `handler` and `payload`. A mathematical problem has the
    form of verl's own data sets. The question is `extra_info["question"]`, or else the last message of `raw_prompt`.
    The gold answer is `reward_model["ground_truth"]`.

    Raises:
        ConfigError: the row holds neither.
    """
    extra = plain(row.get("extra_info")) or {}
    if (task := extra.get("task")) is not None:
        try:
            return msgspec.convert(task, TaskInstance)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"extra_info.task of a row: {exc}") from exc
    reward_model = plain(row.get("reward_model")) or {}
    messages = plain(row.get("raw_prompt")) or []
    question = extra.get("question") or (messages[-1]["content"] if messages else "")
    if not question or "ground_truth" not in reward_model:
        raise ConfigError(
            "a row has no extra_info['task'], and no question with a reward_model['ground_truth'] either: name a "
            "function that makes its task as `task: package.module:function` in the agent loop's configuration"
        )
    name = f"{row.get('data_source', 'row')}-{extra.get('index', row.get('index', row.get('uid', '')))}"
    answer = str(reward_model["ground_truth"])
    return TaskInstance(instance_id=name, handler="math", payload={"question": question, "answer": answer})


@cache
def loaded(name: str) -> Any:
    """Return the object named `package.module:name`.

    Raises:
        ConfigError: the object does not exist.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"{name!r} is not package.module:name: {exc}") from exc


def plain(value: Any) -> Any:
    """Return `value` with numpy types converted to builtin types, recursively. Data frames contain numpy types."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
