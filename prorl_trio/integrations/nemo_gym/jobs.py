"""Jobs made from NeMo Gym's rows. Pure, without NeMo Gym."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.types.errors import ConfigError, field_error, unsendable
from prorl_trio.types.models import AgentProgram, JobSpec, TaskInstance

if TYPE_CHECKING:
    from collections.abc import Mapping

TASK_KEY: Final = "prorl"
"""The field of a row that holds its task."""
ATTEMPTS: Final = 3
"""Default attempts of a rollout when the infrastructure fails, without `retry` in the configuration."""
_OURS: Final = ("job_id", "instance", "group_id")
_IGNORED: Final = {"seed"}
"""Fields of `metadata.extra_body` without effect: engines of a node sample without a seed of the request."""


class RowRefused(ValueError):
    """A row cannot become a job. Another attempt cannot help."""


class RowTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The field `prorl` of a row.

    Attributes:
        handler, payload: as in `TaskInstance`.
        instance_id: name of the task; empty: the index that NeMo Gym gave the row.
        agent: as in `JobSpec`; None: the configured one.
    """

    handler: str
    payload: dict[str, Any]
    instance_id: str = ""
    agent: AgentProgram | str | None = None


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `responses_create_params` that become sampling parameters."""

    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None


class JobTemplate:
    """The fields that all jobs of an agent server have in common.

    Args:
        fields: fields of a `JobSpec`: the `job` of the server's configuration.
        resources_server: name of the resources server of rows without a task; empty: such rows are refused.

    Raises:
        ConfigError: a field is unknown, or its value is invalid.
    """

    def __init__(self, fields: Mapping[str, Any], resources_server: str = "") -> None:
        if wrong := [name for name in _OURS if name in fields]:
            raise ConfigError(f"job.{wrong[0]}: it comes from the row")
        instance = {"instance_id": "", "handler": "", "payload": {}}
        whole = {"retry": {"max_attempts": ATTEMPTS}, **fields, "job_id": "template", "instance": instance}
        try:
            self._spec = msgspec.convert(whole, JobSpec)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"job: {exc}") from exc
        self._server = resources_server
        self._run = secrets.token_hex(4)

    def spec_of(self, row: Mapping[str, Any]) -> JobSpec:
        """Return the job of one rollout of a row. Each call returns a new job id.

        Sampling parameters of the row replace the template's. The group is NeMo Gym's index of the task.

        Raises:
            RowRefused: the row has no task, or a field has an invalid value.
        """
        index = row.get("_ng_task_index")
        try:
            task = self._task(row)
            sampling = _read_sampling(row["responses_create_params"])
            name = task.instance_id or ("row" if index is None else f"row-{index}")
            spec = msgspec.structs.replace(
                self._spec,
                job_id=f"{name[:100]}-{secrets.token_hex(8)}",
                group_id="" if index is None else f"{self._run}-{index}",
                instance=TaskInstance(instance_id=name, handler=task.handler, payload=task.payload),
                sampling=msgspec.structs.replace(self._spec.sampling, **sampling),
                agent=self._spec.agent if task.agent is None else task.agent,
            )
        except (msgspec.DecodeError, ValueError, KeyError) as exc:
            raise RowRefused(f"a row cannot become a job: {field_error(exc).problem}") from exc
        if (problem := unsendable(task.payload)) is not None:
            raise RowRefused(f"a row cannot become a job: {problem.problem} - at `{problem.path}`")
        return spec

    def _task(self, row: Mapping[str, Any]) -> RowTask:
        if (task := row.get(TASK_KEY)) is not None:
            return msgspec.convert(task, RowTask)
        if not self._server:
            raise RowRefused(
                f"the row has no field {TASK_KEY!r} with the handler and the payload of its task, and the "
                "configuration of the agent names no resources_server"
            )
        theirs = {key: value for key, value in row.items() if not key.startswith("_ng_")}
        return RowTask(handler="nemo_gym", payload={"server": self._server, "row": theirs})


def _read_sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a row sets."""
    asked = msgspec.convert(params, _Sampling)
    found: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "max_output_tokens")
        if (value := getattr(asked, name)) is not None
    }
    metadata = asked.metadata or {}
    if "chat_template_kwargs" in metadata:
        raise ValueError("metadata.chat_template_kwargs: these are the node's, in model.template_options")
    extra = msgspec.json.decode(metadata.get("extra_body", "{}"), type=dict[str, Any])
    if "top_k" in extra:
        found["top_k"] = max(0, msgspec.convert(extra["top_k"], int))
    if unknown := sorted(set(extra) - {"top_k", *_IGNORED}):
        raise ValueError(f"metadata.extra_body: a node does not support {', '.join(unknown)}")
    return found
