"""node.toml -> frozen Structs. Every limit is named, with its unit in the name. Errors carry the field's path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from ipc.arena_socket import MAX_ARENA_READERS
from ipc.limits import SandboxLimits
from prorl_trio.config.quantities import Amount, Count, Port, Seconds, SecondsOrZero
from prorl_trio.config.toml_file import read_toml

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.types.models import Budgets, JobSpec

__all__ = [
    "AdmissionConfig",
    "AgentConfig",
    "ArenaConfig",
    "BackendConfig",
    "BudgetConfig",
    "HealthConfig",
    "LedgerConfig",
    "ListenConfig",
    "LoadConfig",
    "ModelConfig",
    "MonitoringConfig",
    "NodeConfig",
    "RestConfig",
    "SandboxConfig",
    "ScoringConfig",
    "StagesConfig",
    "Strategy",
    "TelemetryConfig",
    "load_config",
]


NODE_ID: Final = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?\Z"
MIN_SESSION_WEIGHT: Final = 0.01
MAX_SESSION_WEIGHT: Final = 100.0


OnHangup = Literal["auto", "drain", "reload"]


class _Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration: immutable; an unknown key is an error."""


class ListenConfig(_Config, frozen=True):
    """The trainer-facing socket. `token` may instead be in the file `token_file` (mode 0600); one is required.

    `port` 0 takes a free one. `endpoint_file`, if set, is written once the node listens: `{"url": "ws://..."}`.
    With `tls_cert` and `tls_key` (PEM files; the key 0600) it speaks TLS, and its URL is `wss://`; so does REST.

    `unix_socket` is the path of one more, for trainers on the same host (`unix://PATH`), never with TLS; through it, or
    rather the one beside it, they map the arena. Its folder must be 0700, and is made so if it is missing. `auto`: in
    a folder beside the endpoint file, if there is one; empty: none.
    """

    host: str = "127.0.0.1"
    port: Port = 8700
    token: str = ""
    token_file: str = ""
    endpoint_file: str = ""
    unix_socket: str = "auto"
    tls_cert: str = ""
    tls_key: str = ""
    max_message_bytes: Count = 64 * 1024 * 1024
    max_sessions: Count = 64
    heartbeat_interval_s: Seconds = 10.0
    heartbeat_timeout_s: Seconds = 30.0

    def unix_path(self) -> Path | None:
        """Where the Unix socket goes; None: nowhere."""
        if self.unix_socket != "auto":
            return Path(self.unix_socket) if self.unix_socket else None
        if not self.endpoint_file:
            return None
        endpoint = Path(self.endpoint_file)
        return endpoint.with_name(f".{endpoint.stem}") / "node"


class RestConfig(_Config, frozen=True):
    """REST beside the WebSocket, with the same token, sessions and jobs. `port` 0 takes a free one.

    Attributes:
        tls: speak TLS (`https://`) where `listen` does. False: never, as behind a proxy of this host.
        max_connections: with the token at once, event streams and long polls included; more are refused. Besides them
            there may be 64 without: the next one makes another give way.
        idle_timeout_s: for a request's headers to come in whole, and between two requests of a connection.
        body_timeout_s, send_timeout_s: for a request's body to come in, and for a client to take a part of an answer.
        max_wait_s: whatever `?wait=` asks for, an answer comes by then.
        results_retention_s: an outcome of a session that was begun here, and that no trainer is connected to, is
            dropped after so long if it was neither acknowledged nor deleted.
        max_results_per_reply, max_reply_bytes: outcomes in one answer; the first one always fits.
        max_event_streams, event_buffer_events: listeners of `/v1/events`, and what each may lag behind.
        prorl_compat: serve the endpoints of the ProRL Agent server, too. `prorl_compat_token`: whether they ask for the
            token, which that server's clients do not send. `auto`: only where somebody else than this host's users
            could come: `host` is no loopback address, or sandboxes have a network. False is refused there.
            `prorl_compat_timeout_s`: its `/process` answers by then; the job goes on.
        data_sources: for `prorl_compat`, which handler works on an instance of a `data_source`.
    """

    enabled: bool = False
    host: str = "127.0.0.1"
    port: Port = 8701
    tls: bool = True
    max_connections: Count = 256
    max_body_bytes: Count = 64 * 1024 * 1024
    idle_timeout_s: Seconds = 15.0
    body_timeout_s: Seconds = 60.0
    send_timeout_s: Seconds = 60.0
    max_wait_s: SecondsOrZero = 600.0
    results_retention_s: Seconds = 86_400.0
    max_jobs_per_request: Count = 10_000
    max_results_per_reply: Count = 256
    max_reply_bytes: Count = 256 * 1024 * 1024
    max_event_streams: Amount = 16
    event_buffer_events: Count = 4096
    event_heartbeat_interval_s: Seconds = 15.0
    prorl_compat: bool = False
    prorl_compat_token: bool | Literal["auto"] = "auto"
    prorl_compat_timeout_s: Seconds = 7200.0
    data_sources: dict[str, str] = msgspec.field(
        default_factory=lambda: {"deepscaler": "math", "gsm8k": "math", "math": "math"}
    )


class LedgerConfig(_Config, frozen=True):
    """Where jobs and outcomes are kept, so that they outlive the node: an accepted job, and an outcome until it is
    acknowledged. One node at a time uses a folder, which is on a disk of its own machine.

    Attributes:
        dir: `auto`: `prorl-trio/NODE_ID` in $XDG_STATE_HOME (~/.local/state) if `node_id` is set, else nowhere. Empty:
            nowhere, and then nothing outlives the node.
        on_restart: what becomes of jobs that were not finished: `retry` runs them again, `fail` ends them.
        max_attempts: a job that is not finished, and of which so many attempts began, is not run again.
        log_bytes: of the database's write-ahead log, before it is copied into the database and begun anew.
        reserve_bytes: preallocated on the disk, for outcomes when it is full. An outcome takes twice its size of it.
        max_bytes: on the disk: of the database, its log and the reserve.
        tombstone_s: a job acknowledged less than that ago is not run again for the session that had it. Of the time in
            which the node runs: no clock that somebody sets makes it shorter.
        hot_outcome_bytes: of the outcomes that are not acknowledged, what stays in memory besides; the others are read
            from the disk when somebody takes them. Without a ledger all of them are in memory, see `admission`.
    """

    dir: str = "auto"
    on_restart: Literal["retry", "fail"] = "retry"
    max_attempts: Count = 5
    log_bytes: Annotated[int, msgspec.Meta(ge=64 * 1024)] = 64 * 1024 * 1024
    reserve_bytes: Amount = 128 * 1024 * 1024
    max_bytes: Count = 16 * 1024 * 1024 * 1024
    tombstone_s: SecondsOrZero = 3600.0
    hot_outcome_bytes: Amount = 256 * 1024 * 1024

    def folder(self, node_id: str, environ: Mapping[str, str]) -> Path | None:
        """Where the ledger goes; None: nowhere."""
        if self.dir != "auto":
            return Path(self.dir) if self.dir else None
        if not node_id:
            return None
        state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return Path(state) / "prorl-trio" / node_id


class ModelConfig(_Config, frozen=True):
    """The folder with the policy's `tokenizer.json`, `tokenizer_config.json` and chat template.

    `family` says how the model writes tool calls and reasoning; empty: it is told from the template.
    `template_options` are variables for the template, `{enable_thinking = false}` for Qwen3, say.
    `on_break` says what to do where the template alters earlier turns, as Qwen3's drops old reasoning at a new user
    message: `keep` the tokens as they were sampled, begin a new `segment`, or `fail` the rollout.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]
    family: str = ""
    template_options: dict[str, bool | int | float | str] = {}
    on_break: Literal["keep", "segment", "fail"] = "keep"


Strategy = Literal["least_in_flight", "round_robin", "assignments_ever", "static_split"]
"""`least_in_flight`: the fewest tasks that run there now. The others are there to be compared with, and blind to what
runs: `round_robin` takes the one that was taken longest ago, `assignments_ever` the one with the fewest tasks so far
(which sends everything to one that was added late), and `static_split` gives each an equal share in order of arrival,
full or not. Counts are divided by the weight of the backend, but by `round_robin` and `static_split`."""


class HealthConfig(_Config, frozen=True):
    """When a backend that fails is given no more rollouts, its rollouts move, and when it is taken in again.

    Attributes:
        interval_s: between two probes of one backend; 0 for no probes: only calls tell then, and one that is out stays
            out until it is added again.
        open_after_failures: of calls (with all their retries) since one was answered, and of probes since one was. A
            single call is enough if none was answered since it was taken in again.
        close_after_successes: in a row, of probes; up to eight times as many while the first call afterwards fails.
    """

    interval_s: SecondsOrZero = 15.0
    open_after_failures: int = 3
    close_after_successes: int = 2

    def __post_init__(self) -> None:
        for name in ("open_after_failures", "close_after_successes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.interval_s < 0:
            raise ValueError(f"interval_s must be >= 0, got {self.interval_s}")


class LoadConfig(_Config, frozen=True):
    """What is made of the load that engines report on their `/metrics`; nothing for one that reports none.

    Attributes:
        interval_s: between two reports of one backend; 0 for none, and then nothing of this happens.
        skew_margin_s, skew_ratio: a rollout moves to another backend, at most once a turn, when its wait here would be
            more than `skew_margin_s + skew_ratio * (wait there + time to read its prefix there)`. See `inference.load`.
        max_kv_usage: of the KV cache, by running requests. Above it, or when requests lost their place in the cache,
            the backend gets no more rollouts than `decrease_factor` of those it has, but at least `min_tasks`. While it
            is below, the limit grows by `increase_tasks` a report, up to `max_tasks_per_backend`. 0: never.
    """

    interval_s: SecondsOrZero = 2.0
    skew_margin_s: SecondsOrZero = 2.0
    skew_ratio: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 1.5
    max_kv_usage: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95
    decrease_factor: float = 0.8
    increase_tasks: int = 1
    min_tasks: int = 4

    def __post_init__(self) -> None:
        for name in ("interval_s", "skew_margin_s", "max_kv_usage"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("skew_ratio", "increase_tasks", "min_tasks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.decrease_factor < 1:
            raise ValueError(f"decrease_factor must be above 0 and below 1, got {self.decrease_factor}")


class BackendConfig(_Config, frozen=True):
    """LLM backends known at the start; more may be added while running.

    `max_tasks_per_backend`: rollouts that have a backend at the same time, 0 for no limit of its own (`run_workers` is
    one for all backends). A rollout waits for one with room for `lease_timeout_s`, charged to no budget.

    `engine`: what they are: `vllm`, `sglang` (tested against a look-alike only), `prorl` (a trainer's own, as the ProRL
    Agent server knows it: `POST /generate` with `prompt_ids`), or `auto`, which asks each.
    `max_model_len`: the longest context, in tokens, of engines that do not say, which is `prorl` alone; 0: what the
    model's config.json has as `max_position_embeddings`.
    `weights`: shares of the rollouts, by URL: one of weight 2 gets twice as many as one of 1, which others have.
    `required`: refuse to start when a backend does not pass its probe; otherwise it is `down`, and joins when it does.
    `slice_tokens`: completions are answered in slices, the first of so many tokens, each further one as long as all
    before it: one that a time-out, a lost connection or a pause cuts is continued from the slices it has. A few are
    streamed, to learn an engine's pace, and all those that might take half of `request_timeout_s`. 0: in one piece,
    and what is cut is sampled again, which favours short completions.
    `stream`: have all of them sent token by token: nothing is lost then when one is cut, also where the engine cannot
    answer an abort with what it has; each token costs the node, and the engine, ten times the CPU.
    `request_timeout_s`: for each slice; a stream goes on from what it has then.

    `strategy`: which backend a rollout goes to; all but `least_in_flight` are there to be compared with.
    `health`: when one that fails is given no more rollouts, and its rollouts move.
    `load`: when a rollout moves off one that has too much to do, and how many rollouts one takes.
    """

    urls: list[str] = []
    weights: dict[str, float] = {}
    engine: Literal["auto", "vllm", "sglang", "prorl"] = "auto"
    max_model_len: Amount = 0
    stream: bool = False
    slice_tokens: Amount = 256
    required: bool = False
    probe_timeout_s: Seconds = 60.0
    request_timeout_s: Seconds = 600.0
    max_connections_per_backend: Count = 512
    max_tasks_per_backend: Amount = 0
    lease_timeout_s: SecondsOrZero = 900.0
    strategy: Strategy = "least_in_flight"
    health: HealthConfig = HealthConfig()
    load: LoadConfig = LoadConfig()

    def __post_init__(self) -> None:
        for url, weight in self.weights.items():
            if url not in self.urls:
                raise ValueError(f"weights: {url} is not among the urls")
            if not 0 < weight < float("inf"):
                raise ValueError(f"weights: that of {url} must be > 0, got {weight}")


class SandboxConfig(_Config, frozen=True):
    """`auto` takes apptainer, then bubblewrap, whichever passes its probe first. `process` isolates nothing.

    Sandboxes are started in advance where they are in demand: at most `max_warm`, 0 for none, and `max_warm_per_image`
    of one image; one that nobody took for `max_warm_idle_s` is ended.
    """

    provider: Literal["auto", "apptainer", "bubblewrap", "process"] = "auto"
    image: str = "host"
    packages: tuple[str, ...] = ()
    """Of those installed beside the node, what tools find in the image `host` besides the promised ones."""
    network: bool = False
    fakeroot: bool = False
    """The tools are root in there, so that they can install packages. apptainer only."""
    start_timeout_s: Seconds = 60.0
    max_concurrent_starts: Count = 4
    max_concurrent_starts_per_image: Count = 4
    max_warm: Amount = 8
    max_warm_per_image: Amount = 8
    max_warm_idle_s: SecondsOrZero = 120.0
    limits: SandboxLimits = SandboxLimits()
    runtime_dir: str = ""
    """Node-local folder for control sockets. Empty: a private one below the system's temporary folder."""


class StagesConfig(_Config, frozen=True):
    """Workers of each stage, and how many jobs may wait for each. A full INIT queue rejects submissions; a full RUN or
    EVAL queue holds the stage before it up.

    Of the handlers that want a fresh sandbox for the evaluation, `max_refreshing` may start it while RUN goes on.
    """

    init_workers: Count = 4
    run_workers: Count = 32
    eval_workers: Count = 4
    init_queue: Count = 10_000
    ready_queue: Count = 16
    eval_queue: Count = 1_000
    max_refreshing: Count = 8


class AdmissionConfig(_Config, frozen=True):
    """What a node holds before it rejects jobs, besides `stages.init_queue`: of all sessions, and of one.

    `live` jobs have no outcome yet; `undelivered` outcomes are not acknowledged. Which limit it was, and when there
    will probably be room, is in the rejection.

    Sessions share the workers: each has the share of its weight, as long as it has jobs waiting. `session_weights` are
    those by session id that are not 1, from 0.01 to 100.
    """

    session_weights: dict[str, float] = {}
    max_queued_per_session: Count = 10_000
    max_live: Count = 20_000
    max_live_per_session: Count = 20_000
    max_undelivered: Count = 200_000
    max_undelivered_bytes: Count = 16 * 1024 * 1024 * 1024

    def __post_init__(self) -> None:
        for session_id, weight in self.session_weights.items():
            if not MIN_SESSION_WEIGHT <= weight <= MAX_SESSION_WEIGHT:
                raise ValueError(
                    f"session_weights: that of {session_id!r} must be {MIN_SESSION_WEIGHT:g} to "
                    f"{MAX_SESSION_WEIGHT:g}, got {weight:g}"
                )

    def weight_of(self, session_id: str) -> float:
        """Of a session's jobs, against those of the others."""
        return self.session_weights.get(session_id, 1.0)


class BudgetConfig(_Config, frozen=True):
    """Default seconds per stage of a job, for all stages together, and for the policy and its tools; a job may ask for
    others. Queue time is not charged. See `models.Budgets`."""

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


class AgentConfig(_Config, frozen=True):
    """Limits of the turn loop.

    `max_trajectory_tokens`: of each segment: prompt plus everything after it; 0 takes the backend's context length.
    What tools return is cut to the room that is left, head and tail kept, with a note of how many tokens were left out;
    where there is no room for that, the loop ends with `context_budget`.
    `max_nudges`: how often a turn without a tool call is answered by a reminder before the loop ends.
    `max_observation_chars`: a longer tool result is cut in the middle.
    `stop_at_tool_call`: stop the engine as soon as a tool call is complete. What the policy would have said after it is
    not sampled: not its end of turn either, nor a second call. It is for policies that make up a call's result and talk
    on; one that ends its turn there saves one token. Tokens are then streamed, which costs the node some 60 us of CPU
    each, in place of 2.
    `max_staleness`: policy updates that may lie between the first sampled token of a trajectory and the newest weights,
    for jobs that do not say; nothing: any number. See `models.JobSpec`.
    `rollouts_per_update`: rollouts of a session that its trainer takes from this node for one policy update, at least.
    Of jobs with a bound no more begin than it will have taken before they are too stale: `(max_staleness + 1) *
    rollouts_per_update` that run, or ended well and are not yet counted as taken, as so many are by each update. The
    others wait in their queues, oldest first, charged to no budget; those of priority `eval` do not. A figure below
    what an update really takes makes the trainer wait for ever. 0: no limit, and what becomes too stale fails.
    """

    stop_at_tool_call: bool = False
    max_staleness: Amount | None = None
    rollouts_per_update: Amount = 0
    max_trajectory_tokens: Amount = 0
    max_nudges: Amount = 1
    tool_timeout_s: Seconds = 30.0
    max_observation_chars: Count = 8_000

    def staleness_bound(self, spec: JobSpec) -> int | None:
        """`max_staleness` of a job: its own, or the node's; None: it has none."""
        return self.max_staleness if spec.max_staleness is None else spec.max_staleness


class ScoringConfig(_Config, frozen=True):
    """What a scoring process may use. An answer is the policy's text: it may be made to eat all there is.

    Attributes:
        cpu_s: CPU time of one call.
        memory_bytes: of private memory.
        stack_bytes: what deep nesting fills.
        max_processes: processes and threads that scorers may add to those that the node's user has; root has no limit.
        max_file_bytes: of one file.
    """

    cpu_s: Annotated[int, msgspec.Meta(ge=1)] = 10
    memory_bytes: Annotated[int, msgspec.Meta(ge=256 * 1024 * 1024)] = 1024 * 1024 * 1024
    stack_bytes: Annotated[int, msgspec.Meta(ge=1024 * 1024)] = 16 * 1024 * 1024
    max_processes: Count = 256
    max_open_files: Annotated[int, msgspec.Meta(ge=64)] = 256
    max_file_bytes: Amount = 64 * 1024 * 1024


class ArenaConfig(_Config, frozen=True):
    """Memory for the tokens of live and undelivered trajectories, which trainers on the same host can map.

    A rollout starts when there is room for the longest trajectory it can have. One that waited `room_timeout_s` for it,
    which no budget is charged for, goes on in the node's private memory.

    Attributes:
        size_bytes: 0: 1 GiB, or a tenth of the memory if that is less. Committed as it is written.
        shared_bytes: of outcomes that wait for trainers who map them; more are delivered as frames. 0: half of it.
        max_readers: trainers who map it at once; further ones are sent frames.
    """

    enabled: bool = True
    size_bytes: Amount = 0
    shared_bytes: Amount = 0
    room_timeout_s: SecondsOrZero = 60.0
    max_readers: Count = MAX_ARENA_READERS


class MonitoringConfig(_Config, frozen=True):
    """What the node says of itself.

    `stall_warn_s`: a longer pass of the event loop, in which it answers nobody, is logged with the task's name.
    `stall_dump_after_s`: log the loop's stack while a pass lasts longer, from a thread of its own; 0 never does.
    """

    stall_warn_s: Seconds = 0.25
    stall_dump_after_s: SecondsOrZero = 0.0


class TelemetryConfig(_Config, frozen=True):
    """OpenTelemetry: spans go to `otlp_endpoint` (`http://collector:4318/v1/traces`); empty turns it off."""

    otlp_endpoint: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^/\s]+\S*)?\Z")] = ""
    service_name: str = "prorl-trio"
    max_queued_spans: Count = 8192


class NodeConfig(_Config, frozen=True):
    """Everything one node needs.

    `node_id` is its name, also of its folder in `ledger.dir`; empty: made of host and process.
    A job in a stage to which nothing happens for `stuck_after_s` is shown as stuck; its budgets end it.
    `on_hangup`: at SIGHUP the node drains, or reads its configuration again; `auto`: it drains if it was started from a
    terminal, which is gone then.
    """

    model: ModelConfig
    node_id: Annotated[str, msgspec.Meta(pattern=NODE_ID)] = ""
    listen: ListenConfig = ListenConfig()
    rest: RestConfig = RestConfig()
    ledger: LedgerConfig = LedgerConfig()
    backends: BackendConfig = BackendConfig()
    sandbox: SandboxConfig = SandboxConfig()
    stages: StagesConfig = StagesConfig()
    admission: AdmissionConfig = AdmissionConfig()
    budgets: BudgetConfig = BudgetConfig()
    agent: AgentConfig = AgentConfig()
    scoring: ScoringConfig = ScoringConfig()
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
    return read_toml(path, NodeConfig)
