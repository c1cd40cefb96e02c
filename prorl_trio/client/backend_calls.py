"""The methods of `RolloutClient` that change the node's pool of LLM backends."""

from __future__ import annotations

import abc
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import msgspec

from ipc.session import BackendsAnswer, CallBackends
from prorl_trio.types.backends import (
    AddBackend,
    BackendList,
    ConfirmWeights,
    DrainBackend,
    ExpectTransfer,
    ListBackends,
    LoadAdapter,
    LoadWeights,
    PauseBackends,
    RemoveBackends,
    RenewUpdate,
    ResumeBackends,
    UpdateReport,
    WeighBackend,
)
from prorl_trio.types.errors import (
    BackendError,
    BackendsBusy,
    PauseTimeout,
    ProtocolError,
    ServiceError,
    UnknownBackend,
    UpdateRefused,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_trio.client.requests import FrameT, RequestFrame
    from prorl_trio.client.weights.store import WeightStores
    from prorl_trio.types.backends import AnswerT, BackendRequest, PauseMode

__all__ = ["BackendCalls"]

_SERVICE_ERRORS: Final = {error.code: error for error in (BackendsBusy, PauseTimeout, UpdateRefused)}


class BackendCalls(abc.ABC):
    """The operations on the node's pool of LLM backends. Jobs go on meanwhile.

    Each method returns when the node has answered, and raises ServiceError when the session is over. A cancel withdraws
    the request: it changes nothing, unless the node had carried it out before.

    Attributes:
        weight_stores: the folders of the weights that `PolicyUpdate.load_state_dict` wrote.
    """

    weight_stores: WeightStores

    @abc.abstractmethod
    def run_in_background(self, afn: Callable[[], Awaitable[None]]) -> None:
        """Run `afn` until it returns or the client is closed. It must not raise."""

    @abc.abstractmethod
    async def _ask(self, answer_type: type[FrameT], build: Callable[[int], RequestFrame]) -> FrameT:
        """Send one request, made by `build` from its id, and return the node's answer."""

    async def list_backends(self) -> BackendList:
        """Return the state of the pool now."""
        return await self._operate(ListBackends())

    async def add_backend(self, url: str, weight: float | None = None) -> None:
        """Add an LLM backend to the pool, after the node has probed it. A drained backend becomes active again.

        Args:
            url: the backend's URL.
            weight: its share of the tasks, relative to the other backends. None: 1 for a new backend, else unchanged.

        Raises:
            BackendError: the backend did not pass the probe; the message says why.
        """
        await self._operate(AddBackend(url=url, weight=weight))

    async def drain_backend(self, url: str) -> None:
        """Give a backend no new tasks; it stays in the pool.

        Each of its tasks moves to another backend at its next completion, if another one accepts tasks.

        Raises:
            UnknownBackend: it is not in the pool.
        """
        await self._operate(DrainBackend(url=url))

    async def weigh_backend(self, url: str, weight: float) -> None:
        """Set the weight of a backend: its share of the tasks that are placed from now on.

        Raises:
            UnknownBackend: it is not in the pool.
            BackendError: `weight` is not above 0.
        """
        await self._operate(WeighBackend(url=url, weight=weight))

    async def remove_backend(self, url: str) -> None:
        """Remove an LLM backend from the pool. Its running calls finish.

        Raises:
            UnknownBackend: it is not in the pool.
        """
        await self._operate(RemoveBackends(url=url))

    async def clear_backends(self) -> None:
        """Remove all backends. Running calls finish; jobs wait until a backend is added."""
        await self._operate(RemoveBackends(all=True))

    async def pause(
        self, mode: PauseMode = "wait", timeout_s: float = 60.0, *, holder: str = "", lease_s: float | None = None
    ) -> UpdateReport:
        """Hold back all new completions until `resume`.

        Returns when the completions in flight have ended, were aborted or are kept, as `mode` says. An engine that
        failed to pause does not raise: see the report. `RolloutClient.policy_update` pauses and resumes by itself.

        Args:
            mode: the fate of completions in flight.
            timeout_s: limit for all of it.
            holder: a name of the caller's own, new for each update: only steps with that name then change the weights,
                until its `resume`.
            lease_s: the node gives up the holder's update if none of its steps, nor `renew_update`, comes for so long.

        Raises:
            PauseTimeout: it took longer than `timeout_s`; the pause is undone.
            BackendsBusy: another pause or resume is running, or another holder's update; nothing has changed.
        """
        return await self._operate(PauseBackends(mode=mode, timeout_s=timeout_s, holder=holder, lease_s=lease_s))

    async def renew_update(self, holder: str) -> UpdateReport:
        """Let the lease of an update begin anew.

        Raises:
            UpdateRefused: the update is over; the former version is back.
            BackendsBusy: another holder's update is running.
        """
        return await self._operate(RenewUpdate(holder=holder))

    async def expect_transfer(self, timeout_s: float = 600.0, *, holder: str = "") -> UpdateReport:
        """Tell the node of a paused pool that new weights are moved to its engines by other means.

        They are on trial as those of `load_weights`: a `resume` without a version loads the former ones, from their
        folder; an engine whose folder is not known takes no tasks then. `timeout_s` is for that load.

        Raises:
            UpdateRefused: the pool is not paused, or the holder's update is over.
            BackendsBusy: another step is running; nothing has changed.
        """
        return await self._operate(ExpectTransfer(timeout_s=timeout_s, holder=holder))

    async def confirm_weights(
        self, policy_version: str, timeout_s: float = 60.0, *, tell: bool = True, holder: str = ""
    ) -> UpdateReport:
        """Have every engine of a paused pool say that its weights are of that version; with `tell`, after it was told.

        One that says otherwise, or fails to, does not raise: see the report (`failed`). Some say nothing
        (`not_offered`).

        Raises:
            UpdateRefused: the pool is not paused, or the holder's update is over.
            BackendsBusy: another step is running; nothing has changed.
        """
        return await self._operate(
            ConfirmWeights(policy_version=policy_version, tell=tell, timeout_s=timeout_s, holder=holder)
        )

    async def load_weights(self, folder: str, timeout_s: float = 600.0, *, holder: str = "") -> UpdateReport:
        """Have the engines of a paused pool load the weights in `folder`, a path as the engines see it.

        They are on trial: a `resume` with a version keeps them, a `resume` without one puts the former weights back. An
        engine that failed to load does not raise: see the report.

        Raises:
            UpdateRefused: the pool is not paused, or the holder's update is over.
            BackendsBusy: another step is running; nothing has changed.
        """
        return await self._operate(LoadWeights(folder=folder, timeout_s=timeout_s, holder=holder))

    async def load_adapter(self, name: str, folder: str, timeout_s: float = 600.0, *, holder: str = "") -> UpdateReport:
        """Have the engines of a paused pool load the LoRA adapter in `folder`, a path as the engines see it.

        It is on trial as weights are: a `resume` with a version has completions sampled with it. Its `name` is to be
        another one for each version. An engine that failed to load does not raise: see the report.

        Raises:
            UpdateRefused: the pool is not paused, or completions were kept in engines, which would go on with the
                former adapter; or the holder's update is over.
            BackendsBusy: another step is running; nothing has changed.
        """
        return await self._operate(LoadAdapter(name=name, folder=folder, timeout_s=timeout_s, holder=holder))

    async def resume(self, policy_version: str | None = None, *, holder: str = "") -> UpdateReport:
        """Let completions begin again, recorded under `policy_version` if that is given.

        Raises:
            UpdateRefused: an engine failed to load the weights of that version, or says that it has others: the pool
                stays paused; or the holder's update is over, and a version is given.
            BackendsBusy: another pause or resume is running, or another holder's update; nothing has changed.
        """
        return await self._operate(ResumeBackends(policy_version=policy_version, holder=holder))

    async def operate(self, request: BackendRequest[AnswerT]) -> AnswerT:
        """Carry out an operation as its request says: what the other methods are made of."""
        return await self._operate(request)

    async def _operate(self, request: BackendRequest[AnswerT]) -> AnswerT:
        arguments = msgspec.Raw(msgspec.msgpack.encode(request))
        call = partial(CallBackends, operation=request.operation, arguments=arguments)
        answer = await self._ask(BackendsAnswer, lambda request_id: call(request_id=request_id))
        if answer.code:
            raise _error_of(answer)
        try:
            return cast("AnswerT", msgspec.msgpack.decode(answer.answer, type=request.answer))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ProtocolError(f"the answer to {request.operation!r} cannot be read: {exc}") from None


def _error_of(answer: BackendsAnswer) -> ServiceError | BackendError:
    if (known := _SERVICE_ERRORS.get(answer.code)) is not None:
        return known(answer.message)
    if answer.code == "unknown_backend":
        return UnknownBackend(answer.message)
    return BackendError(answer.message, retryable=answer.code == "backend_down")
