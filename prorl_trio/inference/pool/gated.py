"""Registered engines, and how each takes a pause and a resume of the pool."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import trio

from prorl_trio.inference.engines.answers import UNNAMED
from prorl_trio.inference.pool.health import Breaker
from prorl_trio.inference.pool.load import AdaptiveLimit, LoadEstimate
from prorl_trio.inference.pool.pace import Pace
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prorl_trio.config import HealthConfig
    from prorl_trio.inference.engines.engine import EngineClient, EngineInfo, PauseMode

__all__ = [
    "EngineAnswer",
    "GateReport",
    "GatedBackend",
    "RegisteredEngine",
    "Told",
    "close_engines",
    "load_engine",
    "tell_engine",
]

logger = logging.getLogger(__name__)

UNPAUSE_GRACE_S = 4.0
"""For an engine that is to go on before its client is closed."""


class WeightsOnTrial(NamedTuple):
    """Weights that an engine was told to load in a pause. `loaded`: it said that it has them."""

    folder: str
    timeout_s: float
    loaded: bool


class RegisteredEngine:
    """What a registered backend is called with. `paused`: by its own API, or it may be: no answer came. `held`: it is
    paused, and not by us. `why`: it is given no tasks. `weights`: what those of its version can be loaded from again,
    if that is known; `trial`: the ones it may have instead, until a resume announces them or takes them back."""

    def __init__(
        self, client: EngineClient, info: EngineInfo, health: HealthConfig, note_version: Callable[[str], None]
    ) -> None:
        """`note_version` is told of each version that is in force here and that no resume announced."""
        self._note_version = note_version
        self.client = client
        self.info = info
        self.weights = info.weights
        self.trial: WeightsOnTrial | None = None
        self.paused = False
        self.held = False
        self.why = ""
        self._control = trio.Lock()
        self.breaker = Breaker(health)
        self.load = LoadEstimate()
        self.limit = AdaptiveLimit()
        self.pace = Pace()

    def heard(self, label: str, since: EngineInfo) -> None:
        """It said what its weights are called, in answer to a call that was made when `since` was known of it.

        Weights that got another name without a resume of the pool are recorded under that from now on. One that has no
        name for them any more was started again: that is for the probe to judge, see `lost_weights`.
        """
        known = self.info
        if not label or (known.label, known.policy_version) != (since.label, since.policy_version):
            return
        if not known.label:
            self.info = msgspec.structs.replace(known, label=label)
        elif label not in (known.label, UNNAMED):
            self.info = msgspec.structs.replace(known, label=label, policy_version=label)
            self.weights = ""
            self._note_version(label)

    def probed(self, found: EngineInfo, since: EngineInfo) -> None:
        """A probe found it fit, begun when `since` was known. What the pool calls its weights stays."""
        self.heard(found.label, since)
        known = self.info
        self.info = msgspec.structs.replace(found, label=known.label, policy_version=known.policy_version)

    def lost_weights(self, found: EngineInfo, since: EngineInfo) -> bool:
        """Whether a probe, begun when `since` was known, shows that it was started again: its weights had a name, and
        have none now, so they are not those that tokens would be recorded under."""
        return found.label == UNNAMED and self.info.label == since.label and since.label not in ("", UNNAMED)

    async def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Have it stop sampling, if it offers that. Raises BackendError: it failed, and counts as paused."""
        async with self._control:
            self.paused = True
            self.paused = await self.client.pause(mode, timeout_s=timeout_s)

    async def load_weights(self, folder: str, timeout_s: float) -> bool:
        """Have it load weights on trial; False if it does not offer that. From then on it counts as paused.

        Raises:
            BackendError: it failed; they stay on trial, as it may have them all the same.
        """
        async with self._control:
            before = self.paused, self.trial
            self.paused, self.trial = True, WeightsOnTrial(folder, timeout_s, loaded=False)
            if await self.client.load_weights(folder, timeout_s=timeout_s):
                self.trial = self.trial._replace(loaded=True)
                return True
            self.paused, self.trial = before
            return False

    def announce(self, policy_version: str) -> None:
        """Record what it samples next under this version: its weights on trial are the policy's now."""
        if self.trial is not None:
            self.weights = self.trial.folder
        elif policy_version != self.info.policy_version:  # somebody else has moved them
            self.weights = ""
        self.trial = None
        self.info = msgspec.structs.replace(self.info, policy_version=policy_version)

    async def unpause(self, timeout_s: float) -> None:
        """Resume it if it was paused here, also if it is just being told to pause: then after that. One that has
        weights on trial gets its former ones first, in the time that it had for those.

        Raises:
            BackendError: it failed, and counts as paused.
        """
        async with self._control:
            if self.trial is not None:
                await self._take_back(self.trial)
                self.trial = None
            if self.paused:
                await self.client.resume(timeout_s=timeout_s)
                self.paused = False

    async def label(self, policy_version: str, timeout_s: float) -> str:
        """Tell it what its weights are called from now on. Why it failed, or nothing."""
        label, error = "", ""
        try:
            if await self.client.label_weights(policy_version, timeout_s=timeout_s):
                label = policy_version
        except BackendError as exc:
            error = str(exc)
        self.info = msgspec.structs.replace(self.info, label=label)
        return error

    async def _take_back(self, trial: WeightsOnTrial) -> None:
        url, version = self.client.url, self.info.policy_version
        if not self.weights:
            raise BackendError(
                f"{url}: it may have the weights in {trial.folder}, and where those of version {version} are is not "
                "known here: move them there and resume with that version, or remove it",
                retryable=False,
            )
        if not await self.client.load_weights(self.weights, timeout_s=trial.timeout_s):
            raise BackendError(f"{url}: it does not load weights any more, which it did", retryable=False)


EngineAnswer = Literal["paused", "loaded", "resumed", "not_offered", "failed"]
Told = tuple[EngineAnswer, str]


class GatedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """What a pause, new weights or a resume did to one backend.

    Attributes:
        in_flight: completions that run there now; after `pause`, only those that were kept.
        engine: `paused`, `loaded` or `resumed` by its own API, `not_offered` (it has none: only the node's gate holds),
            `failed`.
        error: why, if it failed.
        policy_version: what its next completions are recorded under.
    """

    url: str
    in_flight: int
    engine: EngineAnswer
    error: str
    policy_version: str


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pool after a pause, new weights or a resume. `waiting`: completions that wait for the resume."""

    paused: bool
    waiting: int
    backends: list[GatedBackend]


async def tell_engine(
    engine: RegisteredEngine,
    mode: PauseMode | None,
    timeout_s: float,
    told: dict[RegisteredEngine, Told],
    policy_version: str | None,
) -> None:
    """Pause it in `mode`, or (None) tell it the version, if there is one, and resume it if it was paused.

    How it took that is entered in `told`; a failure is not raised.
    """
    error = "" if policy_version is None else await engine.label(policy_version, timeout_s)
    try:
        answer: EngineAnswer = "not_offered"
        if mode is not None:
            await engine.pause(mode, timeout_s)
            answer = "paused" if engine.paused else "not_offered"
        elif engine.paused:
            await engine.unpause(timeout_s)
            answer = "resumed"
        told[engine] = ("failed", error) if error else (answer, "")
    except BackendError as exc:
        told[engine] = ("failed", str(exc))


async def load_engine(
    engine: RegisteredEngine, folder: str, timeout_s: float, told: dict[RegisteredEngine, Told]
) -> None:
    """Have it load weights on trial. How it took that is entered in `told`; a failure is not raised."""
    try:
        told[engine] = ("loaded" if await engine.load_weights(folder, timeout_s) else "not_offered", "")
    except BackendError as exc:
        told[engine] = ("failed", str(exc))


async def close_engines(engines: Iterable[RegisteredEngine]) -> None:
    """Close their clients, all at once; before, those that were paused here are told to go on."""
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(_close, engine)


async def _close(engine: RegisteredEngine) -> None:
    with trio.move_on_after(UNPAUSE_GRACE_S), suppress(BackendError):
        await engine.unpause(UNPAUSE_GRACE_S)
    if engine.paused:
        logger.warning("backend %s did not answer its resume, and is left as it is", engine.client.url)
    await engine.client.aclose()
