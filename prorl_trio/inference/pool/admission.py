"""Admission of completions: decides whether they may start, and tracks completions in flight. No I/O of its own."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import trio

from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence

    from prorl_trio.inference.engines.protocol import Completion, EngineClient, EngineInfo
    from prorl_trio.types.model_facts import TokenizerSample


PAUSED = "backends paused"
"""Displayed as the reason why a job waits for admission."""

Waiting = Callable[[str], AbstractContextManager[None]]
"""A context entered during a wait; its argument names the awaited event."""

logger = logging.getLogger(__name__)


class AnotherModel(BackendError):
    """The engine serves another model than the node's; not retryable."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class ModelProof:
    """Compares the tokenizers of engines with the node's. Logs one warning for each engine without tokenizer endpoint.

    It cannot detect weights of another model with the same tokenizer, because their tokens mean the same.
    """

    def __init__(self, sample: TokenizerSample) -> None:
        self._sample = sample
        self._unproven = set[str]()

    async def prove(self, client: EngineClient, info: EngineInfo, *, timeout_s: float) -> None:
        """Compare the tokenizer of the engine described by `info`, within `timeout_s` per request.

        Raises:
            AnotherModel: the engine's ids for a text differ from the node's tokenizer.
            BackendError: the engine cannot be reached.
        """
        sample = self._sample
        ids = await client.tokenize(sample.text, timeout_s=timeout_s)
        if ids is None:
            if info.url not in self._unproven:
                logger.warning(
                    "backend %s: the engine does not offer its tokenizer, so there is no proof that it serves the "
                    "model of this node (%s); token ids beyond that model's vocabulary fail their turn",
                    info.url,
                    sample.model,
                )
            self._unproven.add(info.url)
            return
        if ids != sample.text_ids:
            raise self._another(info, sample.text_ids, ids)
        ids = await client.tokenize(sample.control, timeout_s=timeout_s)
        if ids == sample.control_ids:
            return
        # Some tokenizers never parse control tokens in text (Mistral's own); these can still render them.
        if await client.detokenize(sample.control_ids, timeout_s=timeout_s) != sample.control:
            raise self._another(info, sample.control_ids, ids or [])

    def _another(self, info: EngineInfo, ours: Sequence[int], theirs: Sequence[int]) -> AnotherModel:
        at = next(
            (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        node, engine = list(ours[at : at + 4]), list(theirs[at : at + 4])
        return AnotherModel(
            f"{info.url}: it serves {info.model_folder or info.model}, whose tokenizer is not that of this node's "
            f"model, {self._sample.model}: from position {at} of a text on, it has the ids {engine}, and the node's "
            f"has {node}. Set [model] path to the folder of the model that the engine was started with, or start the "
            "engine with the node's model"
        )


@contextmanager
def unseen(_what: str) -> Iterator[None]:
    """Do not display a wait."""
    yield


class Admission:
    """Admits every completion of a pool; a policy update closes it."""

    def __init__(self) -> None:
        self._closed = False
        self.closings = 0
        """The number of times it was closed."""
        self._calls: dict[trio.CancelScope, str] = {}
        self._opened = trio.lowlevel.ParkingLot()
        self._idle = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<Admission {'closed' if self._closed else 'open'}, {len(self._calls)} in flight>"

    @property
    def closed(self) -> bool:
        """Return True while no completion may begin."""
        return self._closed

    @property
    def opening(self) -> int | None:
        """Return the number of the current interval between two pauses; None during a pause."""
        return None if self._closed else self.closings

    @property
    def waiting(self) -> int:
        """Return the number of completions waiting for admission."""
        return len(self._opened)

    def in_flight(self) -> Counter[str]:
        """Return the number of running completions by backend url."""
        return Counter(self._calls.values())

    def statistics(self) -> dict[str, object]:
        """Return the live state, encodable."""
        return {"paused": self._closed, "waiting": self.waiting, "completions_in_flight": len(self._calls)}

    def close(self) -> None:
        """Stop admitting completions. Idempotent."""
        self.closings += not self._closed
        self._closed = True

    def open(self) -> None:
        """Admit completions, including all waiting ones. Idempotent."""
        self._closed = False
        self._opened.unpark_all()

    def abort(self, spared: frozenset[str] = frozenset()) -> None:
        """Cancel the calls in flight, which makes their engines abort; they are repeated after the reopening.

        Calls to the `spared` urls are not cancelled.
        """
        for scope, url in self._calls.items():
            if url not in spared:
                scope.cancel()

    async def wait_idle(self) -> None:
        """Return when no completion is in flight. Useful only while admission is closed."""
        await trio.lowlevel.checkpoint()
        while self._calls:
            await self._idle.park()

    async def run(
        self,
        place: Callable[[], str],
        call: Callable[[], Awaitable[Completion | None]],
        waiting: Waiting = unseen,
    ) -> Completion:
        """Call `call` as soon as it is admitted, and again until its completion is complete.

        It is called again if a pause or the engine aborted it for any reason, or if it returned None because more
        tokens are needed.

        Before each call, once admitted, `place` returns the url of the backend for the call. `waiting(PAUSED)` is
        entered during the wait for admission. Exceptions of `call` and cancellation propagate.
        """
        while True:
            if self._closed:
                with waiting(PAUSED):
                    while self._closed:
                        await self._opened.park()
            url = place()
            with trio.CancelScope() as scope:
                self._calls[scope] = url
                try:
                    completion = await call()
                    if completion is not None and completion.finish_reason != "abort":
                        return completion
                finally:
                    del self._calls[scope]
                    if not self._calls:
                        self._idle.unpark_all()
