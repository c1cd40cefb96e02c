"""Policy updates of a pool: completions are held, and engines pause, load weights and resume."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.inference.pool.control import OtherWeights
from prorl_trio.types.backends import (
    ConfirmWeights,
    EngineAnswer,
    ExpectTransfer,
    LoadAdapter,
    LoadWeights,
    PauseBackends,
    RenewUpdate,
    ResumeBackends,
    UpdatedBackend,
    UpdateReport,
)
from prorl_trio.types.errors import BackendError, BackendsBusy, PauseTimeout, UpdateRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from prorl_trio.inference.pool.admission import Admission
    from prorl_trio.inference.pool.backend import Backend
    from prorl_trio.inference.pool.placement import Placement
    from prorl_trio.inference.pool.versions import VersionOrder
    from prorl_trio.types.backends import NodeRequest, WeightsStep


ABORT_GRACE_S = 5.0
"""Time for an aborting engine to answer with its tokens, or half of the pause's remaining time; then its calls are
cancelled here."""
UNPAUSE_TIMEOUT_S = 10.0
"""Time to resume the engines if the caller sets no other limit."""

Told = tuple[EngineAnswer, str]


class Hold(NamedTuple):
    """The trainer that updates the policy, and its deadline; without a lease there is no deadline."""

    holder: str
    lease_s: float | None
    until_s: float | None

    @property
    def left_s(self) -> float:
        """Return the remaining seconds of the lease."""
        return math.inf if self.until_s is None else self.until_s - trio.current_time()

    def __str__(self) -> str:
        lease = "no lease" if self.until_s is None else f"a lease of {max(0.0, self.left_s):.0f} s more"
        return f"the policy update of {self.holder} is under way, with {lease}"


class UpdateHolder:
    """At most one hold at a time. `wait_lost` reports an expired lease; only `release` ends it.

    Attributes:
        hold: the current hold.
        last: the holder and the version of the last completed update.
    """

    def __init__(self) -> None:
        self.hold: Hold | None = None
        self.last = ("", "")
        self._steps = 0
        self._news = trio.lowlevel.ParkingLot()

    @property
    def holder(self) -> str:
        """Return the holder; empty if there is none."""
        return self.hold.holder if self.hold else ""

    def take(self, holder: str, lease_s: float | None) -> None:
        """Give the hold to `holder`, or renew its existing hold."""
        self.hold = Hold(holder, lease_s, None if lease_s is None else trio.current_time() + lease_s)
        self._news.unpark_all()

    def renew(self) -> None:
        """Restart the current lease."""
        if self.hold is not None:
            self.take(self.hold.holder, self.hold.lease_s)

    def release(self) -> None:
        """End the hold."""
        self.hold = None
        self._news.unpark_all()

    def begin_step(self) -> None:
        """Suspend the lease during a step of the update, because the step has its own time limit."""
        self._steps += 1

    def end_step(self) -> None:
        """Restart the lease after a step."""
        self._steps -= 1
        self.renew()
        self._news.unpark_all()

    async def wait_lost(self) -> Hold:
        """Wait for a hold whose lease has expired, and return it."""
        await trio.lowlevel.checkpoint()
        while (hold := self._lost()) is None:
            left_s = math.inf if self.hold is None or self._steps else self.hold.left_s
            with trio.move_on_after(left_s):
                await self._news.park()
        return hold

    def _lost(self) -> Hold | None:
        return self.hold if self.hold is not None and not self._steps and self.hold.left_s <= 0 else None


class PolicyUpdates:
    """Pauses the engines of a pool, loads weights into them and resumes them, one step at a time.

    The pool is paused while an operator's pause or a trainer's update (`UpdateHolder`) is in force.
    """

    def __init__(self, placement: Placement, admission: Admission, versions: VersionOrder) -> None:
        self._placement = placement
        self._admission = admission
        self._versions = versions
        self._changing: str | None = None
        self._asked = False
        """A pause outside any update is in force."""
        self.holder = UpdateHolder()

    async def operate(self, request: NodeRequest[UpdateReport]) -> UpdateReport:
        """Carry out one step. See its type for semantics and errors."""
        match request:
            case PauseBackends():
                return await self._pause(request)
            case ResumeBackends():
                return await self._resume(request.policy_version, request.holder)
            case RenewUpdate():
                return await self._renew(request.holder)
            case LoadAdapter() if kept := self._admission.in_flight().total():
                raise UpdateRefused(
                    f"{kept} completions were kept in their engines, which would go on with the former adapter: pause "
                    "by 'wait' or 'abort' to load one"
                )
            case LoadWeights() | LoadAdapter() | ExpectTransfer() | ConfirmWeights():
                return await self._try_weights(request)
        raise TypeError(f"{type(request).__name__} is no step of a policy update")

    async def _pause(self, request: PauseBackends) -> UpdateReport:
        mode, timeout_s, holder = request.mode, request.timeout_s, request.holder
        if holder:
            self._check_holder(holder)
        with self._change(holder):
            was_closed = self._admission.closed
            self._admission.close()
            told: dict[Backend, Told] = {}
            try:
                with trio.move_on_after(timeout_s):
                    if mode == "abort":
                        await self._tell_engines(told, request, timeout_s)
                        await self._abort_calls(told)
                    else:
                        if mode == "wait":
                            await self._admission.wait_idle()
                        await self._tell_engines(told, request, timeout_s)
                    if holder:
                        self.holder.take(holder, request.lease_s)
                    else:
                        self._asked = True
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

    async def _resume(self, policy_version: str | None, holder: str) -> UpdateReport:
        if holder and holder != self.holder.holder:
            return await self._resume_without_hold(policy_version, holder)
        if not holder:
            if policy_version is None and self._asked and self.holder.hold is not None:  # the update continues alone
                self._asked = False
                await trio.lowlevel.checkpoint()
                return self._report({})
            self._check_holder(holder)
        with self._change(holder):
            told: dict[Backend, Told] = {}
            if policy_version is not None:
                self._check_loaded(policy_version)
                told = await self._name_weights(policy_version)
                self._versions.announce(policy_version)
                for backend in self._placement.backends():
                    backend.engine.announce(policy_version)
            await self._let_go(told, paused=self._asked and bool(holder))
            if not holder:
                self._asked = False
            self.holder.last = (holder, policy_version or "")
            return self._report(told)

    async def _renew(self, holder: str) -> UpdateReport:
        await trio.lowlevel.checkpoint()
        self._check_in_force(holder)
        self.holder.renew()
        return self._report({})

    async def give_up(self, hold: Hold) -> UpdateReport:
        """Restore the engines' former weights on behalf of the trainer that has the hold, and end the hold."""
        with self._change(hold.holder):
            told: dict[Backend, Told] = {}
            await self._let_go(told, paused=self._asked)
            return self._report(told)

    @contextmanager
    def _change(self, holder: str) -> Iterator[None]:
        if self._changing is not None:
            who = f", by {self._changing}" if self._changing else ""
            raise BackendsBusy(f"another pause or resume of the backends is under way{who}; await it")
        self._changing = holder
        self.holder.begin_step()
        try:
            yield
        finally:
            self._changing = None
            self.holder.end_step()

    def _check_holder(self, holder: str) -> None:
        """Raise BackendsBusy if another holder updates the policy."""
        hold = self.holder.hold
        if hold is not None and hold.holder != holder:
            raise BackendsBusy(f"{hold}; await its end")

    def _check_in_force(self, holder: str) -> None:
        """Raise if another holder updates the policy, or `holder` no longer does."""
        self._check_holder(holder)
        if holder and self.holder.hold is None:
            raise UpdateRefused(
                f"the policy update of {holder} is over: its lease was not renewed in time, and the former version, "
                f"{self._versions.current}, is back. Begin it again"
            )

    async def _resume_without_hold(self, policy_version: str | None, holder: str) -> UpdateReport:
        """Answer a trainer whose update is not in force: there is nothing to undo or carry out."""
        await trio.lowlevel.checkpoint()
        if self._changing == holder:  # its cancelled pause is still being undone
            raise BackendsBusy(f"the pause of {holder} is under way; await its end")
        if policy_version is not None and self.holder.last != (holder, policy_version):  # else a repeated request
            self._check_in_force(holder)
        return self._report({})

    async def _try_weights(self, step: WeightsStep) -> UpdateReport:
        """Run a step with weights on trial on all engines, during a pause."""
        self._check_in_force(step.holder)
        with self._change(step.holder):
            if not self._admission.closed:
                raise UpdateRefused("weights are loaded in a pause only: pause the backends first")
            told: dict[Backend, Told] = {}
            async with open_single_nursery() as nursery:
                for backend in self._placement.backends():
                    nursery.start_soon(_note, backend, told, partial(_carry_out, backend, step))
            return self._report(told)

    async def _name_weights(self, policy_version: str) -> dict[Backend, Told]:
        """Set and confirm the name of the weights on every engine.

        Return the engines that failed to answer; such failures do not stop the update.

        Raises:
            UpdateRefused: an engine reports other weights.
        """
        told: dict[Backend, Told] = {}
        others: list[str] = []
        confirm = ConfirmWeights(policy_version, timeout_s=UNPAUSE_TIMEOUT_S)

        async def name(backend: Backend) -> Told:
            try:
                return await _carry_out(backend, confirm)
            except OtherWeights as exc:
                others.append(str(exc))
                raise

        while new := [backend for backend in self._placement.backends() if backend not in told]:  # some may be added
            async with open_single_nursery() as nursery:
                for backend in new:
                    nursery.start_soon(_note, backend, told, partial(name, backend))
        if others:
            raise UpdateRefused(
                f"{'; '.join(others)}: the pool stays as it was, at version {self._versions.current}: move the weights "
                f"there again, or resume without {policy_version}"
            )
        return {backend: how for backend, how in told.items() if how[0] == "failed"}

    async def _let_go(self, told: dict[Backend, Told], *, paused: bool) -> None:
        """End the hold and resume the engines; during an operator's pause, only restore their weights."""
        if paused:
            async with open_single_nursery() as nursery:
                for backend in self._placement.backends():
                    nursery.start_soon(_note, backend, told, partial(_restore, backend, UNPAUSE_TIMEOUT_S))
            self.holder.release()
            return
        failed = dict(told)
        await self._tell_engines(told, None, UNPAUSE_TIMEOUT_S)
        told.update(failed)
        self.holder.release()
        self._admission.open()

    def _check_loaded(self, policy_version: str) -> None:
        failed = [
            backend.url
            for backend in self._placement.backends()
            if backend.state != "removed" and backend.engine.failed_to_load
        ]
        if failed:
            raise UpdateRefused(
                f"{', '.join(failed)}: it did not load its new weights, so the pool stays paused at version "
                f"{self._versions.current}: load them again or remove it, or resume without {policy_version}, which "
                "gives all of them their former weights back"
            )

    async def _abort_calls(self, told: dict[Backend, Told]) -> None:
        """Return when nothing is in flight. Paused engines answer pending calls with the tokens so far."""
        answering = frozenset(backend.url for backend, (answer, _) in told.items() if answer == "paused")
        self._admission.abort(answering)
        with trio.move_on_after(min(ABORT_GRACE_S, _left_s() / 2)):
            await self._admission.wait_idle()
        self._admission.abort()
        await self._admission.wait_idle()

    async def _tell_engines(
        self,
        told: dict[Backend, Told],
        pause: PauseBackends | None,
        timeout_s: float,
    ) -> None:
        """Pause the engines, or (None) resume the paused ones.

        Each engine's result is in `told` as soon as it has answered. An unhealthy engine gets half of the remaining
        time: its failure is reported, and must not undo a pause of the others.
        """
        left_s = min(timeout_s, _left_s())
        async with open_single_nursery() as nursery:
            for backend in self._placement.backends():
                each_s = timeout_s if backend.breaker.closed else left_s / 2
                tell = (
                    partial(_resume, backend, each_s)
                    if pause is None
                    else partial(_carry_out, backend, msgspec.structs.replace(pause, timeout_s=each_s))
                )
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
    """Record the engine's answer in `told`; failures do not raise."""
    try:
        told[backend] = await tell()
    except BackendError as exc:
        told[backend] = ("failed", str(exc))


async def _carry_out(backend: Backend, request: PauseBackends | WeightsStep) -> Told:
    return await backend.engine.operate(request), ""


async def _restore(backend: Backend, timeout_s: float) -> Told:
    await backend.engine.restore(timeout_s)
    return "paused" if backend.engine.paused else "not_offered", ""


async def _resume(backend: Backend, timeout_s: float) -> Told:
    engine = backend.engine
    was_paused = engine.paused
    await engine.unpause(timeout_s)
    await engine.unload_outdated(timeout_s)
    return "resumed" if was_paused else "not_offered", ""


def _left_s() -> float:
    """Return the seconds until the caller's deadline."""
    return max(0.0, trio.current_effective_deadline() - trio.current_time())
