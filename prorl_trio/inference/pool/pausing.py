"""What a policy update does to the pool: completions held back at the gate, engines told to pause and to resume."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from ipc.nursery import open_single_nursery
from prorl_trio.inference.pool.gate import CompletionGate
from prorl_trio.inference.pool.gated import GatedBackend, GateReport, RegisteredEngine, load_engine, tell_engine
from prorl_trio.inference.pool.versions import VersionOrder
from prorl_trio.types.errors import BackendsBusy, PauseTimeout, UpdateRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prorl_trio.inference.engines.engine import PauseMode
    from prorl_trio.inference.pool.gated import Told
    from prorl_trio.inference.pool.placement import Backend

__all__ = ["UNKNOWN_VERSION", "PolicyUpdates"]

ABORT_GRACE_S = 5.0
"""For an engine that was told to abort to answer with what it has, or half of the time that the pause has left; then
its calls are cancelled here."""
UNPAUSE_TIMEOUT_S = 10.0
"""For telling the engines to go on, where the caller set no other limit."""
UNKNOWN_VERSION = "0"
"""What a probe says of an engine that does not tell the version of its weights."""


class PolicyUpdates:
    """Pauses and resumes the engines of a pool, one change at a time. `engines` is the pool's own table."""

    def __init__(self, engines: Mapping[Backend, RegisteredEngine]) -> None:
        self.gate = CompletionGate()
        self.policy_version = UNKNOWN_VERSION
        """What the last resume said."""
        self.versions = VersionOrder(UNKNOWN_VERSION)
        self._engines = engines
        self._changing = False

    async def pause(self, mode: PauseMode, timeout_s: float) -> GateReport:
        """See `Backends.pause`."""
        with self._change():
            was_closed = self.gate.closed
            self.gate.close()
            told: dict[RegisteredEngine, Told] = {}
            try:
                with trio.move_on_after(timeout_s):
                    if mode == "abort":
                        await self._tell_engines(told, mode, timeout_s)
                        await self._abort_calls(told)
                    else:
                        if mode == "wait":
                            await self.gate.wait_idle()
                        await self._tell_engines(told, mode, timeout_s)
                    return self._report(told)
                running = ", ".join(f"{n} on {url}" for url, n in self.gate.in_flight().items()) or "none"
                silent = ", ".join(engine.client.url for engine in self._engines.values() if engine not in told)
                raise PauseTimeout(
                    f"the pause took more than {timeout_s:g} s and is undone: completions go on; in flight: {running}; "
                    f"not paused by then: {silent or 'none'}. Give it more time, or abort them"
                )
            except BaseException:
                if not was_closed:
                    with trio.move_on_after(UNPAUSE_TIMEOUT_S, shield=True):
                        await self._tell_engines({}, None, UNPAUSE_TIMEOUT_S)
                    self.gate.open()
                raise

    async def load_weights(self, folder: str, timeout_s: float) -> GateReport:
        """See `Backends.load_weights`."""
        with self._change():
            if not self.gate.closed:
                raise UpdateRefused("weights are loaded in a pause only: pause the backends first")
            told: dict[RegisteredEngine, Told] = {}
            async with open_single_nursery() as nursery:
                for engine in self._engines.values():
                    nursery.start_soon(load_engine, engine, folder, timeout_s, told)
            return self._report(told)

    async def resume(self, policy_version: str | None) -> GateReport:
        """See `Backends.resume`."""
        with self._change():
            if policy_version is not None:
                self._check_loaded(policy_version)
                self.policy_version = policy_version
                self.versions.note(policy_version)
                for engine in self._engines.values():
                    engine.announce(policy_version)
            told: dict[RegisteredEngine, Told] = {}
            await self._tell_engines(told, None, UNPAUSE_TIMEOUT_S, policy_version)
            self.gate.open()
            return self._report(told)

    @contextmanager
    def _change(self) -> Iterator[None]:
        if self._changing:
            raise BackendsBusy("another pause or resume of the backends is under way; await it")
        self._changing = True
        try:
            yield
        finally:
            self._changing = False

    def _check_loaded(self, policy_version: str) -> None:
        failed = [
            backend.url
            for backend, engine in self._engines.items()
            if backend.state != "removed" and engine.trial is not None and not engine.trial.loaded
        ]
        if failed:
            raise UpdateRefused(
                f"{', '.join(failed)}: it did not load its new weights, so the pool stays paused at version "
                f"{self.policy_version}: load them again or remove it, or resume without {policy_version}, which gives "
                "all of them their former weights back"
            )

    async def _abort_calls(self, told: dict[RegisteredEngine, Told]) -> None:
        """Return when nothing is in flight. Engines that paused answer with what they have, if they have the call."""
        answering = frozenset(engine.client.url for engine, (answer, _) in told.items() if answer == "paused")
        self.gate.abort(answering)
        with trio.move_on_after(min(ABORT_GRACE_S, _left_s() / 2)):
            await self.gate.wait_idle()
        self.gate.abort()
        await self.gate.wait_idle()

    async def _tell_engines(
        self,
        told: dict[RegisteredEngine, Told],
        mode: PauseMode | None,
        timeout_s: float,
        policy_version: str | None = None,
    ) -> None:
        """Pause the engines, or (None) tell them the version, if there is one, and resume those that were paused.

        How each took it is in `told` as soon as it has answered. One that is out of health has half of the time that is
        left: that it does not answer is to be reported, and not to undo a pause of the others.
        """
        left_s = min(timeout_s, _left_s())
        async with open_single_nursery() as nursery:
            for engine in self._engines.values():
                each_s = timeout_s if engine.breaker.closed else left_s / 2
                nursery.start_soon(tell_engine, engine, mode, each_s, told, policy_version)

    def _report(self, told: dict[RegisteredEngine, Told]) -> GateReport:
        in_flight = self.gate.in_flight()
        backends = []
        for backend, engine in self._engines.items():
            if backend.state != "removed":
                answer, error = told.get(engine, ("not_offered", ""))
                backends.append(
                    GatedBackend(
                        url=backend.url,
                        in_flight=in_flight[backend.url],
                        engine=answer,
                        error=error,
                        policy_version=engine.info.policy_version,
                    )
                )
        return GateReport(paused=self.gate.closed, waiting=self.gate.waiting, backends=backends)


def _left_s() -> float:
    """Until the caller's time is up."""
    return max(0.0, trio.current_effective_deadline() - trio.current_time())
