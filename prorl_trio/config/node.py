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
from prorl_trio.config.mcp import McpConfig
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
from prorl_trio.http.client import split_origin, split_path
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
    "backends.urls",
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
    """The ledger stores jobs until they have an outcome, and outcomes until they are acknowledged.

    Its folder is on a local disk, and only one node uses it at a time.

    Attributes:
        dir: the folder. `auto`: `prorl-trio/NODE_ID` in $XDG_STATE_HOME (~/.local/state) if `node_id` is set, else
            empty. Empty: the ledger is in memory, and is lost when the node ends.
        on_restart: whether the next start runs unfinished jobs again (`retry`) or fails them (`fail`).
        max_attempts: a restart fails unfinished jobs that already had this many attempts.
        log_bytes: size at which the write-ahead log is copied into the database.
        reserve_bytes: disk space reserved for outcomes on a full disk. An outcome takes twice its size.
        max_bytes: size of the database, its log and the reserve.
        tombstone_s: time for which a session cannot run an acknowledged job again. Only the node's running time counts.
        hot_outcome_bytes: memory for unacknowledged outcomes. Others are read from the disk when they are sent. A
            ledger in memory ignores this: see `admission`.
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
    """Shared memory for the tokens of live and undelivered trajectories. Trainers on the same host can map it.

    A rollout starts when there is room for its longest possible trajectory.

    Attributes:
        enabled: use an arena. Without it, tokens are in private memory, and trainers get them as frames.
        size_bytes: size, committed as it is written. 0: 1 GiB, or a tenth of the memory if that is less.
        shared_bytes: part for undelivered outcomes of trainers that map the arena. Other outcomes are sent as frames.
            0: half of the arena.
        room_timeout_s: time that a rollout waits for room, without a charge to its budgets. Then it uses private
            memory.
        max_readers: trainers that map the arena at the same time. Further trainers get frames.
    """

    enabled: bool = True
    size_bytes: BytesOrZero = 0
    shared_bytes: BytesOrZero = 0
    room_timeout_s: SecondsOrZero = 60.0
    max_readers: Connections = MAX_ARENA_READERS


class StagesConfig(Table, frozen=True):
    """Workers and queues of each stage.

    Attributes:
        init_workers: concurrent jobs in INIT, which prepares sandboxes.
        run_workers: concurrent jobs in RUN, in which the policy takes its turns.
        eval_workers: concurrent jobs in EVAL, which scores rollouts.
        init_queue: jobs that may wait for INIT. A full queue rejects submissions.
        ready_queue: jobs with a sandbox that may wait for RUN. A full queue blocks INIT.
        eval_queue: jobs that may wait for EVAL. A full queue blocks RUN.
    """

    init_workers: Processes = 4
    run_workers: Workers = 32
    eval_workers: Processes = 4
    init_queue: Count = 10_000
    ready_queue: Workers = 16
    eval_queue: Count = 1_000


class AdmissionConfig(Table, frozen=True):
    """Limits above which a node rejects jobs, in addition to `stages.init_queue`.

    A rejection names the limit and estimates when there is room.

    Attributes:
        session_weights: shares of the workers by session id, from 0.01 to 100. The default is 1. Only sessions with
            waiting jobs count.
        max_queued_per_session: jobs of one session that wait for INIT.
        max_live: jobs without an outcome.
        max_live_per_session: jobs of one session without an outcome.
        max_undelivered: unacknowledged outcomes.
        max_undelivered_bytes: size of unacknowledged outcomes.
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
    """Default time limits of a job. A job may set others (`prorl_trio.Budgets`). Time in queues is not charged.

    Attributes:
        init_s: time for INIT.
        run_s: time for RUN, without the time of `agent_s`, waits for a backend, and pauses.
        eval_s: time for EVAL.
        total_s: time for all stages together.
        agent_s: time in RUN for the policy's tool calls and sampled tokens.
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
    """Reports of a blocked event loop.

    Attributes:
        stall_warn_s: log the task's name if one pass of the event loop takes longer than this.
        stall_dump_after_s: log the loop's stack during a pass that takes longer than this. 0: never.
    """

    stall_warn_s: Seconds = 0.25
    stall_dump_after_s: SecondsOrZero = 0.0


class TelemetryConfig(Table, frozen=True):
    """OpenTelemetry spans of jobs, stages and turns.

    Attributes:
        otlp_endpoint: destination, for example `http://collector:4318/v1/traces`. Empty: no spans.
        service_name: name of this service in the spans.
        max_queued_spans: spans that wait to be sent. Further spans are dropped.
    """

    otlp_endpoint: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^/\s]+\S*)?\Z")] = ""
    service_name: str = "prorl-trio"
    max_queued_spans: Count = 8192


class FleetConfig(Table, frozen=True):
    """The fleet of this node: all nodes with an entry in one folder.

    Attributes:
        dir: the folder, on a disk that all machines of the fleet and its trainer share. It is created with mode 0700.
            The node writes `NODE_ID.json` there, with its token. Empty: no fleet.
        advertise: host name of this node for other machines. Empty: `listen.host`, or the machine's name if that is
            every address.
        heartbeat_interval_s: interval of heartbeats, less than a third of `stale_after_s`.
        stale_after_s: a node without a heartbeat for this time counts as lost, and its jobs move.
        restart_within_s: time that the jobs of a lost or ending node wait for its next start with its ledger. 0: other
            nodes run them at once.
        end_margin_s: the node ends this long before its allocation does (`SLURM_JOB_END_TIME`). It must cover the
            difference of clocks and the node's own shutdown.
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


def read_key(table: str, file: str, variable: str, environ: Mapping[str, str]) -> str:
    """Return the key in a file or an environment variable, which `table` names; empty if neither is named.

    Blocks on the disk.

    Raises:
        ConfigError: the file or the variable does not exist, or has no key. The message does not contain its content.
    """
    if variable:
        key, where = environ.get(variable, "").strip(), f"{table}.api_key_env: ${variable}"
    elif file:
        where = f"{table}.api_key_file: {file}"
        try:
            key = read_regular(file, MAX_KEY_BYTES).decode().strip()
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


class HealthConfig(Table, frozen=True):
    """A circuit breaker: a failing backend gets no rollouts, and its rollouts move, until probes succeed.

    Attributes:
        interval_s: interval of probes. 0: no probes, so only calls detect failures, and a removed backend must be added
            again.
        open_after_failures: consecutive failures of calls (after retries) or probes that remove a backend. A restored
            backend is removed again if its first call fails.
        close_after_successes: consecutive successful probes that restore it. The number grows up to eightfold while the
            first call after each return fails.
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
    """Balancing by the load that engines report on `/metrics`. Engines without such reports are not balanced.

    A rollout moves, at most once a turn, if its wait here exceeds `skew_margin_s + skew_ratio * (wait there + time to
    read its prefix there)`.

    Attributes:
        interval_s: interval of reports. 0: no balancing.
        skew_margin_s: tolerated difference of the two waits.
        skew_ratio: tolerated ratio of the two waits.
        max_kv_usage: share of the KV cache that running requests may fill. Above it, or after preemptions, the
            backend's limit becomes `decrease_factor` times its rollouts. Below it, the limit grows up to
            `max_tasks_per_backend`. 0: no limit.
        decrease_factor: factor for `max_kv_usage`, between 0 and 1.
        increase_tasks: rollouts by which the limit grows at each report.
        min_tasks: rollouts that a backend may always have.
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


class TinkerConfig(Table, frozen=True):
    """Servers of the Tinker API (`engine = "tinker"`). See `docs/tinker.md`.

    Attributes:
        model: the base model, by the server's name for it. Empty: the only one that the server offers.
        weights: checkpoint to sample from at first: `tinker://RUN/sampler_weights/NAME`. Empty: the base model.
        api_key_file: file with the API key. Only its owner should be able to read it.
        api_key_env: environment variable with the key, instead of a file.
    """

    model: str = ""
    weights: str = ""
    api_key_file: str = ""
    api_key_env: str = ""

    def __post_init__(self) -> None:
        if self.weights and not self.weights.startswith("tinker://"):
            raise ValueError(f"weights: {self.weights!r} is not a path of the form tinker://RUN/sampler_weights/NAME")
        if self.api_key_file and self.api_key_env:
            raise ValueError("give api_key_file or api_key_env, not both")

    def read_api_key(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the API key, empty if none is configured. See `read_key`."""
        return read_key("backends.tinker", self.api_key_file, self.api_key_env, environ)


class BackendConfig(Table, frozen=True):
    """LLM backends known at startup. More may be added to a running node.

    Attributes:
        urls: `http://HOST:PORT` of each backend.
        allowed: engines that may be added to a running node: `HOST` or `HOST:PORT`. HOST is a name, `*.DOMAIN`, an IP
            address, a network such as `10.0.0.0/8` (`[fd00::/8]`), or `*`. A network matches no names. Empty: trainers
            with the token may add any; ProRL endpoints only `urls` and loopback addresses.
        weights: shares of the rollouts by URL. A backend of weight 2 gets twice the default share, which is 1.
        engine: kind of the servers: `vllm`, `sglang` (tested with an imitation only), `tinker`, `prorl` (a trainer's
            own: `POST /generate` with `prompt_ids`), a kind of an installed package (entry-point group
            `prorl_trio.engines`), or `auto`, which detects it.
        max_model_len: context length of engines that do not report it (`prorl`, some of `tinker`). 0:
            `max_position_embeddings` of the model's config.json.
        stream: stream all completions, so that an interrupted completion loses no token. Each token then costs node and
            engine ten times the CPU time.
        slice_tokens: tokens of the first slice of a completion. Each further slice is as long as all previous slices
            together. An interrupted completion continues from its slices. Completions that might take half of
            `request_timeout_s`, and a few others, are streamed. 0: one piece. Interrupted completions are then sampled
            again, which favours short ones.
        required: refuse to start if a backend fails its probe. Otherwise it is `down`, and joins later. A paused
            backend passes.
        probe_timeout_s: timeout of a probe.
        request_timeout_s: timeout of each slice. A stream continues from the received tokens.
        max_connections_per_backend: concurrent calls of one backend. Further calls wait.
        max_tasks_per_backend: concurrent rollouts of one backend. 0: only `stages.run_workers` limits them.
        lease_timeout_s: longest wait of a rollout for a backend with room. It is charged to no budget.
        health: when a failing backend gets no rollouts.
        load: when a loaded backend gets no rollouts.
        tinker: model and API key of Tinker servers.
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
    tinker: TinkerConfig = TinkerConfig()

    def __post_init__(self) -> None:
        for url, weight in self.weights.items():
            if url not in self.urls:
                raise ValueError(f"weights: {url} is not among the urls")
            if not 0 < weight < float("inf"):
                raise ValueError(f"weights: that of {url} must be > 0, got {weight}")
        for pattern in self.allowed:
            _Pattern.parse(pattern)

    @property
    def weighted_urls(self) -> dict[str, float]:
        """Return the weights of `urls`."""
        return {url.rstrip("/"): self.weights.get(url, 1.0) for url in self.urls}

    def check_urls(self) -> None:
        """Check `urls`.

        Raises:
            ConfigError: one is not valid, or occurs twice.
        """
        known = set[str]()
        for url in self.urls:
            origin = url.rstrip("/")
            try:
                split_origin(split_path(origin)[0] if self.engine == "tinker" else origin)
            except ValueError as exc:
                raise ConfigError(f"backends.urls: {exc}") from exc
            if origin in known:
                raise ConfigError(
                    f"backends.urls: {url} is there twice; for more rollouts, give it a weight in [backends]"
                )
            known.add(origin)

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
    """Registry images (`docker://...`) that a task names and the store does not have.

    Each is pulled once per machine for all waiting rollouts (`docs/images.md`).

    Attributes:
        pull: pull missing images in INIT. Otherwise they are refused.
        max_concurrent_pulls: concurrent pulls of images.
        max_concurrent_layers: concurrent downloads of layers of one image.
        timeout_s: time that a rollout waits for its image, charged to no budget. The pull continues afterwards.
        patience_s: time for which a registry may fail or request a wait before a pull fails.
        max_store_bytes: size of the store. The least recently used pulled images are evicted. 0: no limit.
        min_free_bytes: space that pulls leave free on the store's disk.
        plain_http: registries without TLS, with their ports.
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
    """The sandboxes of tools, one for each rollout. The node starts some in advance, according to demand.

    Attributes:
        provider: isolation of tools: `apptainer`, `bubblewrap`, `process` (none), or a provider of an installed
            package. `auto`: bubblewrap for `host`, folders and layers, and apptainer for `.sif` files. Each replaces
            the other if that fails its probe.
        image: default image: `host` (this machine's programs, read-only), an unpacked root directory, a `.sif` file, a
            name in the image store, or a registry reference.
        images: pulls of missing images.
        packages: Python packages of the node that tools find in the image `host`, in addition to the standard ones.
        network: let tools use this machine's network.
        fakeroot: make tools root inside, so that they can install packages. Requires apptainer.
        start_timeout_s: timeout of a sandbox start.
        max_concurrent_starts: concurrent sandbox starts.
        max_concurrent_starts_per_image: concurrent starts of one image.
        max_warm: sandboxes started in advance. 0: none.
        max_warm_per_image: sandboxes of one image started in advance.
        max_warm_idle_s: an unused warm sandbox ends after this time.
        limits: limits of one sandbox.
        runtime_dir: local folder for control sockets. Empty: a private folder in the system's temporary folder.
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
    """Limits of a scoring process, because the policy's answer may try to exhaust resources.

    Attributes:
        cpu_s: CPU time of one call.
        memory_bytes: private memory.
        stack_bytes: stack, which deeply nested answers fill.
        max_processes: processes and threads of scorers, in addition to others of the node's user. Root is not limited.
        max_open_files: open files of a process.
        max_file_bytes: size of a file.
    """

    cpu_s: Annotated[int, msgspec.Meta(ge=1, le=int(YEAR_S))] = 10
    memory_bytes: Annotated[int, msgspec.Meta(ge=256 * 1024 * 1024, le=MAX_BYTES)] = 1024 * 1024 * 1024
    stack_bytes: Annotated[int, msgspec.Meta(ge=1024 * 1024, le=MAX_BYTES)] = 16 * 1024 * 1024
    max_processes: Count = 256
    max_open_files: Annotated[int, msgspec.Meta(ge=64, le=MAX_OPEN_FILES)] = 256
    max_file_bytes: BytesOrZero = 64 * 1024 * 1024


class SearchConfig(Table, frozen=True):
    """The backend of the tool `search`. It runs on the node, not in sandboxes (`docs/search.md`).

    Attributes:
        backend: `bm25` searches `corpus` on the node, `retrieve` calls an endpoint like Search-R1's, `tavily` calls
            Tavily, `none` turns search off.
        corpus: for `bm25`: JSONL file of the documents.
        index_dir: for `bm25`: folder of indexes, one per content of a corpus. Empty: `search` in the cache folder
            (`PRORL_CACHE_DIR`).
        index_timeout_s: for `bm25`: time to build an index at startup.
        max_line_bytes: for `bm25`: size of one line of `corpus`.
        url: for `retrieve`: the endpoint with its path. For `tavily`: replaces Tavily's URL.
        api_key_file: file with the endpoint's key. Only its owner should be able to read it.
        api_key_env: environment variable with the key, instead of a file.
        max_calls_per_rollout: searches of one rollout. Further searches return an error to the agent.
        max_results: results of one search.
        max_result_chars: length of one result. Longer results are truncated.
        max_query_chars: length of a query. Longer queries return an error to the agent.
        attempt_timeout_s: timeout of one attempt.
        search_timeout_s: timeout of one search with all attempts and waits.
        max_attempts: attempts of a search after transient failures.
        max_concurrent_searches: concurrent searches.
        max_waiting_searches: searches that may wait. With more, the backend counts as failing.
        max_response_bytes: size of an endpoint's response.
        probe_query: a query that distinguishes a failing backend from a failing query.
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
        """Return the endpoint's key, empty if none is configured. See `read_key`."""
        return read_key("search", self.api_key_file, self.api_key_env, environ)


class NemoGymConfig(Table, frozen=True):
    """The resources servers of NeMo Gym that tasks of the handler `nemo_gym` may use (`docs/nemo-gym.md`).

    Attributes:
        servers: origin of each server, `http://HOST:PORT`, by the name that tasks use. Tasks cannot name other URLs.
        request_timeout_s: timeout of `/seed_session` and of `/verify`. Tools have `agent.tool_timeout_s`.
        max_response_bytes: size of one response.
    """

    servers: dict[str, str] = msgspec.field(default_factory=dict)
    request_timeout_s: Seconds = 600.0
    max_response_bytes: MessageBytes = 8 * 1024 * 1024

    def __post_init__(self) -> None:
        for name, url in self.servers.items():
            try:
                secure = split_origin(url)[0]
            except ValueError as exc:
                raise ValueError(f"servers.{name}: {exc}") from None
            if secure:
                raise ValueError(f"servers.{name}: {url!r} is not an origin like http://127.0.0.1:8000")


class ModelConfig(Table, frozen=True):
    """The policy's tokenizer and chat template.

    Attributes:
        path: folder with `tokenizer.json`, `tokenizer_config.json` and the chat template.
        family: syntax of tool calls and reasoning. Empty: detected from the template.
        template_options: variables of the template, for example `{ enable_thinking = false }` for Qwen3.
        on_break: behaviour if the template rewrites earlier turns: `keep` the tokens as sampled, start a new `segment`,
            or `fail` the rollout.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]
    family: str = ""
    template_options: dict[str, bool | int | float | str] = msgspec.field(default_factory=dict)
    on_break: Literal["keep", "segment", "fail"] = "keep"


class AgentConfig(Table, frozen=True):
    """Limits of the turn loop.

    Attributes:
        stop_at_tool_call: stop the engine at a complete tool call, so that the policy cannot invent its result. A
            second call and the end of turn are not sampled. Tokens are streamed, for about 60 us of CPU time each
            instead of 2.
        max_staleness: default of `JobSpec.max_staleness`: policy updates between a trajectory's first sampled token and
            the newest weights. Without it, staleness is unlimited.
        rollouts_per_update: minimum number of rollouts that a session's trainer takes from this node per policy update.
            At most `(max_staleness + 1) * rollouts_per_update` jobs with a staleness limit run at the same time,
            including finished jobs that no update has used yet. Others wait in queues without a charge. `eval` jobs are
            exempt. A value below the real number blocks the trainer. 0: no limit, and jobs that become too stale fail.
        max_trajectory_tokens: length of a segment with its prompt. 0: the backend's context length. Tool results are
            truncated in the middle to fit. Without room the loop ends with `context_budget`.
        max_nudges: reminders after a turn without a tool call. Then the loop ends.
        tool_timeout_s: timeout of one tool call.
        max_observation_chars: length of a tool result. Longer results are truncated in the middle.
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
    """All settings of a node.

    Attributes:
        node_id: name of the node, and of its folder for `ledger.dir`. Empty: made from host and process.
        drain_timeout_s: time after the first SIGTERM for live jobs to end. Then they are cancelled. In a Slurm
            allocation with a known end, they have until `fleet.end_margin_s` before it.
        stuck_after_s: a job without progress in a stage for this time is shown as stuck. Only its budgets end it.
        on_hangup: at SIGHUP, `drain` or `reload` the configuration. `auto`: drain if the node was started from a
            terminal, which has then closed.
        max_undelivered: running or unacknowledged jobs of one session.
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
    nemo_gym: NemoGymConfig = NemoGymConfig()
    mcp: McpConfig = McpConfig()
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
