"""The load of an engine, read from its metrics page by the names that different versions gave it. No I/O."""

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
"""SGLang says no better: its time in the queue counts, too, so that a prefix seems dearer than it is."""

_NAMES: Final = (*_RUNNING, *_WAITING, *_KV_USAGE, *_PREEMPTIONS, *_COMPUTED, *_PROMPT, *_CACHED, *_PREFILL_S)
MAX_VALUE: Final = 1e15
"""The largest sample that is believed. What is larger, negative or no number is not."""
MAX_LINE_BYTES: Final = 16 * 1024
"""A longer one is not read."""

_STARTS: Final = tuple(f"{name}{end}".encode() for name in _NAMES for end in "{ ")
_SAMPLE: Final = re.compile(rb"([^{ ]+)(?:\{.*\})? +([-+0-9.eE]+)")


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load of an engine at one moment. None: this engine does not say.

    Attributes:
        running, waiting: requests in the batch, and those that wait to be.
        kv_usage: share of the KV cache that running requests hold, 0 to 1; of several engines, the fullest one's.
        preemptions_total: requests that lost their place in the cache, since the start.
        prefill_tokens_total, prefill_s_total: prompt tokens that were not cached, and what requests spent on them.
    """

    running: int
    waiting: int
    kv_usage: float | None = None
    preemptions_total: float | None = None
    prefill_tokens_total: float | None = None
    prefill_s_total: float | None = None


class LoadReader:
    """A reader of a page in Prometheus' text format as it comes: one of many engines behind one server has megabytes.

    Samples of one name (engines behind one server) are added up.
    """

    def __init__(self) -> None:
        self._samples: defaultdict[str, list[float]] = defaultdict(list)
        self._rest = b""

    def feed(self, received: bytes) -> bool:
        """Take a piece of the page. False: it is never enough."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(_STARTS):
                self._take(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b"#"  # so that what comes of it is a comment
        return False

    def load(self) -> LoadReport | None:
        """Return what the page says, once all of it was fed; None where it does not say what runs and what waits."""
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
