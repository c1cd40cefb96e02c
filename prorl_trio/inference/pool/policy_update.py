"""Policy updates of a pool: completions held back, engines told to pause, to load weights and to resume."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from ipc.nursery import open_single_nursery
from prorl_trio.types.backends import EngineAnswer, UpdatedBackend, UpdateReport
from prorl_trio.types.errors import BackendError, BackendsBusy, PauseTimeout, UpdateRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from prorl_trio.inference.pool.admission import Admission
    from prorl_trio.inference.pool.backend import Backend
    from prorl_trio.inference.pool.placement import Placement
    from prorl_trio.inference.pool.versions import VersionOrder
    from prorl_trio.types.backends import PauseMode

__all__ = ["PolicyUpdates"]

ABORT_GRACE_S = 5.0
"""For an engine that was told to abort to answer with what it has, or half of the time that the pause has left; then
its calls are cancelled here."""
UNPAUSE_TIMEOUT_S = 10.0
"""For telling the engines to go on, where the caller set no other limit."""

Told = tuple[EngineAnswer, str]


class PolicyUpdates:
    """Pauses the engines of a pool, gives them weights and resumes them, one step at a time."""

    def __init__(self, placement: Placement, admission: Admission, versions: VersionOrder) -> None:
        self._placement = placement
        self._admission = admission
        self._versions = versions
        self._changing = False

    async def pause(self, mode: PauseMode, timeout_s: float) -> UpdateReport:
        """See `Backends.pause`."""
        with self._change():
            was_closed = self._admission.closed
            self._admission.close()
            told: dict[Backend, Told] = {}
            try:
                with trio.move_on_after(timeout_s):
                    if mode == "abort":
                        await self._tell_engines(told, mode, timeout_s)
                        await self._abort_calls(told)
                    else:
                        if mode == "wait":
                            await self._admission.wait_idle()
                        await self._tell_engines(told, mode, timeout_s)
                    return self._report(told)
                running = ", ".join(f"{n} on {url}" for url, n in self._admission.in_flight().items()) or "none"
                silent = ", ".join(backend.url for backend in self._placement.backends() if backend not in told)
                raise PauseTimeout(
                    f"the pause took more than {timeout_s:g} s and is undone: completions go on; in flight: {running}; "
                    f"not paused by then: {silent or 'none'}. Give it more time, or abort them"
                )
            except BaseException:
                if not was_closed:
                    with trio.move_on_after(UNPAUSE_TIMEOUT_S, shield=True):
                        await self._tell_engines({}, None, UNPAUSE_TIMEOUT_S)
                    self._admission.open()
                raise

    async def load_weights(self, folder: str, timeout_s: float) -> UpdateReport:
        """See `Backends.load_weights`."""
        with self._change():
            if not self._admission.closed:
                raise UpdateRefused("weights are loaded in a pause only: pause the backends first")
            told: dict[Backend, Told] = {}
            async with open_single_nursery() as nursery:
                for backend in self._placement.backends():
                    nursery.start_soon(_note, backend, told, partial(_load, backend, folder, timeout_s))
            return self._report(told)

    async def resume(self, policy_version: str | None) -> UpdateReport:
        """See `Backends.resume`."""
        with self._change():
            if policy_version is not None:
                self._check_loaded(policy_version)
                self._versions.announce(policy_version)
                for backend in self._placement.backends():
                    backend.engine.announce(policy_version)
            told: dict[Backend, Told] = {}
            await self._tell_engines(told, None, UNPAUSE_TIMEOUT_S, policy_version)
            self._admission.open()
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
            for backend in self._placement.backends()
            if backend.state != "removed" and (trial := backend.engine.trial) is not None and not trial.loaded
        ]
        if failed:
            raise UpdateRefused(
                f"{', '.join(failed)}: it did not load its new weights, so the pool stays paused at version "
                f"{self._versions.current}: load them again or remove it, or resume without {policy_version}, which "
                "gives all of them their former weights back"
            )

    async def _abort_calls(self, told: dict[Backend, Told]) -> None:
        """Return when nothing is in flight. Engines that paused answer with what they have, if they have the call."""
        answering = frozenset(backend.url for backend, (answer, _) in told.items() if answer == "paused")
        self._admission.abort(answering)
        with trio.move_on_after(min(ABORT_GRACE_S, _left_s() / 2)):
            await self._admission.wait_idle()
        self._admission.abort()
        await self._admission.wait_idle()

    async def _tell_engines(
        self,
        told: dict[Backend, Told],
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
            for backend in self._placement.backends():
                each_s = timeout_s if backend.breaker.closed else left_s / 2
                if mode is None:
                    tell = partial(_resume, backend, each_s, policy_version)
                else:
                    tell = partial(_pause, backend, each_s, mode)
                nursery.start_soon(_note, backend, told, tell)

    def _report(self, told: dict[Backend, Told]) -> UpdateReport:
        in_flight = self._admission.in_flight()
        backends = []
        for backend in self._placement.backends():
            if backend.state != "removed":
                answer, error = told.get(backend, ("not_offered", ""))
                backends.append(
                    UpdatedBackend(
                        url=backend.url,
                        in_flight=in_flight[backend.url],
                        engine=answer,
                        error=error,
                        policy_version=backend.info.policy_version,
                        model_folder=backend.info.model_folder,
                    )
                )
        return UpdateReport(paused=self._admission.closed, waiting=self._admission.waiting, backends=backends)


async def _note(backend: Backend, told: dict[Backend, Told], tell: Callable[[], Awaitable[Told]]) -> None:
    """Enter in `told` how it took what it is told; a failure is not raised."""
    try:
        told[backend] = await tell()
    except BackendError as exc:
        told[backend] = ("failed", str(exc))


async def _pause(backend: Backend, timeout_s: float, mode: PauseMode) -> Told:
    await backend.engine.pause(mode, timeout_s)
    return "paused" if backend.engine.paused else "not_offered", ""


async def _load(backend: Backend, folder: str, timeout_s: float) -> Told:
    return "loaded" if await backend.engine.load_weights(folder, timeout_s) else "not_offered", ""


async def _resume(backend: Backend, timeout_s: float, policy_version: str | None) -> Told:
    """Tell it the version, if there is one, and resume it if it was paused."""
    engine = backend.engine
    error = "" if policy_version is None else await engine.label(policy_version, timeout_s)
    was_paused = engine.paused
    if was_paused:
        await engine.unpause(timeout_s)
    return ("failed", error) if error else ("resumed" if was_paused else "not_offered", "")


def _left_s() -> float:
    """Return the seconds until the caller's time is up."""
    return max(0.0, trio.current_effective_deadline() - trio.current_time())
