"""The node as its edges use it: jobs, backends, statistics."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final, Protocol, cast

import msgspec
import trio

from prorl_trio.agent.external import ExternalAgents
from prorl_trio.agent.mcp import servers_of
from prorl_trio.agents.preset import find_preset
from prorl_trio.pipeline.admission import Load
from prorl_trio.pipeline.job import Job
from prorl_trio.sessions.node_api import Room
from prorl_trio.supervision import vanished_task
from prorl_trio.tasks.handlers.gold_checks import GoldChecks, validate_payload
from prorl_trio.types.errors import ConfigError, Draining, DuplicateJob, MalformedJob, UnknownHandler, UnknownJob
from prorl_trio.types.models import AgentProgram
from prorl_trio.types.programs import FinishAgent, OpenAgent

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from prorl_trio.agent.context import Resources
    from prorl_trio.config import NodeConfig
    from prorl_trio.edges.gateway.app import GatewayTable
    from prorl_trio.inference.pool.pool import Backends
    from prorl_trio.node.drain import EndOfTime
    from prorl_trio.pipeline.job import JobSink
    from prorl_trio.pipeline.live import JobFilter
    from prorl_trio.pipeline.observer import JobView
    from prorl_trio.pipeline.pipeline import Pipeline
    from prorl_trio.sandbox.host import SandboxHost
    from prorl_trio.sandbox.provider import SandboxProvider
    from prorl_trio.tasks.handlers.registry import HandlerRegistry
    from prorl_trio.types.backends import AnswerT, NodeRequest
    from prorl_trio.types.models import JobSpec, ToolCall, ToolSchema

MAX_SHOWN_JOBS: Final = 1_000
"""Limit of jobs in the node's status. The pipeline's part has their total number."""
GOLD_CHECKS_TIMEOUT_S: Final = 30.0
"""Limit of the time that a submit waits for checks of gold answers. Unfinished checks do not stop the submit."""


class Outbox(Protocol):
    """The sessions, for admission and drain, such as `sessions.session_table.SessionTable`."""

    def undelivered(self) -> tuple[int, int]:
        """Return the number of outcomes that are not acknowledged, and their bytes."""
        ...

    @property
    def refusal(self) -> str:
        """Return why no job can be stored now; empty if one can."""
        ...

    async def wait_answered(self) -> None:
        """Return when every job that is being stored was either accepted by the node or refused."""


class Node:
    """A node with its pipeline, backends and sandboxes, for its edges. Implements `sessions.node_api.NodeApi`."""

    def __init__(
        self,
        config: NodeConfig,
        handlers: HandlerRegistry,
        pipeline: Pipeline,
        backends: Backends,
        sandboxes: SandboxHost,
        provider: SandboxProvider,
        resources: Resources,
        outbox: Outbox,
        end: EndOfTime,
    ) -> None:
        self.node_id = config.node_id or f"{socket.gethostname()}-{os.getpid()}"
        self.draining = False
        self.backends = backends
        self.admission = pipeline.admission
        self.fates = pipeline.fates
        self.end = end
        self._started_s = trio.current_time()
        self._parts: dict[str, Callable[[], object]] = {
            "model": lambda: resources.chat_format.facts(),
            "pipeline": pipeline.statistics,
            "jobs": self.live_jobs,
            "backends": backends.statistics,
            "sandboxes": lambda: {"provider": provider.name, "paused": sandboxes.why_paused, **sandboxes.statistics()},
            "scorers": resources.scorers.statistics,
            "arena": resources.tokens.statistics,
        }
        self._handlers = handlers
        self._pipeline = pipeline
        self._sandboxes = sandboxes
        self._provider = provider
        self._resources = resources
        self._outbox = outbox
        self.gateways: GatewayTable | None = None
        self._golds = GoldChecks(resources.scorers)
        self.external_agents = resources.external_agents = ExternalAgents(self._check_live)

    @property
    def config(self) -> NodeConfig:
        return self._resources.config

    async def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        """Carry out a request to the pool of backends, or of a remote agent. See `NodeApi.operate`."""
        if isinstance(request, OpenAgent | FinishAgent):
            return cast("AnswerT", await self.external_agents.operate(request))
        return await self.backends.operate(request)

    def apply(self, config: NodeConfig) -> None:
        """Replace the configuration of the running node; worker counts, queue sizes and limits change at once.

        `config` may differ from the current one only in the fields of `reference.LIVE`, as ensured by `plan_reload`.
        """
        self.backends.configure(config.backends.weighted_urls)
        self._resources.config = config
        sizes = config.stages
        queues = {"init": sizes.init_queue, "run": sizes.ready_queue, "eval": sizes.eval_queue}
        for stage in self._pipeline.stages:
            self._pipeline.resize(stage.name, getattr(sizes, f"{stage.name}_workers"))
            stage.queue.resize(queues[stage.name])
        self._resources.scorers.resize(sizes.eval_workers)
        self.backends.limit_tasks(config.backends.max_tasks_per_backend)
        self.backends.adopt(config.backends.health, config.backends.load)
        self.admission.limits = config.admission

    def check(self, spec: JobSpec, sink: JobSink, ahead: int) -> None:
        """Check that the node would accept a job now, with `ahead` jobs accepted before it; changes nothing.

        Raises:
            Draining: the node accepts no more jobs, or none of this kind because its allocation ends.
            UnknownHandler: the node lacks a handler of that name.
            MalformedJob: the handler rejects the payload, or `examine` found that its gold answer cannot be graded.
            DuplicateJob: a job with this id is live here.
            AdmissionRejected: a limit is reached.
        """
        if self.draining:
            raise Draining(f"node {self.node_id} is draining; submit to another one")
        self.validate(spec)
        self._check_new(spec.job_id)
        self.admission.max_queued = self._pipeline.stages[0].queue.capacity
        self.admission.check(self._load(sink.session_id, ahead), trio.current_time())

    def validate(self, spec: JobSpec) -> None:
        handler = self._handlers.get(spec.instance.handler)
        if refusal := self.end.refusal(handler.name):
            raise Draining(f"{refusal}; submit to another node")
        validate_payload(handler, spec.instance.payload)
        if isinstance(spec.agent, AgentProgram) and spec.agent.preset:
            try:
                find_preset(spec.agent.preset)
            except ConfigError as exc:
                raise MalformedJob(str(exc), "$.agent.preset") from None
        try:
            servers_of(self.config, spec)
        except ConfigError as exc:
            raise MalformedJob(str(exc), "$.mcp") from None
        if (unreadable := self._golds.refusal(handler, spec.instance.payload)) is not None:
            raise MalformedJob(str(unreadable), unreadable.path)

    def is_unexamined(self, spec: JobSpec) -> bool:
        if self.draining:
            return False
        try:
            handler = self._handlers.get(spec.instance.handler)
        except UnknownHandler:
            return False
        return self._golds.is_unknown(handler, spec.instance.payload)

    async def examine(self, specs: Sequence[JobSpec]) -> None:
        tasks = [(self._handlers.get(spec.instance.handler), spec.instance.payload) for spec in specs]
        await self._golds.examine(tasks, timeout_s=GOLD_CHECKS_TIMEOUT_S)

    async def end_examinations(self) -> None:
        """Stop every `examine`, and return when all have ended. Call before the scoring processes end."""
        await self._golds.aclose()

    def take(self, spec: JobSpec, sink: JobSink, attempt: int) -> None:
        """Put a job that `check` has passed into the pipeline as attempt number `attempt`, even if the queue is full.

        Raises:
            Draining: the node has ended.
            DuplicateJob: a job with this id is live here.
            UnknownHandler: a former process accepted the job, and had this handler.
        """
        self._check_new(spec.job_id)
        handler = self._handlers.get(spec.instance.handler)
        self._pipeline.submit(Job(spec, handler, self._resources, sink, attempt=attempt), promised=True)

    def room(self, session_id: str, ahead: int) -> Room:
        init, _run, scoring = self._pipeline.stages
        workers = self.config.stages.run_workers
        self.admission.max_queued = init.queue.capacity
        room = 0 if self.draining or self.end.is_near else self.admission.room(self._load(session_id, ahead))
        before_eval = len(self._pipeline) - scoring.busy - len(scoring.queue) + ahead
        return Room(room=room, free=min(room, workers - before_eval), run_workers=workers)

    def _check_new(self, job_id: str) -> None:
        if job_id in self._pipeline.live:
            raise DuplicateJob(f"job {job_id!r} is live here; choose another id")

    def _load(self, session_id: str, ahead: int) -> Load:
        queued, live = self._pipeline.load_of(session_id)
        undelivered, undelivered_bytes = self._outbox.undelivered()
        return Load(
            queued=len(self._pipeline.stages[0].queue) + ahead,
            live=len(self._pipeline) + ahead,
            queued_of_session=queued + ahead,
            live_of_session=live + ahead,
            undelivered=undelivered,
            undelivered_bytes=undelivered_bytes,
        )

    async def cancel(self, job_id: str, reason: str) -> None:
        job = self._pipeline.live.get(job_id)
        if job is None:
            raise UnknownJob(f"job {job_id!r} is not live on node {self.node_id}")
        await self._pipeline.cancel(job, reason)

    def cancel_soon(self, job_id: str, reason: str) -> None:
        job = self._pipeline.live.get(job_id)
        if job is not None:
            self._pipeline.cancel_soon(job, reason)

    def read_turn(self, token_ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        return self._resources.chat_format.read_turn(token_ids, tools)

    def unreadiness(self) -> str:
        """Return why a job submitted now would not be processed; empty if it would.

        Checks service tasks, the drain, the ledger, sandbox starts and the backends. A full queue or a pause does not
        count.
        """
        if task := vanished_task():
            return f"the node is ending: its service task {task!r} is gone"
        if self.draining:
            return "the node is draining"
        if refusal := self._outbox.refusal:
            return refusal
        if reason := self._sandboxes.why_paused:
            return f"sandbox starts are paused: {reason}"
        return "" if self.backends.accepting else "no backend takes tasks; add one"

    @property
    def uptime_s(self) -> float:
        return trio.current_time() - self._started_s

    def describe(self, name: str, read: Callable[[], object]) -> None:
        """Add a part `name` to `statistics`: `read` is called each time and returns msgpack-ready values."""
        self._parts[name] = read

    def part(self, name: str) -> object:
        """Return one part of `statistics`.

        Raises:
            KeyError: the part does not exist.
        """
        return self._parts[name]()

    def statistics(self) -> dict[str, object]:
        """Return the node's live state, msgpack-ready, as `prorl-trio status` prints it."""
        parts = {name: read() for name, read in self._parts.items()}
        return {"node_id": self.node_id, "draining": self.draining, "uptime_s": self.uptime_s, **parts}

    @property
    def live(self) -> int:
        return len(self._pipeline)

    def live_jobs(self) -> list[dict[str, object]]:
        """Return live jobs as plain dicts: the fields of `observer.JobView`.

        At most `MAX_SHOWN_JOBS` are returned, oldest first; jobs that only wait for INIT are left out first.
        """
        return [msgspec.structs.asdict(job.view()) for job in self._pipeline.live.most_advanced(MAX_SHOWN_JOBS)]

    def live_by_status(self) -> Counter[str]:
        return self._pipeline.live.by_status()

    def find_jobs(self, wanted: JobFilter, limit: int) -> tuple[int, list[JobView]]:
        total, jobs = self._pipeline.live.find(wanted, limit)
        return total, [job.view() for job in jobs]

    def find_job(self, job_id: str) -> JobView | None:
        job = self._pipeline.live.get(job_id)
        return None if job is None else job.view()

    def _check_live(self, job_id: str) -> None:
        if job_id not in self._pipeline.live:
            raise UnknownJob(f"job {job_id!r} is not live on node {self.node_id}")

    async def cancel_all(self, reason: str) -> None:
        """Accept no more jobs; cancel every live job and return when they have ended."""
        self.draining = True
        await self._pipeline.cancel_all(reason)

    async def drain(self) -> None:
        """Accept no more jobs; return when every job has its outcome. Cancels no job; the caller sets the deadline."""
        self.draining = True
        await self._outbox.wait_answered()
        await self._pipeline.wait_idle()
