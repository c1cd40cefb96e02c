"""A node without agents, sandboxes or models: jobs end when the test says so."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import trio

from prorl_trio.agent.external import ExternalAgents
from prorl_trio.inference.engines.protocol import EngineInfo, made_by
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.pipeline.live import LiveJobs
from prorl_trio.pipeline.observer import JobView
from prorl_trio.sessions.node_api import Room
from prorl_trio.types.errors import AdmissionRejected, BackendError, Draining, DuplicateJob, UnknownHandler, UnknownJob
from prorl_trio.types.models import JobSpec, Outcome, PolicySpan, Segment, TaskInstance, Timing, ToolCall, Trajectory
from prorl_trio.types.programs import FinishAgent, OpenAgent
from support.pausable_engine import PausableEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_trio.inference.pool.backend import BackendStatistics
    from prorl_trio.pipeline.job import JobSink
    from prorl_trio.pipeline.live import JobFilter
    from prorl_trio.pipeline.observer import Observer
    from prorl_trio.types.backends import AnswerT, NodeRequest
    from prorl_trio.types.models import Status, ToolSchema


def make_spec(job_id: str, *, handler: str = "fake", group_id: str = "", **payload: object) -> JobSpec:
    """A small valid job."""
    instance = TaskInstance(instance_id=f"instance of {job_id}", handler=handler, payload=dict(payload))
    return JobSpec(job_id=job_id, instance=instance, group_id=group_id)


def make_outcome(spec: JobSpec, *, tokens: int = 8, reward: float | None = 1.0) -> Outcome:
    """A completed outcome with one segment of `tokens` tokens, all different from those of other jobs."""
    first_token = zlib.crc32(spec.job_id.encode()) % 100_000
    segment = Segment.from_arrays(
        np.arange(first_token, first_token + tokens, dtype="<i4"),
        np.linspace(-2.0, -0.1, tokens, dtype="<f4"),
        np.ones(tokens, dtype="u1"),
        [PolicySpan(start=0, end=tokens, policy_version="v0", engine="fake")],
    )
    return Outcome(
        job_id=spec.job_id,
        instance_id=spec.instance.instance_id,
        group_id=spec.group_id,
        status="completed",
        reward=reward,
        cause=None,
        error="",
        trajectory=Trajectory(segments=[segment], turns=[], stop_reason="finished"),
        details={},
        timing=Timing(),
        tags=spec.tags,
    )


def _spelled_out(token_ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
    """Return the ids as a text without calls: a fake node has no tokenizer."""
    del tools
    return " ".join(map(str, token_ids)), []


class PretendedEngine(PausableEngine):
    """An engine of a `FakeNode`, found as the node says."""

    def __init__(self, url: str, node: FakeNode) -> None:
        super().__init__(url)
        self._node = node

    async def probe(self, *, timeout_s: float) -> EngineInfo:
        """See `EngineClient.probe`. It is answered in a pause, too."""
        await self._reach("probe", timeout_s)
        if self.url in self._node.unfit_backends:
            raise BackendError(f"backend {self.url} drops token ids", retryable=False)
        if self.url in self._node.down_backends:
            raise BackendError(f"backend {self.url} cannot be reached", retryable=True)
        return EngineInfo(
            url=self.url,
            model="m",
            max_model_len=self.max_model_len,
            engine="fake",
            policy_version=self.label,
            label=self.label,
            weights=self.weights if self.label == "0" else "",
            model_folder=self._node.model_folder,
        )


class FakeNode:
    """A `sessions.node_api.NodeApi`. Jobs wait for `finish`, `advance` or a cancel.

    With `on_submit`, a job for which it returns an outcome ends at once, inside `submit`. `shared_engines` are those
    that several nodes can reach, by URL.

    Attributes:
        submitted: every spec the node took, in order, also those that have ended.
        live: specs of jobs without an outcome, by id.
        backends: a real pool, of `engines` that only pretend. Urls in `unfit_backends` are refused, and those in
            `down_backends` are down.
        read_turn: see `NodeApi`.
        draining: refuse new jobs.
        model_folder: what its engines say that they were started with.
        places: workers of RUN that it says it has.
        max_live: jobs without an outcome that it takes.
        attempts: number of the attempt that each job it took is, by id.
        cancel_gate: cancels wait for it; set at first.
        external_agents: whose jobs a test offers.
        observers: are told of every job, as a node does.
    """

    def __init__(
        self,
        on_submit: Callable[[JobSpec], Outcome | None] | None = None,
        shared_engines: dict[str, PretendedEngine] | None = None,
    ) -> None:
        self.node_id = "fake-node"
        self._shared_engines = {} if shared_engines is None else shared_engines
        self.submitted: list[JobSpec] = []
        self.live: dict[str, JobSpec] = {}
        self.backends = Backends(made_by(self._engine))
        self.engines: dict[str, PretendedEngine] = {}
        self.unfit_backends: set[str] = set()
        self.down_backends: set[str] = set()
        self.draining = False
        self.model_folder = ""
        self.places = 8
        self.max_live = 10_000
        self.attempts: dict[str, int] = {}
        self.cancel_gate = trio.Event()
        self.cancel_gate.set()
        self.observers: list[Observer] = []
        self.read_turn: Callable[[Sequence[int], Sequence[ToolSchema]], tuple[str, list[ToolCall]]] = _spelled_out
        self.external_agents = ExternalAgents(self._check_live)
        self._statuses: dict[str, Status] = {}
        self._on_submit = on_submit
        self._sinks: dict[str, JobSink] = {}
        self._changed = trio.Event()

    async def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        """See `NodeApi`."""
        if isinstance(request, OpenAgent | FinishAgent):
            return cast("AnswerT", await self.external_agents.operate(request))
        return await self.backends.operate(request)

    def _check_live(self, job_id: str) -> None:
        if job_id not in self.live:
            raise UnknownJob(f"job {job_id!r} is not live here")

    def check(self, spec: JobSpec, sink: JobSink, ahead: int) -> None:
        """See `NodeApi`. Knows the handler `fake` only."""
        if self.draining:
            raise Draining(f"node {self.node_id} is draining")
        self.validate(spec)
        if len(self.live) >= self.max_live:
            raise AdmissionRejected(f"admission.max_live: it holds {len(self.live)}", 0.05)
        if spec.job_id in self.live:
            raise DuplicateJob(f"job {spec.job_id!r} is live")

    def validate(self, spec: JobSpec) -> None:
        """See `NodeApi`. Knows the handler `fake` only."""
        if spec.instance.handler != "fake":
            raise UnknownHandler(f"no handler {spec.instance.handler!r}; there is: fake")

    def is_unexamined(self, spec: JobSpec) -> bool:
        """See `NodeApi`. It examines nothing."""
        return False

    async def examine(self, specs: Sequence[JobSpec]) -> None:
        """See `NodeApi`. It examines nothing."""

    def take(self, spec: JobSpec, sink: JobSink, attempt: int) -> None:
        """See `NodeApi`."""
        self._sinks[spec.job_id] = sink
        self.attempts[spec.job_id] = attempt
        self.submitted.append(spec)
        self.live[spec.job_id] = spec
        self._move(spec.job_id, "queued", "")
        self._notify()
        outcome = self._on_submit(spec) if self._on_submit else None
        if outcome is not None:
            self.finish(spec.job_id, outcome)

    def room(self, session_id: str, ahead: int) -> Room:
        """See `NodeApi`. It has `places`, and takes any number of jobs."""
        del session_id
        room = 0 if self.draining else max(0, self.max_live - len(self.live) - ahead)
        free = self.places - len(self.live) - ahead
        return Room(room=room, free=min(room, free), run_workers=self.places)

    async def cancel(self, job_id: str, reason: str) -> None:
        """See `NodeApi`."""
        try:
            await self.cancel_gate.wait()
        except trio.Cancelled:
            self.cancel_soon(job_id, reason)
            raise
        self._end_cancelled(job_id, reason)

    def cancel_soon(self, job_id: str, reason: str) -> None:
        """See `NodeApi`. The job ends at once."""
        if job_id in self.live:
            self._end_cancelled(job_id, reason)

    def _end_cancelled(self, job_id: str, reason: str) -> None:
        spec = self._live(job_id)
        outcome = make_outcome(spec, reward=None)
        self.finish(
            job_id,
            msgspec.structs.replace(outcome, status="cancelled", cause="cancelled", error=reason, trajectory=None),
        )

    def statistics(self) -> dict[str, object]:
        """See `NodeApi`."""
        return {"node_id": self.node_id, "live": len(self.live), "backends": self.backends.statistics()}

    def find_jobs(self, wanted: JobFilter, limit: int) -> tuple[int, list[JobView]]:
        """See `NodeApi`."""
        found: LiveJobs[Any] = LiveJobs()
        for job_id, spec in self.live.items():
            found.add(SimpleNamespace(spec=spec, **msgspec.structs.asdict(self._view(job_id))))
        total, jobs = found.find(wanted, limit)
        return total, [self._view(job.spec.job_id) for job in jobs]

    def find_job(self, job_id: str) -> JobView | None:
        """See `NodeApi`."""
        return self._view(job_id) if job_id in self.live else None

    def unreadiness(self) -> str:
        """See `NodeApi`. Knows the handler `fake` only."""
        if self.draining:
            return "the node is draining"
        return "" if self.backends.accepting else "no backend takes tasks"

    def listed(self, url: str) -> BackendStatistics:
        """Return the statistics of a backend. Raises StopIteration if it is not in the pool."""
        listed = cast("list[BackendStatistics]", self.backends.statistics()["backends"])
        return next(backend for backend in listed if backend.url == url)

    def _engine(self, url: str) -> PretendedEngine:
        engine = self._shared_engines.setdefault(url, PretendedEngine(url, self))
        return self.engines.setdefault(url, engine)

    def finish(self, job_id: str, outcome: Outcome | None = None) -> Outcome:
        """End a live job with `outcome`, or a small completed one. Raises UnknownJob."""
        spec = self._live(job_id)
        outcome = outcome or make_outcome(spec)
        outcome = msgspec.structs.replace(outcome, attempt=max(outcome.attempt, self.attempts.get(job_id, 1)))
        self._move(job_id, outcome.status, outcome.error)
        for observer in self.observers:
            observer.job_ended(self._view(job_id), outcome)
        del self.live[job_id]
        self._sinks.pop(job_id).deliver(outcome)
        self._notify()
        return outcome

    def advance(self, job_id: str, status: Status, detail: str = "") -> None:
        """Report a stage of a live job. Raises UnknownJob."""
        self._live(job_id)
        self._move(job_id, status, detail)
        self._sinks[job_id].report(job_id, status, detail)

    async def wait_live(self, count: int) -> None:
        """Return when exactly `count` jobs are live."""
        await trio.lowlevel.checkpoint()
        while len(self.live) != count:
            await self._changed.wait()

    def _move(self, job_id: str, status: Status, detail: str) -> None:
        self._statuses[job_id] = status
        for observer in self.observers:
            observer.job_moved(self._view(job_id), status, detail)

    def _view(self, job_id: str) -> JobView:
        spec = self.live[job_id]
        return JobView(
            job_id=job_id,
            session_id=self._sinks[job_id].session_id,
            group_id=spec.group_id,
            instance_id=spec.instance.instance_id,
            handler=spec.instance.handler,
            priority=spec.priority,
            attempt=1,
            tags=spec.tags,
            status=self._statuses[job_id],
            age_s=0.0,
            status_age_s=0.0,
            turns=0,
            last_progress_s=0.0,
            waiting_on="",
            stuck=False,
        )

    def _live(self, job_id: str) -> JobSpec:
        try:
            return self.live[job_id]
        except KeyError:
            raise UnknownJob(f"job {job_id!r} is not live on node {self.node_id}") from None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
