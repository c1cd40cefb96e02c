"""One node: the nursery tree, the start-up order, drain and shutdown.

serve_node()
└─ service scope      backends, sandbox host, scoring processes            ends last
   └─ EVAL nursery    workers                                             third
      └─ RUN nursery  workers                                             second
         └─ INIT nursery workers                                          first
            └─ accept nursery  WebSocket and REST listeners, sessions     closed before all of them
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ipc.arena_socket import serve_arena
from ipc.nursery import open_single_nursery
from prorl_trio.agent.context import Resources
from prorl_trio.agent.scoring import open_scorer_pool
from prorl_trio.chat.proof import load_chat_format
from prorl_trio.chat.token_memory import TokenMemory
from prorl_trio.handlers.registry import HandlerRegistry
from prorl_trio.ledger import LedgerLimits, open_ledger
from prorl_trio.node.drain import drain, open_end_signals, until_started
from prorl_trio.node.monitoring import open_monitoring
from prorl_trio.node.parts import engine_finder, open_backends, open_node_arena, open_node_sandboxes, warn_of_image
from prorl_trio.node.reload import serve_reloads
from prorl_trio.pipeline.admission import Load
from prorl_trio.pipeline.pipeline import Job, open_pipeline
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.service.auth import load_token
from prorl_trio.service.endpoints import announce, endpoint_url, rest_url
from prorl_trio.service.limits import SessionLimits
from prorl_trio.service.prorl_compat import configured_endpoints
from prorl_trio.service.rest.edge import serve_rest
from prorl_trio.service.rest.events import EventFeed
from prorl_trio.service.sessions.journal import open_journal
from prorl_trio.service.sessions.restore import restore_sessions
from prorl_trio.service.sessions.session_table import SessionTable
from prorl_trio.service.sessions.shared_outcomes import SharedOutcomes
from prorl_trio.service.tcp import open_tcp_listener
from prorl_trio.service.tls import load_tls
from prorl_trio.service.websocket.local_sockets import claim_local_sockets, release_local_sockets
from prorl_trio.service.websocket.server import serve_websocket
from prorl_trio.supervision import service_task, vanished_task
from prorl_trio.types.errors import (
    ConfigError,
    Draining,
    DuplicateJob,
    MalformedJob,
    ServiceError,
    UnknownJob,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from ipc.arena import Arena
    from prorl_trio.chat.messages import ToolSchema
    from prorl_trio.config import NodeConfig
    from prorl_trio.handlers.base import AgentHandler
    from prorl_trio.inference.engines.http_engine import OnCall
    from prorl_trio.inference.pool.pool import Backends
    from prorl_trio.node.monitoring import Monitoring
    from prorl_trio.pipeline.observer import Observer
    from prorl_trio.pipeline.pipeline import JobSink, Pipeline
    from prorl_trio.sandbox.host import OnOpen, SandboxHost
    from prorl_trio.sandbox.provider import SandboxProvider
    from prorl_trio.service.sessions.journal import Journal
    from prorl_trio.types.models import JobSpec, ToolCall

__all__ = ["Node", "open_node", "serve_node"]

logger = logging.getLogger(__name__)

DELIVERY_TIMEOUT_S: Final = 5.0
"""Longest a shutdown waits for connected trainers to take their last outcomes."""


class Node:
    """What the trainer-facing edge needs of a node (`service.node_api.NodeApi`)."""

    def __init__(
        self,
        config: NodeConfig,
        handlers: HandlerRegistry,
        pipeline: Pipeline,
        backends: Backends,
        sandboxes: SandboxHost,
        provider: SandboxProvider,
        resources: Resources,
    ) -> None:
        self.node_id = config.node_id or f"{socket.gethostname()}-{os.getpid()}"
        self.draining = False
        self.backends = backends
        self.admission = pipeline.admission
        self.fates = pipeline.fates
        self.tokens = resources.tokens
        self.undelivered: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Outcomes not acknowledged, of all sessions, and their bytes. Set by whoever has the sessions."""
        self.wait_promised: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        """Returns when every job that was promised a place is here. Set by whoever stores jobs first."""
        self._started_s = trio.current_time()
        self._parts: dict[str, Callable[[], object]] = {
            "pipeline": pipeline.statistics,
            "jobs": self.live_jobs,
            "backends": backends.statistics,
            "sandboxes": lambda: {"provider": provider.name, **sandboxes.statistics()},
            "scorers": resources.scorers.statistics,
            "arena": resources.tokens.statistics,
        }
        self._handlers = handlers
        self._pipeline = pipeline
        self._sandboxes = sandboxes
        self._provider = provider
        self._resources = resources

    @property
    def config(self) -> NodeConfig:
        """What the node works with now."""
        return self._resources.config

    def apply(self, config: NodeConfig) -> None:
        """Work with `config` from now on; it differs in nothing but `live.LIVE`, and was checked there."""
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

    def submit(self, spec: JobSpec, sink: JobSink) -> None:
        """Take one job; `sink` gets its outcome. A live job of the same id and spec is joined.

        Raises:
            Draining, UnknownHandler, MalformedJob, DuplicateJob, AdmissionRejected: nothing was taken.
        """
        self.check(spec, sink, 0)
        self.take(spec, sink, 1)

    def check(self, spec: JobSpec, sink: JobSink, ahead: int) -> None:
        """Raise what `submit` would, if so many others were submitted before."""
        if self.draining:
            raise Draining(f"node {self.node_id} is draining; submit to another one")
        handler = self._handlers.get(spec.instance.handler)
        _validate(handler, spec)
        live = self._pipeline.job(spec.job_id)
        if live is not None:
            if live.spec != spec:
                raise DuplicateJob(f"job {spec.job_id!r} is live with another spec; choose another id")
            return
        self.admission.max_queued = self._pipeline.stages[0].queue.capacity
        self.admission.check(self._load(sink.session_id, ahead), trio.current_time())

    def take(self, spec: JobSpec, sink: JobSink, attempt: int) -> None:
        """Take a job that was promised a place, whether there is room or not, as its attempt of that number.

        Raises:
            Draining: the workers are gone.
            UnknownHandler: it was promised by a former process, which had this handler.
        """
        live = self._pipeline.job(spec.job_id)
        if live is not None:
            if sink not in live.sinks:
                live.sinks.append(sink)
            return
        handler = self._handlers.get(spec.instance.handler)
        self._pipeline.submit(Job(spec, handler, self._resources, sink, attempt=attempt), promised=True)

    def _load(self, session_id: str, ahead: int) -> Load:
        queued, live = self._pipeline.load_of(session_id)
        undelivered, undelivered_bytes = self.undelivered()
        return Load(
            queued=len(self._pipeline.stages[0].queue) + ahead,
            live=len(self._pipeline) + ahead,
            queued_of_session=queued + ahead,
            live_of_session=live + ahead,
            undelivered=undelivered,
            undelivered_bytes=undelivered_bytes,
        )

    async def cancel(self, job_id: str, reason: str) -> None:
        """Return when nothing of the job is left.

        Raises:
            UnknownJob: it is not live here (never was, or is over).
        """
        job = self._pipeline.job(job_id)
        if job is None:
            raise UnknownJob(f"job {job_id!r} is not live on node {self.node_id}")
        await self._pipeline.cancel(job, reason)

    def cancel_soon(self, job_id: str, reason: str) -> None:
        """As `cancel`, without waiting. Nothing happens if the job is not live here."""
        job = self._pipeline.job(job_id)
        if job is not None:
            self._pipeline.cancel_soon(job, reason)

    def read_turn(self, token_ids: Sequence[int], tools: Sequence[ToolSchema]) -> tuple[str, list[ToolCall]]:
        """See `NodeApi.read_turn`."""
        return self._resources.chat_format.read_turn(token_ids, tools)

    def unreadiness(self) -> str:
        """Why a job submitted now would not be worked on; empty if it would."""
        if task := vanished_task():
            return f"the node is ending: its service task {task!r} is gone"
        if self.draining:
            return "the node is draining"
        return "" if self.backends.accepting else "no backend takes tasks; add one"

    @property
    def uptime_s(self) -> float:
        """Seconds since the node was put together."""
        return trio.current_time() - self._started_s

    def describe(self, name: str, read: Callable[[], object]) -> None:
        """Let `statistics` show what `read` returns, msgpack-ready, as `name`."""
        self._parts[name] = read

    def part(self, name: str) -> object:
        """One part of `statistics`. Raises KeyError if there is none of that name."""
        return self._parts[name]()

    def statistics(self) -> dict[str, object]:
        """Live state, msgpack-ready: what `prorl-trio status` prints."""
        parts = {name: read() for name, read in self._parts.items()}
        return {"node_id": self.node_id, "draining": self.draining, "uptime_s": self.uptime_s, **parts}

    def live_jobs(self) -> list[dict[str, object]]:
        """Every live job as a plain dict: the fields of `observer.JobView`, oldest first."""
        return [msgspec.structs.asdict(view) for view in self._pipeline.live_jobs()]

    async def cancel_all(self, reason: str) -> None:
        """Take nothing new; cancel every live job and return when they are over."""
        self.draining = True
        await self._pipeline.cancel_all(reason)

    async def drain(self) -> None:
        """Take nothing new; return when every job has its outcome."""
        self.draining = True
        await self.wait_promised()
        await self._pipeline.wait_idle()


def _validate(handler: AgentHandler, spec: JobSpec) -> None:
    try:
        handler.validate(spec.instance.payload)
    except ServiceError:
        raise
    except Exception as exc:  # a plug-in's check must not end the node
        raise MalformedJob(
            f"handler {handler.name} cannot read the payload: {type(exc).__name__}: {exc}", path="$.instance.payload"
        ) from exc


@asynccontextmanager
async def open_node(
    config: NodeConfig,
    handlers: HandlerRegistry | None = None,
    *,
    provider: SandboxProvider | None = None,
    observers: Sequence[Observer] = (),
    on_backend_call: OnCall | None = None,
    on_sandbox_open: OnOpen | None = None,
) -> AsyncIterator[Node]:
    """Everything of a node but its listener. On leaving, all jobs end and nothing of them is left.

    `provider` replaces the one the config names. `observers` are told of every job, `on_backend_call` of every call of
    an LLM backend, `on_sandbox_open` of every sandbox handed out.

    Raises:
        ConfigError: the model folder, the sandbox provider or the configuration cannot be used; says what to do.
        BackendError: a backend is `required` and not fit.
    """
    handlers = handlers or HandlerRegistry.from_entry_points()
    model = config.model
    chat_format = await trio.to_thread.run_sync(load_chat_format, model)
    if provider is None:
        provider = await choose_provider(config.sandbox)
        await trio.to_thread.run_sync(warn_of_image, config.sandbox)
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(open_single_nursery())
        find_client = engine_finder(config.backends, on_backend_call, max_positions=chat_format.max_positions)
        backends = await stack.enter_async_context(open_backends(config.backends, find_client))
        scorers = await stack.enter_async_context(open_scorer_pool(config.stages.eval_workers, config.scoring))
        sandboxes = await stack.enter_async_context(open_node_sandboxes(provider, config.sandbox, on_sandbox_open))
        resources = Resources(
            config=config,
            chat_format=chat_format,
            backends=backends,
            scorers=scorers,
            tokens=TokenMemory(open_node_arena(config.arena, stack)),
        )
        for name in handlers.names:
            await handlers.get(name).prepare(resources)
        pipeline = await stack.enter_async_context(open_pipeline(resources, sandboxes, service, observers=observers))
        yield Node(config, handlers, pipeline, backends, sandboxes, provider, resources)


async def serve_node(
    config: NodeConfig,
    handlers: HandlerRegistry | None = None,
    *,
    provider: SandboxProvider | None = None,
    load: Callable[[], NodeConfig] | None = None,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> bool:
    """Run a node until SIGTERM or SIGINT. The first drains, for `drain_timeout_s` at most; the second cancels. One that
    comes before the node has started just ends it.

    Reports the listener's (host, port) through `task_status`. Returns whether the drain was clean: every job had its
    own outcome before the end. At SIGHUP it drains, too, or `load`, called in a thread, reads the configuration again,
    as `on_hangup` says; see `reload`. Must run in the main thread, for the signals. `provider` replaces the config's.
    """
    listen = config.listen
    sessions = SessionTable(
        SessionLimits(
            max_sessions=listen.max_sessions,
            max_undelivered=config.max_undelivered,
            max_message_bytes=listen.max_message_bytes,
        )
    )
    rest = config.rest
    feed = EventFeed(max_streams=rest.max_event_streams, max_events=rest.event_buffer_events) if rest.enabled else None
    cut, journal = 0, None
    with open_end_signals(config.on_hangup, reloads=load is not None) as signals:
        async with until_started(signals) as starting, AsyncExitStack() as stack:
            monitoring = await stack.enter_async_context(open_monitoring(config))
            sessions.journal = journal = await _open_journal(config, stack)
            observers = [*monitoring.observers, feed] if feed is not None else monitoring.observers
            node = await stack.enter_async_context(
                open_node(
                    config,
                    handlers,
                    provider=provider,
                    observers=observers,
                    on_backend_call=monitoring.metrics.backend_called,
                    on_sandbox_open=monitoring.metrics.sandbox_opened,
                )
            )
            starting.cancel("from here on jobs of former processes run: a signal drains them")
            bind = await stack.enter_async_context(await open_tcp_listener("listen", listen.host, listen.port))
            rest_bind = None
            if feed is not None:
                rest_bind = await stack.enter_async_context(await open_tcp_listener("rest", rest.host, rest.port))
            if journal is not None:
                node.wait_promised = journal.wait_settled
                node.describe("ledger", lambda: msgspec.structs.asdict(journal.ledger.statistics()))
                node.describe("outcome_cache", journal.cache.statistics)
                await restore_sessions(sessions, journal, node, config.ledger)
            local = await trio.to_thread.run_sync(claim_local_sockets, listen)
            if local is not None:
                stack.callback(release_local_sockets, listen, local)
            accept = await stack.enter_async_context(open_single_nursery())
            monitoring.watch(node, sessions)
            node.undelivered = sessions.undelivered
            if local is not None and node.tokens.arena is not None:
                await _share_arena(node, node.tokens.arena, local.arena, sessions, accept)
            address = await accept.start(
                service_task(
                    partial(serve_websocket, node, listen, sessions=sessions, local=local, listener=bind), "WebSocket"
                )
            )
            endpoints = {"url": endpoint_url(address, secure=bool(listen.tls_cert))}
            if local is not None:
                endpoints["unix_url"] = f"unix://{local.node}"
            if feed is not None:
                endpoints["rest_url"] = await _open_rest(node, sessions, feed, monitoring, accept, rest_bind)
            if listen.endpoint_file:
                await trio.to_thread.run_sync(announce, Path(listen.endpoint_file), endpoints)
            if load is not None and not signals.hangup:
                apply = partial(_apply, node, monitoring)
                await accept.start(service_task(serve_reloads, "reload"), load, lambda: node.config, apply)
            task_status.started(address)
            await anext(signals)
            if journal is not None:
                journal.draining = True
            cut = await drain(node, signals, node.config.drain_timeout_s)
            with trio.move_on_after(DELIVERY_TIMEOUT_S):
                await sessions.wait_delivered()
            accept.cancel_scope.cancel("shutdown")
    return cut == 0 and (journal is None or not journal.failed)


def _apply(node: Node, monitoring: Monitoring, config: NodeConfig) -> None:
    node.apply(config)
    monitoring.apply(config.monitoring)


async def _open_journal(config: NodeConfig, stack: AsyncExitStack) -> Journal | None:
    """The way to what outlives the process: opened before the node, and closed after it."""
    folder = config.ledger.folder(config.node_id, os.environ)
    if folder is None:
        logger.warning(
            "NOTHING IS DURABLE: jobs and outcomes end with this process; set node_id, or ledger.dir to a folder"
        )
        return None
    try:
        if config.ledger.hot_outcome_bytes < 0:
            raise ValueError(f"hot_outcome_bytes must be >= 0, got {config.ledger.hot_outcome_bytes}")
        limits = LedgerLimits(
            log_bytes=config.ledger.log_bytes,
            reserve_bytes=config.ledger.reserve_bytes,
            max_bytes=config.ledger.max_bytes,
            tombstone_s=config.ledger.tombstone_s,
        )
    except ValueError as exc:
        raise ConfigError(f"ledger: {exc}") from exc
    ledger = await stack.enter_async_context(open_ledger(folder, limits))
    return await stack.enter_async_context(open_journal(ledger, config.ledger.hot_outcome_bytes))


async def _open_rest(
    node: Node,
    sessions: SessionTable,
    feed: EventFeed,
    monitoring: Monitoring,
    accept: trio.Nursery,
    listener: trio.SocketListener | None,
) -> str:
    """Serve REST in `accept`; returns its URL."""
    listen, rest = node.config.listen, node.config.rest
    token = await trio.to_thread.run_sync(load_token, listen)
    tls = await trio.to_thread.run_sync(load_tls, listen) if rest.tls else None
    serve = partial(
        serve_rest,
        node,
        rest,
        token,
        sessions=sessions,
        feed=feed,
        tls=tls,
        metrics=monitoring.metrics.render,
        listener=listener,
        more=configured_endpoints(rest, sandbox_network=node.config.sandbox.network),
    )
    url = rest_url(await accept.start(service_task(serve, "REST")), secure=tls is not None)
    logger.info("REST at %s", url)
    return url


async def _share_arena(node: Node, arena: Arena, path: Path, sessions: SessionTable, accept: trio.Nursery) -> None:
    """Serve the arena at `path`, and send outcomes by reference to those who map it."""
    shared = SharedOutcomes(arena, node.config.arena.shared_bytes or arena.size_bytes // 2)
    sessions.shared, node.tokens.make_room = shared, shared.make_room
    node.describe("arena", lambda: {**node.tokens.statistics(), "shared": shared.statistics()})
    token = await trio.to_thread.run_sync(load_token, node.config.listen)
    max_readers = node.config.arena.max_readers
    try:
        serve = partial(serve_arena, arena, path, token=token.decode(), max_readers=max_readers)
        await accept.start(service_task(serve, "arena"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"listen.unix_socket: {exc}") from exc
