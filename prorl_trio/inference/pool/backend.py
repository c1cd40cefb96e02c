"""A registered backend: its engine, its state, its health, its load, and how many tasks it may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from prorl_trio.inference.pool.control import EngineControl
from prorl_trio.inference.pool.pace import Pace

if TYPE_CHECKING:
    from prorl_trio.config import HealthConfig, LoadConfig
    from prorl_trio.inference.engines.load_report import LoadReport
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


# An estimate from an engine's load: how long a call would wait there, and what a prefix costs to read again. Pure.
#
# A call waits `waiting * service_s / running` seconds: by Little's law, `running` calls that take `service_s` each
# leave at the rate `running / service_s`, and `waiting` are ahead. What is measured is how long calls take from being
# sent to the answer; of that, `running / (running + waiting)` is service. The rest is wait, which, unlike the
# service, is another one as soon as tasks come or go. A task that moves has its prefix read again: `prefix tokens /
# prefill rate` seconds. So it moves when
#
#     wait here > skew_margin_s + skew_ratio * (wait there + prefix there)
#
# and the margin and the ratio keep it from moving back and forth over small or short differences.

CALL_WEIGHT = 0.1
"""The share of the latest call in the moving average of how long calls take."""
MIN_PREFILL_TOKENS = 256
"""Fewer than these since the last report tell nothing of the rate."""


class LoadEstimate:
    """An estimate for one backend. Without reports, nothing is estimated.

    Attributes:
        load: the last report; None: there is none, or it failed.
        pressed: the KV cache was too full at the last report, or requests lost their place in it since the one before.
        prefill_tokens_per_s: as a request sees it.
        service_s: how long calls from here took lately, without their wait.
    """

    def __init__(self) -> None:
        self.load: LoadReport | None = None
        self.pressed = False
        self.prefill_tokens_per_s: float | None = None
        self.service_s: float | None = None
        self._last: LoadReport | None = None
        self._came = 0

    def reported(self, load: LoadReport | None, max_kv_usage: float) -> None:
        """Take a report, or None: the engine failed to give one, and nothing is known of it now."""
        self.load, self._came = load, 0
        if load is None:
            return
        last, self._last = self._last, load
        self.pressed = (load.kv_usage or 0.0) > max_kv_usage or (
            last is not None and (load.preemptions_total or 0.0) > (last.preemptions_total or 0.0)
        )
        if load.prefill_tokens_total is None or load.prefill_s_total is None:
            return
        tokens, seconds = load.prefill_tokens_total, load.prefill_s_total
        if last is not None and last.prefill_tokens_total is not None and last.prefill_tokens_total <= tokens:
            tokens, seconds = tokens - last.prefill_tokens_total, seconds - (last.prefill_s_total or 0.0)
        if tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = tokens / seconds

    def call_ended(self, used_s: float) -> None:
        """Update `service_s` with a completion that took `used_s` seconds from being sent to its answer.

        Its share of service is estimated from the last report; without a report nothing changes.
        """
        if self.load is None:
            return
        running = max(1, self.load.running)
        service_s = used_s * running / (running + self.load.waiting)
        before_s = service_s if self.service_s is None else self.service_s
        self.service_s = before_s + CALL_WEIGHT * (service_s - before_s)

    def task_moved(self, change: int) -> None:
        """Count a task that came (1) or went (-1) since the last report, as one call more or less that waits here."""
        self._came += change

    @property
    def wait_s(self) -> float | None:
        """Return the seconds that a call sent now would wait; None: not known."""
        return None if self.load is None else self._wait_s(self.load, self._came, self.service_s)

    def entry_s(self, prefix_tokens: int, here: LoadEstimate) -> float | None:
        """Return what a call waits that comes from `here`, and whose prefix is not cached there. None: not known.

        Until something else is known: it is as fast as `here`, and if nobody waits there, as many can run.
        """
        rate = self.prefill_tokens_per_s or here.prefill_tokens_per_s
        if self.load is None or here.load is None or rate is None:
            return None
        room = 0 if self.load.waiting else max(0, here.load.running - self.load.running)
        wait_s = self._wait_s(
            self.load, min(self._came, 0) + max(self._came - room, 0), self.service_s or here.service_s
        )
        return None if wait_s is None else wait_s + prefix_tokens / rate

    @staticmethod
    def _wait_s(load: LoadReport, came: int, service_s: float | None) -> float | None:
        waiting = load.waiting + came
        if waiting <= 0:
            return 0.0
        return None if service_s is None else waiting * service_s / max(1, load.running)

    def figures(self) -> dict[str, Any]:
        """Return what `BackendStatistics` has of it."""
        figures: dict[str, Any] = {"wait_s": self.wait_s, "prefill_tokens_per_s": self.prefill_tokens_per_s}
        if self.load is not None:
            figures["engine_running"] = self.load.running
            figures["engine_waiting"] = self.load.waiting
            figures["kv_usage"] = self.load.kv_usage
        return figures


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
