"""The engine's load while a step waits for rollouts, read from its own metrics."""

from __future__ import annotations

import http.client
import re
import threading
from typing import TYPE_CHECKING, Final, Self
from urllib.request import urlopen

if TYPE_CHECKING:
    from types import TracebackType

INTERVAL_S: Final = 0.25
TIMEOUT_S: Final = 5.0
_RUNNING: Final = re.compile(r"^vllm:num_requests_running\{[^}]*\} ([\d.e+]+)", re.MULTILINE)
_SAMPLED: Final = re.compile(r"^vllm:generation_tokens_total\{[^}]*\} ([\d.e+]+)", re.MULTILINE)


class EngineLoad:
    """Polls the number of requests of a vLLM server four times a second during the block.

    Attributes:
        looks: number of answers. `busy`: answers with at least one request. `running`: sum of the requests.
        tokens: number of tokens sampled during the block, by the engine's count.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url}/metrics"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine load", daemon=True)
        self._first: float | None = None
        self.looks = 0
        self.busy = 0
        self.running = 0.0
        self.tokens = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(2 * TIMEOUT_S)

    def _watch(self) -> None:
        while True:
            over = self._over.wait(INTERVAL_S if self.looks else 0.0)
            try:
                with urlopen(self._url, timeout=TIMEOUT_S) as answer:
                    self._note(answer.read().decode(), over)
            except (OSError, http.client.HTTPException):  # these figures are optional
                pass
            if over:
                return

    def _note(self, text: str, last: bool) -> None:
        sampled = sum(map(float, _SAMPLED.findall(text)))
        self._first = sampled if self._first is None else self._first
        self.tokens = sampled - self._first
        if not last:
            running = sum(map(float, _RUNNING.findall(text)))
            self.looks += 1
            self.busy += running > 0
            self.running += running
