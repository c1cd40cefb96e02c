"""A registered backend: its engine, its state, its health, its load, and how many tasks it may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal
from typing import TYPE_CHECKING
from typing import TYPE_CHECKING, Literal
import msgspec
from prorl_trio.inference.pool.control import EngineControl
from prorl_trio.inference.pool.load import LoadEstimate
from prorl_trio.inference.pool.pace import Pace

if TYPE_CHECKING:
    from prorl_trio.config import HealthConfig
    from prorl_trio.config import LoadConfig
    from prorl_trio.inference.engines.protocol import EngineClient, EngineInfo
    from prorl_trio.inference.pool.versions import VersionOrder



BackendState = Literal["active", "draining", "removed", "down"]
"""`active` takes tasks. `draining` takes none and stays listed. `removed` takes none and goes with its last lease.
`down`: expected, and not registered before it passes its probe."""

MAX_DOUBLINGS: Final = 3
"""The most doublings of the probes that close it, while the first call after each recovery fails."""

BreakerState = Literal["closed", "open", "half_open"]
"""`closed`: takes tasks. `open`: failed too often, and takes none. `half_open`: answers probes again, but not yet often
enough to be given tasks."""


class CircuitBreaker:
    """The circuit breaker of one backend.

    What a call finds counts only while closed: those that end late say nothing of a recovery.

    A good probe makes up for bad ones, not for failed calls: there are engines that answer the one and not the other.
    Each of these would draw all tasks, as it has the least to do. So when the first call after a recovery fails, it
    opens at once, and closes after twice as many good probes as the last time.

    Attributes:
        policy: what it goes by; another one holds from the next call or probe on.
        openings: how often it opened.
    """

    def __init__(self, policy: HealthConfig) -> None:
        self.state: BreakerState = "closed"
        self.policy = policy
        self.openings = 0
        self._failed_calls = 0
        """Since the last good one, while closed. So with probes."""
        self._failed_probes = 0
        self._good_probes = 0
        """In a row, while half open."""
        self._on_trial = False
        """No call was answered since it closed."""
        self._failed_trials = 0
        """In a row."""

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.state}, {self._failed_calls + self._failed_probes} failures>"

    @property
    def closed(self) -> bool:
        """Return True if the backend may be given tasks."""
        return self.state == "closed"

    def adopt(self, policy: HealthConfig) -> None:
        """Go by another policy from the next call or probe on."""
        self.policy = policy

    def call_ended(self, *, ok: bool, began: int | None = None) -> None:
        """Count a completion that was answered, or given up.

        `began`: the `openings` as it was sent; it does not count if there was another one since.
        """
        if not self.closed or began not in (None, self.openings):
            return
        if ok:
            self._failed_calls = self._failed_probes = self._failed_trials = 0
            self._on_trial = False
            return
        self._failed_calls += 1
        self._failed_trials += self._on_trial
        self._open_if_due()

    def probed(self, *, ok: bool) -> None:
        """Count a probe that was answered as it must be, or not."""
        if self.closed:
            self._failed_probes = 0 if ok else self._failed_probes + 1
            self._open_if_due()
        elif not ok:
            self.state, self._good_probes = "open", 0
        else:
            self.state = "half_open"
            self._good_probes += 1
            if self._good_probes >= self.policy.close_after_successes << min(self._failed_trials, MAX_DOUBLINGS):
                self._close(on_trial=True)

    def trip(self) -> None:
        """Open at once: it is known to be of no use."""
        self.openings += self.closed
        self.state, self._good_probes = "open", 0

    def reset(self) -> None:
        """Close it, as at first: it was just found fit by whoever added it."""
        self._failed_trials = 0
        self._close(on_trial=False)

    def _open_if_due(self) -> None:
        failures = self._failed_calls + self._failed_probes
        if failures >= self.policy.open_after_failures or (self._on_trial and self._failed_calls):
            self.trip()

    def _close(self, *, on_trial: bool) -> None:
        self.state, self._on_trial = "closed", on_trial
        self._failed_calls = self._failed_probes = 0


class ConcurrencyLimit:
    """The tasks that a backend may have: fewer by a factor when its KV cache is too full, more one by one when not.

    `tasks` is 0, for no limit, until the cache was too full for the first time.
    """

    def __init__(self) -> None:
        self.tasks = 0

    def adapt(self, policy: LoadConfig, *, pressed: bool, in_flight: int) -> None:
        """Lower the limit if `pressed`, else raise it if it is reached.

        A decrease is given the time to work: tasks beyond the limit stay till they end, and until it is kept there is
        no other. A limit that nobody runs into is not raised.
        """
        if pressed and (not self.tasks or in_flight <= self.tasks):
            self.tasks = max(policy.min_tasks, int(in_flight * policy.decrease_factor))
        elif not pressed and self.tasks and in_flight >= self.tasks:
            self.tasks += policy.increase_tasks

    def within(self, max_tasks: int) -> int:
        """Return the limit in force, where `max_tasks` is the configured one (0 for none)."""
        return min(self.tasks or max_tasks, max_tasks or self.tasks)


class BackendStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one backend.

    Attributes:
        url, state: see `Backend`.
        in_flight, assigned_total: tasks that it has now, and all that it ever took.
        suspended: it is not healthy, and gets no tasks whatever its state.
        weight: its share of the tasks beside others.
        max_tasks: its limit now; 0 for none.
        error: why it is `down` or suspended.
        policy_version: what its next completions are recorded under; empty before it was reached.
        engine_running, engine_waiting, kv_usage: what the engine last reported; None: nothing.
        wait_s, prefill_tokens_per_s: see `LoadEstimate`; None: not known.
    """

    url: str
    state: BackendState
    in_flight: int
    assigned_total: int
    suspended: bool = False
    weight: float = 1.0
    max_tasks: int = 0
    error: str = ""
    policy_version: str = ""
    engine_running: int | None = None
    engine_waiting: int | None = None
    kv_usage: float | None = None
    wait_s: float | None = None
    prefill_tokens_per_s: float | None = None


class Backend:
    """A registration of a backend, with identity: adding the URL of a removed one makes another `Backend`.

    Its fields are changed by its own methods alone. Those that change what its rank among the others is made of are for
    `Placement` to call, which ranks it anew.

    Attributes:
        url, client: its name, and what it is called by.
        engine: what is known of it, and control of it.
        state, weight, max_tasks: as `Placement` has it; `max_tasks` 0 for no limit.
        in_flight, assigned_total: tasks that it has, and ever had.
        suspended: out of health: it takes no tasks, whatever its state; `why`.
        breaker, load, limit, pace: what its calls, probes and reports show.
    """

    def __init__(
        self,
        client: EngineClient,
        info: EngineInfo,
        health: HealthConfig,
        versions: VersionOrder,
        *,
        weight: float = 1.0,
        max_tasks: int = 0,
    ) -> None:
        """Register a backend that a probe found to be `info`. Raises ValueError: the weight is not above 0."""
        _check_weight(client.url, weight)
        self.url = client.url
        self.client = client
        self.engine = EngineControl(client, info, versions)
        self.state: BackendState = "active"
        self.weight = weight
        self.max_tasks = max_tasks
        self.in_flight = 0
        self.assigned_total = 0
        self.suspended = False
        self.why = ""
        self.breaker = CircuitBreaker(health)
        self.load = LoadEstimate()
        self.limit = ConcurrencyLimit()
        self.pace = Pace()
        self._held = False
        """It is paused, and not by us."""

    def __repr__(self) -> str:
        suspended = ", suspended" if self.suspended else ""
        return f"<Backend {self.url}: {self.state}{suspended}, {self.in_flight} in flight>"

    @property
    def info(self) -> EngineInfo:
        """Return the last findings about its engine."""
        return self.engine.info

    @property
    def accepting(self) -> bool:
        """Return True if it may be given tasks, as far as there is room: it is active and not suspended."""
        return self.state == "active" and not self.suspended

    @property
    def full(self) -> bool:
        """Return True if it has as many tasks as it may."""
        return self.in_flight >= self.max_tasks > 0

    def statistics(self) -> BackendStatistics:
        """Return a snapshot."""
        return BackendStatistics(
            url=self.url,
            state=self.state,
            in_flight=self.in_flight,
            assigned_total=self.assigned_total,
            suspended=self.suspended,
            weight=self.weight,
            max_tasks=self.max_tasks,
            error=self.why,
            policy_version=self.info.policy_version,
            **self.load.figures(),
        )

    # ------------------------------------------------------------ for `Placement`

    def activate(self, weight: float | None) -> None:
        """Take tasks from now on, with another weight if one is given."""
        if weight is not None:
            self.weigh(weight)
        self.state = "active"

    def retire(self, state: Literal["draining", "removed"]) -> None:
        """Take no tasks any more."""
        self.state = state

    def weigh(self, weight: float) -> None:
        """Change its share of the tasks beside others. Raises ValueError: it is not above 0."""
        _check_weight(self.url, weight)
        self.weight = weight

    def limit_tasks(self, max_tasks: int) -> None:
        """Change how many tasks it may have."""
        self.max_tasks = max_tasks

    def suspend(self, *, suspended: bool) -> None:
        """Take it out of health, or back in."""
        self.suspended = suspended

    def count(self, change: Literal[-1, 1]) -> None:
        """Count a task that came or went."""
        self.in_flight += change
        self.assigned_total += change > 0

    # ------------------------------------------------------------ health and load

    @property
    def well(self) -> bool:
        """It is fit to be given tasks, as its calls and probes say."""
        return self.breaker.closed and not self._held

    def added(self, info: EngineInfo) -> None:
        """Begin anew, as whoever added it just found it fit: what was wrong before does not count."""
        self.breaker.reset()
        self._held, self.why = False, ""
        self.engine.added(info)

    def blame(self, why: str) -> None:
        """Say why it is not well, where it is not."""
        self.why = "" if self.well else why or self.why

    def probe_answered(self, found: EngineInfo, since: EngineInfo) -> str:
        """Take the answer of a probe that began when `since` was known. Returns what is wrong, or nothing."""
        self._held, why = False, ""
        if found.model != since.model:
            why = f"{self.url}: serves {found.model}, not {since.model}, now"
        elif self.engine.lost_weights(found, since):
            why = (
                f"{self.url}: has lost weights {since.label}: it was started again, or has others, of no name; "
                "move the weights there and resume, or add it again"
            )
            self.breaker.trip()
        else:
            self.engine.probed(found, since)
        self.breaker.probed(ok=not why)
        return why

    def probe_failed(self, *, held: bool) -> None:
        """Count a probe that was not answered as it must be; `held`: as somebody else has paused the engine."""
        self._held = held
        if not held:
            self.breaker.probed(ok=False)

    def forget_reports(self, *, load: bool) -> None:
        """Forget what its reports were the reason for: its own limit, and with `load` what they say of its load."""
        self.limit = ConcurrencyLimit()
        if load:
            self.load = LoadEstimate()


def _check_weight(url: str, weight: float) -> None:
    if not 0 < weight < float("inf"):
        raise ValueError(f"{url}: a weight must be > 0, got {weight}")
