"""An estimate from an engine's load: how long a call would wait there, and what a prefix costs to read again. Pure.

A call waits `waiting * service_s / running` seconds: by Little's law, `running` calls that take `service_s` each leave
at the rate `running / service_s`, and `waiting` are ahead. What is measured is how long calls take from being sent to
the answer; of that, `running / (running + waiting)` is service. The rest is wait, which, unlike the service, is another
one as soon as tasks come or go. A task that moves has its prefix read again: `prefix tokens / prefill rate` seconds. So
it moves when

    wait here > skew_margin_s + skew_ratio * (wait there + prefix there)

and the margin and the ratio keep it from moving back and forth over small or short differences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prorl_trio.inference.engines.load_report import LoadReport

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
