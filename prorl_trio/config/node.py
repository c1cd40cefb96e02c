"""The tables of node.toml, and node.toml as a whole."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from prorl_ipc.arena_socket import MAX_ARENA_READERS
from prorl_ipc.limits import SandboxLimits
from prorl_trio.config.listen import MOVED, ListenConfig, RestConfig
from prorl_trio.config.quantities import (
    MAX_BYTES,
    MAX_OPEN_FILES,
    YEAR_S,
    Amount,
    Bytes,
    BytesOrZero,
    Connections,
    Count,
    MessageBytes,
    Processes,
    ProcessesOrZero,
    Seconds,
    SecondsOrZero,
    Table,
    Tokens,
    Weight,
    Workers,
)
from prorl_trio.config.toml_file import read_toml
from prorl_trio.file_systems import read_regular
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prorl_trio.types.models import Budgets, JobSpec

LIVE: Final = (
    "listen.token",
    "listen.token_file",
    "stages.init_workers",
    "stages.run_workers",
    "stages.eval_workers",
    "stages.init_queue",
    "stages.ready_queue",
    "stages.eval_queue",
    "admission",
    "budgets",
    "agent",
    "monitoring",
    "backends.max_tasks_per_backend",
    "backends.request_timeout_s",
    "backends.slice_tokens",
    "backends.lease_timeout_s",
    "backends.health",
    "backends.load",
    "drain_timeout_s",
    "stuck_after_s",
)
"""Fields, and tables with all their fields, that a running node takes over. Limits apply to what comes next: nothing
that was accepted is dropped, and a worker that is one too many finishes its job."""


def is_live(path: str) -> bool:
    """Return whether `path`, as `backends.health.interval_s`, changes in a running node when the file is read again."""
    return any(path == live or path.startswith(f"{live}.") for live in LIVE)


NODE_ID: Final = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?\Z"

OnHangup = Literal["auto", "drain", "reload"]

MAX_KEY_BYTES: Final = 64 * 1024

SearchBackendName = Literal["none", "bm25", "retrieve", "tavily"]

MIN_SESSION_WEIGHT: Final = 0.01
MAX_SESSION_WEIGHT: Final = 100.0


class LedgerConfig(Table, frozen=True):
    """The ledger keeps jobs and outcomes, so that they outlive the node.

    An accepted job is kept until it has an outcome, and an outcome until it is acknowledged. One node at a time uses a
    folder, which is on a disk of its own machine.

    Attributes:
        dir: the folder. `auto`: `prorl-trio/NODE_ID` in $XDG_STATE_HOME (~/.local/state) if `node_id` is set, else
            none. Empty: none. Without one the ledger is in memory, and nothing outlives the node.
        on_restart: what becomes of jobs that were not finished: `retry` runs them again, `fail` ends them.
        max_attempts: a job that is not finished, and of which so many attempts began, is not run again.
        log_bytes: size of the write-ahead log at which it is copied into the database and begun anew.
        reserve_bytes: preallocated on the disk, for outcomes when it is full; an outcome takes twice its size of it.
        max_bytes: size on the disk, of the database, its log and the reserve.
        tombstone_s: a job acknowledged less than that ago is not run again for the session that had it. Of the time in
            which the node runs: no clock that somebody sets makes it shorter.
        hot_outcome_bytes: memory for outcomes that are not acknowledged; those that do not fit are read from the disk
            when somebody takes them. Where the ledger is in memory, all of them are: see `admission`.
    """

    dir: str = "auto"
    on_restart: Literal["retry", "fail"] = "retry"
    max_attempts: Count = 5
    log_bytes: Annotated[int, msgspec.Meta(ge=64 * 1024, le=MAX_BYTES)] = 64 * 1024 * 1024
    reserve_bytes: BytesOrZero = 128 * 1024 * 1024
    max_bytes: Bytes = 16 * 1024 * 1024 * 1024
    tombstone_s: SecondsOrZero = 3600.0
    hot_outcome_bytes: BytesOrZero = 256 * 1024 * 1024

    def folder(self, node_id: str, environ: Mapping[str, str]) -> Path | None:
        """Return the folder of the ledger, or None if it is in memory.

        Raises:
            ConfigError: it is below the home folder, and the user has none.
        """
        if self.dir != "auto":
            return Path(self.dir) if self.dir else None
        if not node_id:
            return None
        state = Path(environ.get("XDG_STATE_HOME", ""))
        try:
            if not state.is_absolute():  # relative ones do not count, as the specification asks
                state = Path.home() / ".local" / "state"
        except RuntimeError as exc:
            raise ConfigError("ledger.dir: this user has no home folder; set it to a folder on a local disk") from exc
        return state / "prorl-trio" / node_id


class ArenaConfig(Table, frozen=True):
    """Memory for the tokens of live and undelivered trajectories, which trainers on the same host can map.

    A rollout starts when there is room for the longest trajectory it can have.

    Attributes:
        enabled: have one; without, tokens are in the node's private memory and go to trainers as frames.
        size_bytes: its size; 0: 1 GiB, or a tenth of the memory if that is less. Committed as it is written.
        shared_bytes: part of it for outcomes that wait for trainers who map them; more are delivered as frames. 0: half
            of it.
        room_timeout_s: a rollout that waited so long for room, which no budget is charged for, goes on in the node's
            private memory.
        max_readers: trainers who map it at once; further ones are sent frames.
    """

    enabled: bool = True
    size_bytes: BytesOrZero = 0
    shared_bytes: BytesOrZero = 0
    room_timeout_s: SecondsOrZero = 60.0
    max_readers: Connections = MAX_ARENA_READERS


class StagesConfig(Table, frozen=True):
    """Workers of each stage, and how many jobs may wait for each.

    Attributes:
        init_workers: jobs in INIT at once, where sandboxes are made.
        run_workers: jobs in RUN at once, where the policy takes its turns.
        eval_workers: jobs in EVAL at once, where outcomes are scored.
        init_queue: jobs that may wait for INIT; a full queue rejects submissions.
        ready_queue: jobs that may wait for RUN, with a sandbox each; a full queue holds INIT up.
        eval_queue: jobs that may wait for EVAL; a full queue holds RUN up.
    """

    init_workers: Processes = 4
    run_workers: Workers = 32
    eval_workers: Processes = 4
    init_queue: Count = 10_000
    ready_queue: Workers = 16
    eval_queue: Count = 1_000


class AdmissionConfig(Table, frozen=True):
    """Limits of what a node holds before it rejects jobs, besides `stages.init_queue`.

    Which limit it was, and when there will probably be room, is in the rejection.

    Attributes:
        session_weights: weights by session id, of those that are not 1, from 0.01 to 100. Sessions share the workers:
            each has the share of its weight, as long as it has jobs waiting.
        max_queued_per_session: jobs of a session that wait for INIT.
        max_live: jobs that have no outcome yet.
        max_live_per_session: of them, those of one session.
        max_undelivered: outcomes that are not acknowledged.
        max_undelivered_bytes: size of those outcomes.
    """

    session_weights: dict[str, float] = msgspec.field(default_factory=dict)
    max_queued_per_session: Count = 10_000
    max_live: Count = 20_000
    max_live_per_session: Count = 20_000
    max_undelivered: Count = 200_000
    max_undelivered_bytes: Bytes = 16 * 1024 * 1024 * 1024

    def __post_init__(self) -> None:
        for session_id, weight in self.session_weights.items():
            if not MIN_SESSION_WEIGHT <= weight <= MAX_SESSION_WEIGHT:
                raise ValueError(
                    f"session_weights: that of {session_id!r} must be {MIN_SESSION_WEIGHT:g} to "
                    f"{MAX_SESSION_WEIGHT:g}, got {weight:g}"
                )

    def weight_of(self, session_id: str) -> float:
        """Return the weight of a session's jobs against those of the others."""
        return self.session_weights.get(session_id, 1.0)


class BudgetConfig(Table, frozen=True):
    """Default seconds of a job; a job may ask for others. Queue time is not charged. See `prorl_trio.Budgets`.

    Attributes:
        init_s: time for INIT.
        run_s: time for RUN, but for the time of `agent_s`, waits for a backend, and pauses.
        eval_s: time for EVAL.
        total_s: time for all stages together.
        agent_s: time in RUN for the tools that the policy calls and the tokens that it samples.
    """

    init_s: Seconds = 120.0
    run_s: Seconds = 900.0
    eval_s: Seconds = 120.0
    total_s: Seconds = 3600.0
    agent_s: Seconds = 600.0

    def of_agent(self, asked: Budgets) -> float:
        """`agent_s` of a job: what it asks for, or the default, but never more than a `run_s` of its own."""
        if asked.agent_s is not None:
            return asked.agent_s
        return self.agent_s if asked.run_s is None else min(self.agent_s, asked.run_s)


class MonitoringConfig(Table, frozen=True):
    """Notices of stalls of the event loop.

    Attributes:
        stall_warn_s: a pass of the event loop, in which it answers nobody, that takes longer is logged with the task's
            name.
        stall_dump_after_s: log the loop's stack while a pass lasts longer, from a thread of its own; 0 never does.
    """

    stall_warn_s: Seconds = 0.25
    stall_dump_after_s: SecondsOrZero = 0.0


class TelemetryConfig(Table, frozen=True):
    """Spans of jobs, stages and turns for OpenTelemetry.

    Attributes:
        otlp_endpoint: where spans go: `http://collector:4318/v1/traces`; empty turns it off.
        service_name: name of this service in them.
        max_queued_spans: spans that wait to be sent; more are dropped.
    """

    otlp_endpoint: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^/\s]+\S*)?\Z")] = ""
    service_name: str = "prorl-trio"
    max_queued_spans: Count = 8192


class FleetConfig(Table, frozen=True):
    """The fleet that this node belongs to: all nodes with an entry in one folder.

    Attributes:
        dir: the folder, on a disk that all machines of the fleet and its trainer share; made with mode 0700 if it is
            missing. The node writes `NODE_ID.json` there, with its token. Empty: no fleet.
        advertise: the host name by which other machines reach this node. Empty: `listen.host`, or, where that is every
            address of the machine, the machine's name.
        heartbeat_interval_s: time between two heartbeats; less than a third of `stale_after_s`.
        stale_after_s: without a heartbeat for so long the node counts as lost, and its jobs are moved.
        restart_within_s: how long the jobs of this node, if it is lost or its end cuts them, are left to its next
            start, which finds them in the ledger on its disk; 0: other nodes take them over at once.
        end_margin_s: time before the end of the node's allocation by which it has ended by itself. Slurm tells the end
            (`SLURM_JOB_END_TIME`) by its own clock: at least what clocks differ, and what the node's end takes.
    """

    dir: str = ""
    advertise: str = ""
    heartbeat_interval_s: Seconds = 5.0
    stale_after_s: Seconds = 30.0
    restart_within_s: SecondsOrZero = 0.0
    end_margin_s: SecondsOrZero = 30.0

    @property
    def leaves_jobs(self) -> bool:
        """Return True if the jobs that the node's end cuts are left to its next start."""
        return bool(self.dir) and self.restart_within_s > 0

    def __post_init__(self) -> None:
        if self.heartbeat_interval_s > self.stale_after_s / 3:
            raise ValueError(
                f"heartbeat_interval_s must be at most a third of stale_after_s ({self.stale_after_s:g}), got "
                f"{self.heartbeat_interval_s:g}"
            )


class HealthConfig(Table, frozen=True):
    """A circuit breaker: a backend that fails is given no more rollouts, and its rollouts move, until it is well again.

    Attributes:
        interval_s: time between two probes of one backend; 0 for no probes: only calls tell then, and one that is out
            stays out until it is added again.
        open_after_failures: failures in a row, of calls (with all their retries) or of probes, that take a backend out.
            A single call is enough if none was answered since it was taken in again.
        close_after_successes: successes in a row, of probes, that take it in again; up to eight times as many while the
            first call afterwards fails.
    """

    interval_s: SecondsOrZero = 15.0
    open_after_failures: Count = 3
    close_after_successes: Count = 2

    def __post_init__(self) -> None:
        for name in ("open_after_failures", "close_after_successes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.interval_s < 0:
            raise ValueError(f"interval_s must be >= 0, got {self.interval_s}")


class LoadConfig(Table, frozen=True):
    """Balance by the load that engines report on their `/metrics`; nothing of it for one that reports none.

    A rollout moves to another backend, at most once a turn, when its wait here would be more than `skew_margin_s +
    skew_ratio * (wait there + time to read its prefix there)`.

    Attributes:
        interval_s: time between two reports of one backend; 0 for none, and then nothing of this happens.
        skew_margin_s: difference between the two waits that is left alone.
        skew_ratio: factor between the two waits that is left alone.
        max_kv_usage: share of the KV cache that running requests may fill. Above it, or when requests lost their place
            in the cache, the backend gets no more rollouts than `decrease_factor` of those it has; below it the limit
            grows again, up to `max_tasks_per_backend`. 0: never.
        decrease_factor: see `max_kv_usage`; above 0 and below 1.
        increase_tasks: rollouts by which the limit grows again at each report.
        min_tasks: rollouts that a backend is given however full it is.
    """

    interval_s: SecondsOrZero = 2.0
    skew_margin_s: SecondsOrZero = 2.0
    skew_ratio: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.5
    max_kv_usage: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95
    decrease_factor: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.8
    increase_tasks: Count = 1
    min_tasks: Count = 4

    def __post_init__(self) -> None:
        for name in ("interval_s", "skew_margin_s", "max_kv_usage"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("skew_ratio", "increase_tasks", "min_tasks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.decrease_factor < 1:
            raise ValueError(f"decrease_factor must be above 0 and below 1, got {self.decrease_factor}")


class BackendConfig(Table, frozen=True):
    """LLM backends known at the start; more may be added while running.

    Attributes:
        urls: `http://HOST:PORT` of each.
        allowed: addresses of further engines that may be added while the node runs: `HOST` or `HOST:PORT`, where HOST
            is a name, `*.DOMAIN`, an IP address, a network as `10.0.0.0/8` (`[fd00::/8]`), or `*`. A network allows no
            names. Empty: trainers that have the token may add any; through the endpoints of the ProRL Agent server,
            only `urls` and loopback addresses can be added.
        weights: shares of the rollouts, by URL: a backend of weight 2 gets twice as many as one of 1, which others
            have.
        engine: what the servers are: `vllm`, `sglang` (tested against a look-alike only), `prorl` (a trainer's own, as
            the ProRL Agent server knows it: `POST /generate` with `prompt_ids`), a kind that an installed package
            offers under the entry-point group `prorl_trio.engines`, or `auto`: each is asked as it is registered.
        max_model_len: the longest context, in tokens, of engines that do not say, which is `prorl` alone; 0: what the
            model's config.json has as `max_position_embeddings`.
        stream: have all completions sent token by token: nothing is lost then when one is cut, also where the engine
            cannot answer an abort with what it has; each token costs the node, and the engine, ten times the CPU.
        slice_tokens: completions are answered in slices, the first of so many tokens, each further one as long as all
            before it: one that a time-out, a lost connection or a pause cuts is continued from the slices it has. A few
            are streamed, to learn an engine's pace, and all those that might take half of `request_timeout_s`. 0: in
            one piece, and what is cut is sampled again, which favours short completions.
        required: refuse to start when a backend does not pass its probe; else it is `down`, and joins when it does. One
            that is paused is no reason to refuse.
        probe_timeout_s: time for one probe of a backend.
        request_timeout_s: time for each slice; a stream goes on from what it has then.
        max_connections_per_backend: calls of one backend at once; more wait.
        max_tasks_per_backend: rollouts that have a backend at the same time; 0 for no limit of its own (`run_workers`
            is one for all backends).
        lease_timeout_s: longest wait of a rollout for a backend with room, charged to no budget.
        health: when one is given no more rollouts because it fails.
        load: when one is given no more rollouts because it has enough.
    """

    urls: list[str] = msgspec.field(default_factory=list)
    allowed: list[str] = msgspec.field(default_factory=list)
    weights: dict[str, Weight] = msgspec.field(default_factory=dict)
    engine: str = "auto"
    max_model_len: Tokens = 0
    stream: bool = False
    slice_tokens: Tokens = 256
    required: bool = False
    probe_timeout_s: Seconds = 60.0
    request_timeout_s: Seconds = 600.0
    max_connections_per_backend: Connections = 512
    max_tasks_per_backend: Amount = 0
    lease_timeout_s: SecondsOrZero = 900.0
    health: HealthConfig = HealthConfig()
    load: LoadConfig = LoadConfig()

    def __post_init__(self) -> None:
        for url, weight in self.weights.items():
            if url not in self.urls:
                raise ValueError(f"weights: {url} is not among the urls")
            if not 0 < weight < float("inf"):
                raise ValueError(f"weights: that of {url} must be > 0, got {weight}")
        for pattern in self.allowed:
            _Pattern.parse(pattern)

    def allows(self, url: str, default: Iterable[str] = ("*",)) -> bool:
        """Return whether an engine at `url` may be contacted: it is one of `urls`, or matches one of `allowed`.

        `default` is used if `allowed` is empty.
        """
        origin = url.rstrip("/")
        if origin in {known.rstrip("/") for known in self.urls}:
            return True
        try:
            parts = urlsplit(origin)
            host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            return False
        return bool(host) and any(
            _Pattern.parse(pattern).matches(host or "", port) for pattern in self.allowed or default
        )


class _Pattern(msgspec.Struct, frozen=True):
    """A pattern of `BackendConfig.allowed`. `port` None: any."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> _Pattern:
        """Parse `HOST[:PORT]`. Raise ValueError if it is something else."""
        wrong = f"allowed: {text!r} is not HOST or HOST:PORT, as gpu1:8000, *.cluster.local or 10.0.0.0/8"
        host, port = text.strip().lower(), ""
        if host.startswith("["):
            host, bracket, port = host[1:].partition("]")
            if not bracket or (port and not port.startswith(":")):
                raise ValueError(wrong)
            port = port[1:]
        elif host.count(":") == 1:
            host, _, port = host.partition(":")
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
            raise ValueError(wrong)
        if "/" in host:
            try:
                ipaddress.ip_network(host)
            except ValueError as exc:
                raise ValueError(f"{wrong}: {exc}") from None
        elif not host or ("*" in host and host != "*" and not (host.startswith("*.") and host.count("*") == 1)):
            raise ValueError(wrong)
        return cls(host, int(port) if port else None)

    def matches(self, host: str, port: int) -> bool:
        """Return whether the pattern has this host, in lower case, and port."""
        if self.port not in (None, port):
            return False
        if self.host in ("*", host):
            return True
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if "/" not in self.host:
            return self.host == str(address)
        return address in ipaddress.ip_network(self.host)


class ImagesConfig(Table, frozen=True):
    """Images of registries (`docker://...`) that a task names and the store does not have.

    They are pulled once, by one process of the machine, while all who want them wait; see `docs/images.md`.

    Attributes:
        pull: pull them in INIT. Without it, what was not pulled beforehand is refused.
        max_concurrent_pulls: images at once.
        max_concurrent_layers: layers of one image at once.
        timeout_s: time that a rollout waits for its image, charged to no budget; the pull goes on after that.
        patience_s: time for which a registry may ask to wait, or fail, before a pull fails.
        max_store_bytes: disk space of the whole store; 0 for no such limit. Pulled images that are not in use make
            room, the least recently used first.
        min_free_bytes: so much of the store's disk stays free, for all else that is on it.
        plain_http: registries, with their ports, that speak no TLS.
    """

    pull: bool = True
    max_concurrent_pulls: Processes = 4
    max_concurrent_layers: Processes = 4
    timeout_s: Seconds = 3600.0
    patience_s: Seconds = 900.0
    max_store_bytes: BytesOrZero = 0
    min_free_bytes: BytesOrZero = 1024 * 1024 * 1024
    plain_http: tuple[str, ...] = ()


class SandboxConfig(Table, frozen=True):
    """The sandboxes that tools run in, one for each rollout.

    They are started in advance where they are in demand.

    Attributes:
        provider: what isolates tools: `apptainer`, `bubblewrap`, `process` (which isolates nothing), or one that an
            installed package offers. `auto` takes bubblewrap for the image `host`, folders and
            layers, and apptainer for `.sif` files, or one of them where the other does not pass its probe.
        image: for handlers that name none: `host` (this machine's userland, read-only), an unpacked root directory, a
            `.sif` file, a name of the image store, or the reference of an image in a registry.
        images: pulls of images that are not in the store.
        packages: Python packages, installed beside the node, that tools find in the image `host` besides the promised
            ones.
        network: let tools use this machine's network.
        fakeroot: the tools are root in there, so that they can install packages. apptainer only.
        start_timeout_s: time for a sandbox to be ready for its first command.
        max_concurrent_starts: sandboxes that start at the same time.
        max_concurrent_starts_per_image: of them, those of one image.
        max_warm: sandboxes that are kept ready; 0 for none.
        max_warm_per_image: of them, those of one image.
        max_warm_idle_s: one that nobody took for so long is ended.
        limits: what one sandbox may use.
        runtime_dir: node-local folder for control sockets. Empty: a private one below the system's temporary folder.
    """

    provider: str = "auto"
    image: str = "host"
    images: ImagesConfig = ImagesConfig()
    packages: tuple[str, ...] = ()
    network: bool = False
    fakeroot: bool = False
    start_timeout_s: Seconds = 60.0
    max_concurrent_starts: Processes = 4
    max_concurrent_starts_per_image: Processes = 4
    max_warm: ProcessesOrZero = 8
    max_warm_per_image: ProcessesOrZero = 8
    max_warm_idle_s: SecondsOrZero = 120.0
    limits: SandboxLimits = SandboxLimits()
    runtime_dir: str = ""

    @property
    def run_path(self) -> Path | None:
        """The `runtime_dir`, None where it is empty."""
        return Path(self.runtime_dir).absolute() if self.runtime_dir else None


class ScoringConfig(Table, frozen=True):
    """Limits of a scoring process. An answer is the policy's text: it may be made to eat all there is.

    Attributes:
        cpu_s: CPU time of one call.
        memory_bytes: private memory.
        stack_bytes: stack, which deep nesting fills.
        max_processes: processes and threads that scorers may add to those that the node's user has; root has no limit.
        max_open_files: files that a process may have open.
        max_file_bytes: size of a file.
    """

    cpu_s: Annotated[int, msgspec.Meta(ge=1, le=int(YEAR_S))] = 10
    memory_bytes: Annotated[int, msgspec.Meta(ge=256 * 1024 * 1024, le=MAX_BYTES)] = 1024 * 1024 * 1024
    stack_bytes: Annotated[int, msgspec.Meta(ge=1024 * 1024, le=MAX_BYTES)] = 16 * 1024 * 1024
    max_processes: Count = 256
    max_open_files: Annotated[int, msgspec.Meta(ge=64, le=MAX_OPEN_FILES)] = 256
    max_file_bytes: BytesOrZero = 64 * 1024 * 1024


class SearchConfig(Table, frozen=True):
    """Search on the node, for the tool `search`: a sandbox has no part in it. See docs/search.md.

    Attributes:
        backend: what answers: `bm25` searches `corpus` in this process, `retrieve` asks an endpoint like Search-R1's,
            `tavily` asks Tavily. `none`: agents of this node cannot search.
        corpus: for `bm25`: the JSONL file of the documents.
        index_dir: for `bm25`: the folder of indexes, each of which is made once for a corpus of that content. Empty:
            `search` in the cache folder (`PRORL_CACHE_DIR`).
        index_timeout_s: for `bm25`: time for an index to be made when the node starts.
        max_line_bytes: for `bm25`: size of one line of `corpus`.
        url: for `retrieve`: the endpoint with its path; for `tavily`: in place of Tavily's own.
        api_key_file: the file with the key of the endpoint, which only its owner should read.
        api_key_env: the variable of the environment with that key, in place of a file.
        max_calls_per_rollout: searches that a rollout may make; a further one is refused, and the agent told so.
        max_results: results of one search.
        max_result_chars: text of one result; a longer one is cut at its end.
        max_query_chars: a longer query is refused, and the agent told so.
        attempt_timeout_s: time for one attempt at a search.
        search_timeout_s: time for all attempts at a search, with the waits between them.
        max_attempts: attempts at a search that fails in a way that may pass.
        max_concurrent_searches: searches at work at the same time.
        max_waiting_searches: searches that may wait for their turn; with one more the backend counts as failing.
        max_response_bytes: size of an endpoint's answer.
        probe_query: what is asked to tell a backend that fails from a query that it fails at.
    """

    backend: SearchBackendName = "none"
    corpus: str = ""
    index_dir: str = ""
    index_timeout_s: Seconds = 3600.0
    max_line_bytes: MessageBytes = 16 * 1024 * 1024
    url: str = ""
    api_key_file: str = ""
    api_key_env: str = ""
    max_calls_per_rollout: Count = 20
    max_results: Count = 5
    max_result_chars: Count = 1_500
    max_query_chars: Count = 1_000
    attempt_timeout_s: Seconds = 15.0
    search_timeout_s: Seconds = 60.0
    max_attempts: Count = 4
    max_concurrent_searches: Processes = 16
    max_waiting_searches: Count = 1_000
    max_response_bytes: MessageBytes = 8 * 1024 * 1024
    probe_query: str = "water"

    def __post_init__(self) -> None:
        if self.backend == "bm25" and not self.corpus:
            raise ValueError("corpus: the backend bm25 needs a JSONL file of documents")
        if self.backend == "retrieve" and not self.url:
            raise ValueError("url: the backend retrieve needs the URL of its endpoint")
        if self.api_key_file and self.api_key_env:
            raise ValueError("give api_key_file or api_key_env, not both")
        if self.backend == "tavily" and not (self.api_key_file or self.api_key_env):
            raise ValueError("the backend tavily needs api_key_file or api_key_env")

    def read_api_key(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the endpoint's key, empty if none is configured. Blocks on the disk.

        Raises:
            ConfigError: the file or the variable is not there, or has no key. The message does not have what it has.
        """
        if self.api_key_env:
            key, where = environ.get(self.api_key_env, "").strip(), f"search.api_key_env: ${self.api_key_env}"
        elif self.api_key_file:
            where = f"search.api_key_file: {self.api_key_file}"
            try:
                key = read_regular(self.api_key_file, MAX_KEY_BYTES).decode().strip()
            except OSError as exc:
                raise ConfigError(f"{where} cannot be read: {exc.strerror}") from exc
            except UnicodeDecodeError:
                raise ConfigError(f"{where} is no text") from None
        else:
            return ""
        if not key:
            raise ConfigError(f"{where} is empty: put the key there")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{where} holds no key: a key is one line of printable ASCII without spaces")
        return key


class ModelConfig(Table, frozen=True):
    """The policy's tokenizer and chat template.

    Attributes:
        path: folder with `tokenizer.json`, `tokenizer_config.json` and the chat template.
        family: how the model writes tool calls and reasoning; empty: it is told from the template.
        template_options: variables for the template, `{ enable_thinking = false }` for Qwen3, say.
        on_break: what to do where the template alters earlier turns, as Qwen3's drops old reasoning at a new user
            message: `keep` the tokens as they were sampled, begin a new `segment`, or `fail` the rollout.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]
    family: str = ""
    template_options: dict[str, bool | int | float | str] = msgspec.field(default_factory=dict)
    on_break: Literal["keep", "segment", "fail"] = "keep"


class AgentConfig(Table, frozen=True):
    """Limits of the turn loop.

    Attributes:
        stop_at_tool_call: stop the engine as soon as a tool call is complete. What the policy would have said after it
            is not sampled: not its end of turn either, nor a second call. It is for policies that make up a call's
            result and talk on; one that ends its turn there saves one token. Tokens are then streamed, which costs the
            node some 60 us of CPU each, in place of 2.
        max_staleness: policy updates that may lie between the first sampled token of a trajectory and the newest
            weights, for jobs that do not say; without it: any number. See `prorl_trio.JobSpec`.
        rollouts_per_update: rollouts of a session that its trainer takes from this node for one policy update, at
            least. At most `(max_staleness + 1) * rollouts_per_update` jobs with a bound run at once; those
            that ended well and that no update has taken yet count, too. The others wait in their queues, oldest first,
            charged to no budget; those of priority `eval` do not. A figure below what an update really takes makes the
            trainer wait for ever. 0: no limit, and what becomes too stale fails.
        max_trajectory_tokens: length of each segment, which is the prompt and everything after it; 0 takes the
            backend's context length. What tools return is cut to the room that is left, head and tail kept, with a note
            of how many tokens were left out; where there is no room for that, the loop ends with `context_budget`.
        max_nudges: how often a turn without a tool call is answered by a reminder before the loop ends.
        tool_timeout_s: time for one tool call.
        max_observation_chars: a longer tool result is cut in the middle.
    """

    stop_at_tool_call: bool = False
    max_staleness: Amount | None = None
    rollouts_per_update: Amount = 0
    max_trajectory_tokens: Tokens = 0
    max_nudges: Amount = 1
    tool_timeout_s: Seconds = 30.0
    max_observation_chars: Count = 8_000

    def staleness_bound(self, spec: JobSpec) -> int | None:
        """`max_staleness` of a job: its own, or the node's; None: it has none."""
        return self.max_staleness if spec.max_staleness is None else spec.max_staleness


class NodeConfig(Table, frozen=True):
    """Everything one node needs.

    Attributes:
        node_id: the name of the node, also of its folder in `ledger.dir`; empty: made of host and process.
        drain_timeout_s: time after the first SIGTERM for live jobs to end by themselves; then they are cancelled. In an
            allocation of Slurm's whose end is known, SIGTERM gives them the time until `fleet.end_margin_s` before it.
        stuck_after_s: a job in a stage to which nothing happens for so long is shown as stuck; its budgets end it.
        on_hangup: at SIGHUP the node drains, or reads its configuration again; `auto`: it drains if it was started from
            a terminal, which is gone then.
        max_undelivered: jobs of one session, running or finished and not acknowledged.
    """

    model: ModelConfig
    node_id: Annotated[str, msgspec.Meta(pattern=NODE_ID)] = ""
    listen: ListenConfig = ListenConfig()
    rest: RestConfig = RestConfig()
    fleet: FleetConfig = FleetConfig()
    ledger: LedgerConfig = LedgerConfig()
    backends: BackendConfig = BackendConfig()
    sandbox: SandboxConfig = SandboxConfig()
    stages: StagesConfig = StagesConfig()
    admission: AdmissionConfig = AdmissionConfig()
    budgets: BudgetConfig = BudgetConfig()
    agent: AgentConfig = AgentConfig()
    scoring: ScoringConfig = ScoringConfig()
    search: SearchConfig = SearchConfig()
    arena: ArenaConfig = ArenaConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    drain_timeout_s: SecondsOrZero = 60.0
    stuck_after_s: SecondsOrZero = 300.0
    on_hangup: OnHangup = "auto"
    max_undelivered: Count = 100_000


def load_config(path: Path) -> NodeConfig:
    """Read `path`.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown or wrong field (named by its path).
    """
    return read_toml(path, NodeConfig, MOVED)
