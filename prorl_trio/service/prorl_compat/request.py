"""Requests of a ProRL client, and the jobs made from them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import uuid4

import msgspec

from prorl_trio.types.errors import MalformedJob
from prorl_trio.types.field_errors import malformed_job
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_DATA_SOURCE: Final = "swebench"
_T = TypeVar("_T")
_ROUTING: Final = frozenset({"data_source", "instance_id", "trajectory_id"})


class UnknownDataSource(MalformedJob):
    """Raised for a `data_source` that is not in `rest.data_sources`."""

    code = "unknown_data_source"


class ProcessRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /process`. Unknown fields are ignored, as the ProRL server does."""

    instance: dict[str, Any]
    sampling_params: dict[str, Any] = {}
    job_id: str | None = None


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /cancel`."""

    job_id: str


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /add_llm_server`."""

    address: str


class _RewardModel(msgspec.Struct, frozen=True):
    ground_truth: Any = None


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an instance that are read for every handler. The ids may be numbers."""

    data_source: str = DEFAULT_DATA_SOURCE
    instance_id: str | int = ""
    trajectory_id: str | int | None = None


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    """An instance with a question and a gold answer. `prompt` is text or messages."""

    prompt: str | list[dict[str, Any]]
    reward_model: _RewardModel


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters that are used. Others are ignored: see docs/prorl-clients.md for why."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_output_tokens: int | None = None
    max_iterations: int | None = None
    max_model_len: int | None = None


class _Form(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameter that decides whether the result has tokens."""

    token_level_generation: bool | None = None


def make_spec(request: ProcessRequest, data_sources: Mapping[str, str]) -> JobSpec:
    """Return the job for a request. Without a `job_id`, each request is a new job.

    Raises:
        UnknownDataSource: no handler is configured for its `data_source`.
        MalformedJob: a field that the handler or the sampling needs is missing or wrong; `path` names it.
    """
    instance = _read(request.instance, Instance, "$.instance")
    handler = data_sources.get(instance.data_source)
    if handler is None:
        known = ", ".join(sorted(data_sources))
        raise UnknownDataSource(
            f"no handler for data_source {instance.data_source!r}; configured in rest.data_sources: {known}",
            "$.instance.data_source",
        )
    sampling = _read(request.sampling_params, _Sampling, "$.sampling_params")
    asked = {name: value for name, value in msgspec.structs.asdict(sampling).items() if value is not None}
    own = {"max_iterations": "max_turns", "max_model_len": "max_trajectory_tokens"}
    of_job = {field: asked.pop(name) for name, field in own.items() if name in asked}
    instance_id = str(instance.instance_id)
    try:
        return JobSpec(
            job_id=request.job_id or f"{instance_id[:100]}-{uuid4().hex}",
            instance=TaskInstance(
                instance_id=instance_id, handler=handler, payload=_payload(handler, request.instance)
            ),
            group_id=instance_id,
            sampling=SamplingParams(**asked),
            **of_job,
        )
    except ValueError as exc:
        raise MalformedJob(str(exc), "$") from None


def question_of(instance: dict[str, Any]) -> str:
    """Return the text of an instance's prompt. If it is messages (also as JSON), return the user's last one."""
    prompt = _messages_of(instance.get("prompt", instance.get("problem_statement", "")))
    if isinstance(prompt, str):
        return prompt
    by_user = [message for message in prompt if message.get("role", "user") == "user"]
    return _text_of(by_user[-1].get("content")) if by_user else ""


def wants_tokens(request: ProcessRequest) -> bool:
    """Return whether messages of the result should have tokens: true unless the client says that it works on text."""
    return _read(request.sampling_params, _Form, "$.sampling_params").token_level_generation is not False


def _messages_of(prompt: object) -> str | list[dict[str, Any]]:
    """Return the messages of a prompt, or its text if it has none. Tables often hold the messages as JSON."""
    if isinstance(prompt, str) and prompt.lstrip().startswith("["):
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(prompt, type=list[dict[str, Any]])
    if isinstance(prompt, list):
        return [message for message in prompt if isinstance(message, dict)]
    return prompt if isinstance(prompt, str) else ""


def _text_of(content: object) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(_text_of(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _payload(handler: str, instance: dict[str, Any]) -> dict[str, Any]:
    """Return the payload for the handler. A handler not known here gets the instance without the routing fields."""
    return _PAYLOADS.get(handler, _as_it_is)(instance)


def _question_and_answer(instance: dict[str, Any]) -> dict[str, Any]:
    read = _read(instance, _Question, "$.instance")
    gold = read.reward_model.ground_truth
    if gold is None or gold == []:
        raise MalformedJob("the instance has no gold answer", "$.instance.reward_model.ground_truth")
    return {"question": question_of(instance), "answer": list(map(str, gold)) if isinstance(gold, list) else str(gold)}


def _as_it_is(instance: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in instance.items() if name not in _ROUTING}


_PAYLOADS: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "math": _question_and_answer,
    "stem": _question_and_answer,
}


def _read(value: dict[str, Any], kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise malformed_job(exc, prefix=where) from None
