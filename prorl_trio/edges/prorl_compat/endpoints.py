"""The ProRL endpoints, from `/start` to `/clear_llm_server`, on top of the node's own sessions and pool."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
import trio

from prorl_ipc.session import AllJobs, TheseJobs
from prorl_trio.config import BackendConfig, HeadConfig
from prorl_trio.edges.operations import operate
from prorl_trio.edges.requests import ErrorDetail, error_of
from prorl_trio.edges.responses import Response
from prorl_trio.edges.rest.call import ApiError, Endpoint, decode_body, status_of
from prorl_trio.edges.rest.schema import ErrorBody, NoQuery
from prorl_trio.edges.tcp import is_loopback
from prorl_trio.sessions.cancelling import cancel
from prorl_trio.sessions.submission import submit_one
from prorl_trio.tasks.sets.swe_rows import Specifications, read_specifications, read_swe_row
from prorl_trio.threads import run_sync
from prorl_trio.types.backends import AddBackend, ListBackends, RemoveBackends
from prorl_trio.types.errors import (
    BackendError,
    ConfigError,
    DuplicateJob,
    MalformedJob,
    ServiceError,
    UnknownBackend,
    malformed_job,
)
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from prorl_trio.config import NodeConfig
    from prorl_trio.edges.rest.call import Api, Call
    from prorl_trio.sessions.node_api import NodeApi
    from prorl_trio.sessions.session import Session
    from prorl_trio.types.models import Outcome, Segment, Timing, ToolCall, ToolSchema, Trajectory, Turn


OPENAI_PATH: Final = "/v1"
"""The path that users of the ProRL server append to an engine's address."""
SESSION: Final = "prorl"
"""The session that owns all jobs of these endpoints."""
LOOPBACK: Final = ("127.0.0.0/8", "::1", "localhost")
"""Addresses at which engines may be added if `backends.allowed` is empty."""

RESOLVED_ABOVE: Final = 0.99
"""Rewards above this count as solved, as in the ProRL server."""
TOKEN_KEYS: Final = ("token_ids", "input_ids", "logprobs")

WHO: Final = "a client of the ProRL API"
DEFAULT_DATA_SOURCE: Final = "swebench"
NO_SPECIFICATIONS: Final = Specifications({})
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


def make_spec(
    request: ProcessRequest, data_sources: Mapping[str, str], specifications: Specifications = NO_SPECIFICATIONS
) -> JobSpec:
    """Return the job for a request. Without a `job_id`, each request is a new job.

    `specifications` name the tests' commands of published rows of software engineering that have none themselves.

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
    payload = _payload(handler, request.instance, specifications)
    try:
        return JobSpec(
            job_id=request.job_id or f"{instance_id[:100]}-{uuid4().hex}",
            instance=TaskInstance(instance_id=instance_id, handler=handler, payload=payload),
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


def _payload(handler: str, instance: dict[str, Any], specifications: Specifications) -> dict[str, Any]:
    """Return the payload for the handler. A handler not known here gets the instance without the routing fields."""
    if handler in ("math", "stem"):
        return _question_and_answer(instance)
    if handler == "swe":
        try:
            row = read_swe_row(instance, str(instance.get("instance_id", "")), specifications, dict)
        except ValueError as exc:
            raise MalformedJob(str(exc), "$.instance") from None
        if row is not None:
            return row.payload
    return {name: value for name, value in instance.items() if name not in _ROUTING}


def _question_and_answer(instance: dict[str, Any]) -> dict[str, Any]:
    read = _read(instance, _Question, "$.instance")
    gold = read.reward_model.ground_truth
    if gold is None or gold == []:
        raise MalformedJob("the instance has no gold answer", "$.instance.reward_model.ground_truth")
    return {"question": question_of(instance), "answer": list(map(str, gold)) if isinstance(gold, list) else str(gold)}


def _read(value: dict[str, Any], kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise malformed_job(exc, prefix=where) from None


class Asked(NamedTuple):
    """The parts of a request that decide the form of its result.

    Attributes:
        question: the user's message, for a rollout that did not record it.
        trajectory_id: the client's own id.
        tokens: messages have their tokens.
    """

    question: str
    trajectory_id: str | int | None = None
    tokens: bool = True


def make_result(
    outcome: Outcome,
    asked: Asked,
    read_turn: Callable[[Sequence[int], Sequence[ToolSchema]], tuple[str, list[ToolCall]]],
) -> dict[str, Any]:
    """Return the result object, ready for JSON.

    Besides the ProRL server's keys it has `reward`, `status`, `cause`, `job_id` and `details`. A failure that is not
    the policy's must not be trained on: it has `critical_error`, `filter` true, `reward` null and `resolved` false.
    `critical_error` is the stage that failed, "timeout" or "cancelled". `read_turn` is the node's.
    """
    trajectory = outcome.trajectory
    reward = outcome.reward
    finished = trajectory is not None and trajectory.stop_reason == "finished"
    messages: list[dict[str, Any]] = []
    if trajectory is not None:
        messages = _messages(trajectory, asked.question, lambda ids: read_turn(ids, trajectory.tools))
    if not asked.tokens:
        messages = [{key: value for key, value in each.items() if key not in TOKEN_KEYS} for each in messages]
    return {
        "instance_id": outcome.instance_id,
        "trajectory_id": asked.trajectory_id,
        "job_id": outcome.job_id,
        "git_patch": outcome.details.get("git_patch"),
        "success": outcome.status == "completed",
        "error": outcome.error or None,
        "finish": finished,
        "end_properly": finished,
        "messages": messages,
        "tools": [] if trajectory is None else trajectory.tools,
        "resolved": reward is not None and reward > RESOLVED_ABOVE,
        "reward": reward,
        "status": outcome.status,
        "cause": outcome.cause,
        "critical_error": _critical_error(outcome),
        "filter": reward is None,
        "timing": _timing(outcome.timing, timed_out=outcome.status == "timed_out"),
        "details": outcome.details,
    }


def _critical_error(outcome: Outcome) -> str | None:
    match outcome.status:
        case "completed":
            return None
        case "timed_out":
            return "timeout"
        case "cancelled":
            return "cancelled"
        case "failed":
            return "eval" if outcome.timing.eval_s else "run" if outcome.timing.run_s else "init"


def _messages(
    trajectory: Trajectory, question: str, read: Callable[[Sequence[int]], tuple[str, list[ToolCall]]]
) -> list[dict[str, Any]]:
    """Return a trajectory as messages.

    The `token_ids` of a segment's messages, one after another, are exactly its token ids. Sampled tokens are in
    messages of the assistant, each with the whole prompt before it as `input_ids`. Tokens between two of these
    (observations of a turn, a reminder) all belong to the first message between them.
    """
    messages: list[dict[str, Any]] = []
    for index, segment in enumerate(trajectory.segments):
        turns = [turn for turn in trajectory.turns if turn.segment == index]
        at, said = 0, list[tuple[str, str]]()
        for turn in turns:
            said += [(message.role, message.content) for message in turn.messages]
            messages += _between(said or ([] if at else [("user", question)]), segment, at, turn.completion_start)
            messages.append(_action(turn, segment, read))
            at, said = turn.completion_end, [("tool", text) for text in turn.observations]
        messages += _between(said or ([] if at else [("user", question)]), segment, at, len(segment))
    return messages


def _between(said: Sequence[tuple[str, str]], segment: Segment, start: int, end: int) -> list[dict[str, Any]]:
    """Return the messages between two completions; the first has all the tokens.

    Tokens without recorded text become a user's message with empty text.
    """
    found = []
    for role, content in said or ([("user", "")] if end > start else []):
        found.append(
            {
                "role": role,
                "content": content,
                "token_ids": segment.token_ids[start:end].tolist(),
                "input_ids": None,
                "logprobs": None,
            }
        )
        start = end
    return found


def _action(
    turn: Turn, segment: Segment, read: Callable[[Sequence[int]], tuple[str, list[ToolCall]]]
) -> dict[str, Any]:
    """Return the assistant's message of one completion.

    A call that can be read is moved from the text to `tool_calls`. Others stay in the text: unreadable ones, and those
    that the handler itself took from the text.
    """
    start, end = turn.completion_start, turn.completion_end
    token_ids = segment.token_ids[start:end].tolist()
    content, written = read(token_ids)
    calls = []
    for call in reversed(written):
        if call.raw and not call.error and call.raw in content:
            before, _, after = content.rpartition(call.raw)
            content = (before + after).rstrip()
            calls.append({"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()})
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": calls[::-1],
        "token_ids": token_ids,
        "input_ids": segment.token_ids[:start].tolist(),
        "logprobs": segment.logprobs[start:end].tolist(),
    }


def _timing(timing: Timing, *, timed_out: bool) -> dict[str, Any]:
    return {
        "init_time": timing.init_s,
        "run_time": timing.run_s,
        "eval_time": timing.eval_s,
        "others_time": timing.queued_init_s + timing.queued_run_s + timing.queued_eval_s,
        "counted_elapsed": timing.init_s + timing.run_s + timing.eval_s,
        "timeout_triggered": timed_out,
    }


class CompatError(msgspec.Struct, frozen=True):
    """An error: `detail` as the ProRL server words it, `error` in this project's own form."""

    detail: str
    error: ErrorDetail


def compat_endpoints(
    backends: BackendConfig, *, free: bool, specifications: Specifications = NO_SPECIFICATIONS
) -> list[Endpoint]:
    """Return the endpoints, to be added to the REST application. If `free`, they require no token.

    Engines are added only where `backends` allows it, see `BackendConfig.allowed`. `specifications`: see `make_spec`.
    """
    server = _Server(backends, specifications)
    table: list[tuple[str, str, Callable[[Call], Awaitable[Response]], str, tuple[Any, ...], tuple[int, ...]]] = [
        ("POST", "/start", server.start, "Take jobs from now on.", (), (400,)),
        ("POST", "/stop", server.stop, "Cancel the jobs, forget their results.", (), (503,)),
        ("GET", "/status", server.status, "How many jobs are where.", (), (503,)),
        (
            "POST",
            "/process",
            server.process,
            "Do one rollout and answer with its result. A known job_id joins that job.",
            (ProcessRequest,),
            (400, 409, 429, 503, 504),
        ),
        ("POST", "/cancel", server.cancel, "Cancel a job: its /process answers.", (CancelRequest,), (503,)),
        ("POST", "/add_llm_server", server.add_llm_server, "Add a backend.", (ServerRequest,), (403,)),
        ("POST", "/clear_llm_server", server.clear_llm_server, "Take out the backends that were added here.", (), ()),
    ]
    return [
        Endpoint(
            method=method,
            path=path,
            handler=_with_detail(handler),
            summary=summary,
            query=NoQuery,
            bodies=bodies,
            replies={200: None},
            errors=errors,
            error=_compat_error,
            error_bodies=(CompatError, ErrorBody),
            free=free,
            tags=("ProRL",),
        )
        for method, path, handler, summary, bodies, errors in table
    ]


def configured_endpoints(config: NodeConfig | HeadConfig) -> list[Endpoint]:
    """Return the endpoints, or none if `config` has them off.

    Raises:
        ConfigError: `config` has them require no token where anyone could connect, or `rest.swe_specs` cannot be read.
    """
    rest, host, anyone = config.rest, config.listen.host, ""
    if not is_loopback(host):
        anyone = f"is for a loopback listen.host only, not {host!r}: anyone could come"
    elif config.listen.descriptors:
        anyone = "is not for listen.descriptors: anyone could come"
    elif isinstance(config, HeadConfig):
        anyone = "is not for the head of a fleet: what the policy runs on its nodes could come"
    elif config.sandbox.network:
        anyone = "is for sandboxes without a network: what the policy runs could come (sandbox.network)"
    if rest.prorl_compat and not rest.prorl_compat_token and anyone:
        raise ConfigError(f"rest.prorl_compat_token = false {anyone}")
    backends = BackendConfig(allowed=config.allowed_engines) if isinstance(config, HeadConfig) else config.backends
    if not rest.prorl_compat:
        return []
    specifications = read_specifications(Path(rest.swe_specs) if rest.swe_specs else None)
    return compat_endpoints(backends, free=not rest.prorl_compat_token, specifications=specifications)


class _Server:
    """The state of the endpoints: whether `/start` was called, and the URLs of the engines that were added here.

    The jobs are in the session `SESSION`. Jobs of other sessions, and engines that others have added, are left alone.
    """

    def __init__(self, backends: BackendConfig, specifications: Specifications) -> None:
        self._allowed = backends
        self._specifications = specifications
        self._started = False
        self._engines: set[str] = set()

    async def start(self, _call: Call) -> Response:
        await trio.lowlevel.checkpoint()
        if self._started:
            raise _error(HTTPStatus.BAD_REQUEST, "already_running", "Server is already running")
        self._started = True
        return _say("Server started successfully")

    async def stop(self, call: Call) -> Response:
        """Cancel this session's jobs and drop its outcomes; answer when nothing of the jobs runs any more.

        The node and its backends go on.
        """
        session = self._session(call.api)
        self._started = False
        await cancel(call.api.node, [session], [AllJobs()], "stopped through /stop")
        for job_id in [session.log.job_id(cursor) for cursor in session.log.cursors()]:
            session.forget(job_id)
        return _say("Server stopped successfully")

    async def status(self, call: Call) -> Response:
        session = self._session(call.api)
        await trio.lowlevel.checkpoint()
        at = Counter(job.status for job in session.running_jobs())
        stages = {stage: at[stage] for stage in ("init", "run", "eval")}
        jobs = session.running
        return _json({"status": "running", "running": True, "pending_jobs": jobs, "jobs": jobs, **stages})

    async def process(self, call: Call) -> Response:
        """Run one rollout, and answer with its result.

        A client that disconnects does not cancel it: it asks again with the same job_id.
        """
        api = call.api
        session = self._session(api)
        request = decode_body(call.body, ProcessRequest)
        spec = make_spec(request, api.config.data_sources, self._specifications)
        if not (await api.node.operate(ListBackends())).urls:
            raise _error(HTTPStatus.SERVICE_UNAVAILABLE, "no_llm_server", "No LLM server: /add_llm_server first")
        await self._submit(session, spec, api)
        outcome = await self._outcome(session, spec.job_id, api)
        instance = msgspec.convert(request.instance, Instance)
        asked = Asked(question_of(request.instance), instance.trajectory_id, wants_tokens(request))
        result = await run_sync(_encode, outcome, asked, api.node)
        return Response(result, media_type="application/json")

    async def cancel(self, call: Call) -> Response:
        """Cancel a job, and answer when nothing of it runs any more.

        A job that has ended or never existed is no error.
        """
        session = self._session(call.api)
        job_id = decode_body(call.body, CancelRequest).job_id
        await cancel(call.api.node, [session], [TheseJobs([job_id])], "cancelled through /cancel")
        return _say(f"Cancel requested for job {job_id}")

    async def add_llm_server(self, call: Call) -> Response:
        """Add a backend, also before `/start`.

        One that was added here before is probed again; one that is down joins when it is up. One that others have added
        stays as it is.
        """
        address = decode_body(call.body, ServerRequest).address
        url = (address if "://" in address else f"http://{address}").rstrip("/").removesuffix(OPENAI_PATH)
        node = call.api.node
        if not self._allowed.allows(url, LOOPBACK):
            message = (
                f"{url} was not contacted: backends.allowed in the node's node.toml does not have its address; add it "
                "there (HOST or HOST:PORT), and restart the node"
            )
            raise _error(HTTPStatus.FORBIDDEN, "backend_not_allowed", message)
        if url not in self._engines and url in (await node.operate(ListBackends())).urls:
            return _say(f"Added LLM server {address}")
        self._engines.add(url)
        try:
            await operate(node, AddBackend(url=url), WHO)
        except BackendError as exc:
            if not exc.retryable:
                raise
            await operate(node, AddBackend(url=url, when_up=True), WHO)
            return _say(f"Buffered LLM server {address}: it joins when it is up")
        return _say(f"Added LLM server {address}")

    async def clear_llm_server(self, call: Call) -> Response:
        """Remove the backends that were added here. Jobs go on: they use the backends that are added next."""
        await trio.lowlevel.checkpoint()
        while self._engines:
            with suppress(UnknownBackend):
                await operate(call.api.node, RemoveBackends(url=self._engines.pop()), WHO)
        return _say("Cleared all LLM servers")

    def _session(self, api: Api) -> Session:
        if not self._started:
            raise _error(HTTPStatus.SERVICE_UNAVAILABLE, "not_running", "Server is not running: /start first")
        return api.open_session(SESSION)

    @staticmethod
    async def _submit(session: Session, spec: JobSpec, api: Api) -> None:
        """Submit a job, or join it if it is the same. An ended job with this id and another spec is dropped first."""
        try:
            await submit_one(session, spec, api.node)
        except DuplicateJob:
            if session.log.find(spec.job_id) is None:
                raise
            session.forget(spec.job_id)
            await submit_one(session, spec, api.node)

    @staticmethod
    async def _outcome(session: Session, job_id: str, api: Api) -> Outcome:
        running = session.running_job(job_id)
        if running is not None:
            await api.wait_all([running.ended], api.config.prorl_compat_timeout_s, api.config.prorl_compat_timeout_s)
            if (outcome := running.outcome) is not None:  # also when it was forgotten meanwhile, by `/stop`
                return outcome
        elif (held := await session.outcome_of(job_id)) is not None:
            return held.decode()
        if api.closing.is_set():
            raise _error(HTTPStatus.SERVICE_UNAVAILABLE, "closing", "the node is shutting down")
        limit_s = api.config.prorl_compat_timeout_s
        message = f"Processing timed out: job {job_id} has not ended within {limit_s:g} s and goes on; ask again"
        raise _error(HTTPStatus.GATEWAY_TIMEOUT, "timeout", message)


def _encode(outcome: Outcome, asked: Asked, node: NodeApi) -> bytes:
    return msgspec.json.encode(make_result(outcome, asked, node.read_turn), enc_hook=str)


def _with_detail(handler: Callable[[Call], Awaitable[Response]]) -> Callable[[Call], Awaitable[Response]]:
    """Return `handler` with its errors answered as a `CompatError`."""

    @wraps(handler)
    async def handle(call: Call) -> Response:
        try:
            return await handler(call)
        except ApiError as exc:
            status, detail = exc.status, exc.detail
        except UnknownDataSource as exc:
            status, detail = HTTPStatus.BAD_REQUEST, error_of(exc)
        except (ServiceError, BackendError) as exc:
            detail = error_of(exc)
            status = status_of(detail)
        await trio.lowlevel.checkpoint()
        return _json(_compat_error(detail), status)

    return handle


def _compat_error(detail: ErrorDetail) -> CompatError:
    return CompatError(detail=detail.message, error=detail)


def _error(status: int, code: str, message: str) -> ApiError:
    return ApiError(status, ErrorDetail(code=code, message=message))


def _say(words: str) -> Response:
    return _json({"status": words})


def _json(body: object, status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(body), int(status), media_type="application/json")
