"""The load of an engine, read from its metrics page under the names used by different versions. No I/O."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

import msgspec

_RUNNING: Final = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING: Final = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_KV_USAGE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_PREEMPTIONS: Final = ("vllm:num_preemptions_total",)
_COMPUTED: Final = ("vllm:request_prefill_kv_computed_tokens_sum",)
_PROMPT: Final = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_CACHED: Final = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total")
_PREFILL_S: Final = ("vllm:request_prefill_time_seconds_sum", "sglang:time_to_first_token_seconds_sum")
"""SGLang offers only a time that includes queueing, so a prefix appears more expensive than it is."""

_NAMES: Final = (*_RUNNING, *_WAITING, *_KV_USAGE, *_PREEMPTIONS, *_COMPUTED, *_PROMPT, *_CACHED, *_PREFILL_S)
MAX_VALUE: Final = 1e15
"""The largest accepted sample. Larger, negative and non-numeric samples are ignored."""
MAX_LINE_BYTES: Final = 16 * 1024
"""Longer lines are ignored."""

_STARTS: Final = tuple(f"{name}{end}".encode() for name in _NAMES for end in "{ ")
_SAMPLE: Final = re.compile(rb"([^{ ]+)(?:\{.*\})? +([-+0-9.eE]+)")


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load of an engine at one moment. None: the engine does not report the value.

    Attributes:
        running, waiting: requests in the batch, and requests waiting for it.
        kv_usage: share of the KV cache held by running requests, 0 to 1; the maximum over several engines.
        preemptions_total: requests that were evicted from the cache, since the start.
        prefill_tokens_total, prefill_s_total: uncached prompt tokens, and the prefill time of requests.
    """

    running: int
    waiting: int
    kv_usage: float | None = None
    preemptions_total: float | None = None
    prefill_tokens_total: float | None = None
    prefill_s_total: float | None = None


class LoadReader:
    """An incremental reader of a page in Prometheus' text format. With many engines behind one server it has megabytes.

    Samples of one name (from several engines behind one server) are summed.
    """

    def __init__(self) -> None:
        self._samples: defaultdict[str, list[float]] = defaultdict(list)
        self._rest = b""

    def feed(self, received: bytes) -> bool:
        """Process a piece of the page. Always returns False, so that reading continues."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(_STARTS):
                self._take(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b"#"  # makes the rest of the line a comment
        return False

    def load(self) -> LoadReport | None:
        """Return the load after the whole page was fed; None if the page does not report running and waiting ones."""
        self.feed(b"\n")
        running, waiting, computed = self._total(_RUNNING), self._total(_WAITING), self._total(_COMPUTED)
        if running is None or waiting is None:
            return None
        if computed is None and (prompt := self._total(_PROMPT)) is not None:
            computed = max(0.0, prompt - (self._total(_CACHED) or 0.0))
        return LoadReport(
            running=round(running),
            waiting=round(waiting),
            kv_usage=next((max(self._samples[name]) for name in _KV_USAGE if name in self._samples), None),
            preemptions_total=self._total(_PREEMPTIONS),
            prefill_tokens_total=computed,
            prefill_s_total=self._total(_PREFILL_S),
        )

    def _take(self, line: bytes) -> None:
        if len(line) > MAX_LINE_BYTES or (match := _SAMPLE.match(line)) is None:
            return
        try:
            value = float(match[2])
        except ValueError:
            return
        if 0 <= value < MAX_VALUE:
            self._samples[match[1].decode()].append(value)

    def _total(self, names: tuple[str, ...]) -> float | None:
        return next((sum(self._samples[name]) for name in names if name in self._samples), None)
