"""A registered backend: its engine, state, health, load, and task limit."""

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
"""`active` accepts tasks. `draining` accepts none and stays listed. `removed` accepts none and disappears with its last
lease. `down`: expected, and not registered before it passes its probe."""

MAX_DOUBLINGS: Final = 3
"""Limit on doublings of the probes required to close, while the first call after each recovery fails."""

BreakerState = Literal["closed", "open", "half_open"]
"""`closed`: accepts tasks. `open`: failed too often, and accepts none. `half_open`: answers probes again, but not yet
often enough to receive tasks."""


# Estimates from an engine's load: the waiting time of a call, and the cost of recomputing a prefix. Pure.
#
# A call waits `waiting * service_s / running` seconds. By Little's law, `running` calls of `service_s` each leave at
# the rate `running / service_s`, and `waiting` are ahead. The measured time of a call runs from sending to the answer;
# the share `running / (running + waiting)` is service. The rest is waiting time, which changes at once when tasks come
# or go. A task that moves has its prefix recomputed: `prefix tokens / prefill rate` seconds. So it moves when
#
#     wait here > skew_margin_s + skew_ratio * (wait there + prefix there)
#
# The margin and the ratio prevent it from oscillating over small or short differences.

CALL_WEIGHT = 0.1
"""The weight of the latest call in the moving average of call times."""
MIN_PREFILL_TOKENS = 256
"""With fewer tokens since the last report, the rate is not updated."""


class LoadEstimate:
    """A load estimate for one backend. Without reports nothing is estimated.

    Attributes:
        load: the last report; None if it is missing or failed.
        pressed: the KV cache was too full at the last report, or requests were evicted from it since the previous one.
        prefill_tokens_per_s: as a request sees it.
        service_s: recent duration of calls from here, without their waiting time.
    """

    def __init__(self) -> None:
        self.load: LoadReport | None = None
        self.pressed = False
        self.prefill_tokens_per_s: float | None = None
        self.service_s: float | None = None
        self._last: LoadReport | None = None
        self._came = 0

    def reported(self, load: LoadReport | None, max_kv_usage: float) -> None:
        """Process a report, or None if the engine failed to report, so that its load is now unknown."""
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
        """Update `service_s` with a completion that took `used_s` seconds from sending to the answer.

        Its share of service is estimated from the last report; without a report nothing changes.
        """
        if self.load is None:
            return
        running = max(1, self.load.running)
        service_s = used_s * running / (running + self.load.waiting)
        before_s = service_s if self.service_s is None else self.service_s
        self.service_s = before_s + CALL_WEIGHT * (service_s - before_s)

    def task_moved(self, change: int) -> None:
        """Count a task that came (1) or left (-1) since the last report, as one waiting call more or less."""
        self._came += change

    @property
    def wait_s(self) -> float | None:
        """Return the seconds that a call sent now would wait; None if unknown."""
        return None if self.load is None else self._wait_s(self.load, self._came, self.service_s)

    def entry_s(self, prefix_tokens: int, here: LoadEstimate) -> float | None:
        """Return the seconds that a call moved from `here` would wait, with its prefix not cached. None if unknown.

        Until measured, it is assumed to be as fast as `here`, and to run as many calls if no call waits there.
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
        """Return its fields of `BackendStatistics`."""
        figures: dict[str, Any] = {"wait_s": self.wait_s, "prefill_tokens_per_s": self.prefill_tokens_per_s}
        if self.load is not None:
            figures["engine_running"] = self.load.running
            figures["engine_waiting"] = self.load.waiting
            figures["kv_usage"] = self.load.kv_usage
        return figures


class CircuitBreaker:
    """The circuit breaker of one backend.

    Results of calls count only while it is closed, because calls that end late say nothing about a recovery.

    A good probe compensates for bad probes but not for failed calls, because some engines answer probes but fail calls.
    Such an engine would attract all tasks, because it has the lowest load. So when the first call after a recovery
    fails, the breaker opens at once, and closes only after twice as many good probes as last time.

    Attributes:
        policy: its settings; a new policy applies from the next call or probe.
        openings: number of times it opened.
    """

    def __init__(self, policy: HealthConfig) -> None:
        self.state: BreakerState = "closed"
        self.policy = policy
        self.openings = 0
        self._failed_calls = 0
        """Since the last success, while closed. The same applies to probes."""
        self._failed_probes = 0
        self._good_probes = 0
        """Consecutive, while half open."""
        self._on_trial = False
        """No call was answered since it closed."""
        self._failed_trials = 0
        """Consecutive."""

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.state}, {self._failed_calls + self._failed_probes} failures>"

    @property
    def closed(self) -> bool:
        """Return True if the backend may receive tasks."""
        return self.state == "closed"

    def adopt(self, policy: HealthConfig) -> None:
        """Apply another policy from the next call or probe on."""
        self.policy = policy

    def call_ended(self, *, ok: bool, began: int | None = None) -> None:
        """Count a completion that was answered or given up.

        `began`: the value of `openings` when it was sent; the call is ignored if the breaker has opened since.
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
        """Count a successful or failed probe."""
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
        """Open at once, because the backend is known to be unusable."""
        self.openings += self.closed
        self.state, self._good_probes = "open", 0

    def reset(self) -> None:
        """Close and reset it, because the backend was just added and found fit."""
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
    """The adaptive task limit of a backend: reduced by a factor when its KV cache is too full, else raised one by one.

    `tasks` is 0 (no limit) until the cache is too full for the first time.
    """

    def __init__(self) -> None:
        self.tasks = 0

    def adapt(self, policy: LoadConfig, *, pressed: bool, in_flight: int) -> None:
        """Lower the limit if `pressed`, else raise it if it is reached.

        A decrease needs time to take effect: tasks beyond the limit stay until they end, and the limit is not lowered
        again before it is met. A limit that is not reached is not raised.
        """
        if pressed and (not self.tasks or in_flight <= self.tasks):
            self.tasks = max(policy.min_tasks, int(in_flight * policy.decrease_factor))
        elif not pressed and self.tasks and in_flight >= self.tasks:
            self.tasks += policy.increase_tasks

    def within(self, max_tasks: int) -> int:
        """Return the effective limit; `max_tasks` is the configured limit (0 for none)."""
        return min(self.tasks or max_tasks, max_tasks or self.tasks)


class BackendStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one backend.

    Attributes:
        url, state: see `Backend`.
        in_flight, assigned_total: its current tasks, and all tasks it ever received.
        suspended: it is unhealthy and receives no tasks, whatever its state.
        weight: its relative share of the tasks.
        max_tasks: its current limit; 0 for none.
        error: why it is `down` or suspended.
        policy_version: the version recorded for its next completions; empty before first contact.
        engine_running, engine_waiting, kv_usage: the engine's last report; None if missing.
        wait_s, prefill_tokens_per_s: see `LoadEstimate`; None if unknown.
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
    """A registration of a backend, with identity: re-adding the URL of a removed backend creates another `Backend`.

    Only its own methods change its fields. Only `Placement` may call methods that affect the rank, because it must
    rerank the backend.

    Attributes:
        url, client: its name, and the client that calls it.
        engine: the known facts about the engine, and control of it.
        state, weight, max_tasks: as set by `Placement`; `max_tasks` 0 for no limit.
        in_flight, assigned_total: its current tasks, and all tasks it ever received.
        suspended: it is unhealthy and receives no tasks, whatever its state; `why` contains the reason.
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
        """Register a backend that a probe found to be `info`. Raises ValueError if the weight is not above 0."""
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
        """Another client has paused it."""

    def __repr__(self) -> str:
        suspended = ", suspended" if self.suspended else ""
        return f"<Backend {self.url}: {self.state}{suspended}, {self.in_flight} in flight>"

    @property
    def info(self) -> EngineInfo:
        """Return the results of the engine's last probe."""
        return self.engine.info

    @property
    def accepting(self) -> bool:
        """Return True if it may receive tasks within its limit: it is active and not suspended."""
        return self.state == "active" and not self.suspended

    @property
    def full(self) -> bool:
        """Return True if it has reached its task limit."""
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
        """Accept tasks from now on, with another weight if one is given."""
        if weight is not None:
            self.weigh(weight)
        self.state = "active"

    def retire(self, state: Literal["draining", "removed"]) -> None:
        """Stop accepting tasks."""
        self.state = state

    def weigh(self, weight: float) -> None:
        """Change its relative share of the tasks. Raises ValueError if it is not above 0."""
        _check_weight(self.url, weight)
        self.weight = weight

    def limit_tasks(self, max_tasks: int) -> None:
        self.max_tasks = max_tasks

    def suspend(self, *, suspended: bool) -> None:
        """Suspend it for bad health, or reinstate it."""
        self.suspended = suspended

    def count(self, change: Literal[-1, 1]) -> None:
        """Count a task that came or left."""
        self.in_flight += change
        self.assigned_total += change > 0

    # ------------------------------------------------------------ health and load

    @property
    def well(self) -> bool:
        """Return whether it may receive tasks, according to its calls and probes."""
        return self.breaker.closed and not self._held

    def added(self, info: EngineInfo) -> None:
        """Reset its health, because it was just added and found fit."""
        self.breaker.reset()
        self._held, self.why = False, ""
        self.engine.added(info)

    def blame(self, why: str) -> None:
        """Record why it is unhealthy, if it is."""
        self.why = "" if self.well else why or self.why

    def probe_answered(self, found: EngineInfo, since: EngineInfo) -> str:
        """Process the answer to a probe that began when `since` was known. Returns the problem, or an empty string."""
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
        """Count a failed probe; `held`: another client has paused the engine."""
        self._held = held
        if not held:
            self.breaker.probed(ok=False)

    def forget_reports(self, *, load: bool) -> None:
        """Forget the effects of its reports: its own limit and, with `load`, the load estimate."""
        self.limit = ConcurrencyLimit()
        if load:
            self.load = LoadEstimate()


def _check_weight(url: str, weight: float) -> None:
    if not 0 < weight < float("inf"):
        raise ValueError(f"{url}: a weight must be > 0, got {weight}")
