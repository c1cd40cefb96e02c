"""Registered engines, and how each takes a pause and a resume of the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from prorl_trio.errors import BackendError
from prorl_trio.inference.health import Breaker
from prorl_trio.inference.load import AdaptiveLimit, LoadEstimate

if TYPE_CHECKING:
    from prorl_trio.config import HealthConfig
    from prorl_trio.inference.engine import EngineClient, EngineInfo
    from prorl_trio.inference.gate import PauseMode

__all__ = ["EngineAnswer", "GateReport", "GatedBackend", "RegisteredEngine", "Told", "tell_engine"]


class RegisteredEngine:
    """What a registered backend is called with. `paused`: by its own API, or it may be: no answer came."""

    def __init__(self, client: EngineClient, info: EngineInfo, health: HealthConfig) -> None:
        self.client = client
        self.info = info
        self.paused = False
        self.breaker = Breaker(health)
        self.load = LoadEstimate()
        self.limit = AdaptiveLimit()


EngineAnswer = Literal["paused", "resumed", "not_offered", "failed"]
Told = tuple[EngineAnswer, str]


class GatedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """What a pause or a resume did to one backend.

    Attributes:
        in_flight: completions that run there now; after `pause`, only those that were kept.
        engine: `paused` or `resumed` by its own API, `not_offered` (it has none: only the node's gate holds), `failed`.
        error: why, if it failed.
        policy_version: what its next completions are recorded under.
    """

    url: str
    in_flight: int
    engine: EngineAnswer
    error: str
    policy_version: str


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pool after a pause or a resume. `waiting`: completions that wait for the resume."""

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
    try:
        if policy_version is not None:
            await engine.client.label_weights(policy_version, timeout_s=timeout_s)
        if mode is None and not engine.paused:
            told[engine] = ("not_offered", "")
        elif mode is None:
            await engine.client.resume(timeout_s=timeout_s)
            engine.paused = False
            told[engine] = ("resumed", "")
        else:
            engine.paused = True
            engine.paused = await engine.client.pause(mode, timeout_s=timeout_s)
            told[engine] = ("paused" if engine.paused else "not_offered", "")
    except BackendError as exc:
        told[engine] = ("failed", str(exc))
