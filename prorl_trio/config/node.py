"""node.toml as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
import msgspec
from prorl_ipc.limits import SandboxLimits
from prorl_trio.config.quantities import (
    MAX_BYTES,
    MAX_OPEN_FILES,
    YEAR_S,
    BytesOrZero,
    Count,
    Processes,
    ProcessesOrZero,
    Seconds,
    SecondsOrZero,
)
from prorl_trio.config.table import Table
import os
from typing import TYPE_CHECKING, Final, Literal
from prorl_trio.config.quantities import Count, MessageBytes, Processes, Seconds
from prorl_trio.file_systems import read_regular
from prorl_trio.types.errors import ConfigError
from typing import TYPE_CHECKING, Annotated, Literal
from prorl_trio.config.quantities import Amount, Count, Seconds, Tokens
from typing import TYPE_CHECKING, Annotated, Final, Literal
from prorl_trio.config.backends import BackendConfig
from prorl_trio.config.fleet import FleetConfig
from prorl_trio.config.listen import MOVED, ListenConfig, RestConfig
from prorl_trio.config.monitoring import MonitoringConfig, TelemetryConfig
from prorl_trio.config.quantities import Count, SecondsOrZero
from prorl_trio.config.stages import AdmissionConfig, BudgetConfig, StagesConfig
from prorl_trio.config.storage import ArenaConfig, LedgerConfig
from prorl_trio.config.toml_file import read_toml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from prorl_trio.types.models import JobSpec
    from pathlib import Path




NODE_ID: Final = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?\Z"

OnHangup = Literal["auto", "drain", "reload"]

MAX_KEY_BYTES: Final = 64 * 1024

SearchBackendName = Literal["none", "bm25", "retrieve", "tavily"]


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
            least. Of jobs with a bound no more begin than it will have taken before they are too stale: `(max_staleness
            + 1) * rollouts_per_update` that run, or ended well and are not yet counted as taken, as so many are by each
            update. The others wait in their queues, oldest first, charged to no budget; those of priority `eval` do
            not. A figure below what an update really takes makes the trainer wait for ever. 0: no limit, and what
            becomes too stale fails.
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
