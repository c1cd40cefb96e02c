"""The trainer's calls of a node's pool of LLM backends: a part of `RolloutClient`."""

from __future__ import annotations

import abc
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import msgspec

from ipc.session import BackendsAnswer, CallBackends
from prorl_trio.types.backends import (
    AddBackend,
    BackendList,
    DrainBackend,
    ListBackends,
    LoadWeights,
    PauseBackends,
    RemoveBackends,
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
    from collections.abc import Callable

    from prorl_trio.client.requests import FrameT, RequestFrame
    from prorl_trio.types.backends import AnswerT, BackendRequest, PauseMode

__all__ = ["BackendCalls"]

_SERVICE_ERRORS: Final = {error.code: error for error in (BackendsBusy, PauseTimeout, UpdateRefused)}


class BackendCalls(abc.ABC):
    """Jobs run meanwhile. Each method raises ServiceError when the session is over; one that is cancelled changes
    nothing, unless it had been carried out already."""

    @abc.abstractmethod
    async def _ask(self, answer_type: type[FrameT], build: Callable[[int], RequestFrame]) -> FrameT:
        """Return the answer to one request."""

    async def list_backends(self) -> BackendList:
        """Return the pool as it is."""
        return await self._operate(ListBackends())

    async def add_backend(self, url: str, weight: float | None = None) -> None:
        """Register an LLM backend with the node, which probes it first; a drained one takes tasks again.

        `weight` is its share of the tasks beside others: 1 for a new one, and what it was, where it is not given.

        Raises:
            BackendError: it is not fit; the message says why.
        """
        await self._operate(AddBackend(url=url, weight=weight))

    async def drain_backend(self, url: str) -> None:
        """Give a backend no new tasks. Its tasks move with their next completion, if another one takes them.

        Raises:
            UnknownBackend: it is not in the pool.
        """
        await self._operate(DrainBackend(url=url))

    async def weigh_backend(self, url: str, weight: float) -> None:
        """Change a backend's share of the tasks, from the next one on.

        Raises:
            UnknownBackend: it is not in the pool.
            BackendError: `weight` is not above 0.
        """
        await self._operate(WeighBackend(url=url, weight=weight))

    async def remove_backend(self, url: str) -> None:
        """Take an LLM backend out of the node's pool. Its running calls finish.

        Raises:
            UnknownBackend: it is not in the pool.
        """
        await self._operate(RemoveBackends(url=url))

    async def clear_backends(self) -> None:
        """Take all backends out. Running calls finish; jobs wait for the backends that are added next."""
        await self._operate(RemoveBackends(all=True))

    async def pause(self, mode: PauseMode = "wait", timeout_s: float = 60.0) -> UpdateReport:
        """Let no completion begin until `resume`; returns when those in flight are dealt with as `mode` says.

        See `RolloutClient.policy_update`, which resumes by itself. What an engine failed at is in the report.

        Raises:
            PauseTimeout: it took longer, and is undone.
            BackendsBusy: another pause or resume is under way; nothing has changed.
        """
        return await self._operate(PauseBackends(mode=mode, timeout_s=timeout_s))

    async def load_weights(self, folder: str, timeout_s: float = 600.0) -> UpdateReport:
        """Have the engines of a paused pool load the weights in `folder`, as they see it. The next `resume` with a
        version is theirs; one without gives the engines their former weights back.

        Raises:
            UpdateRefused: the pool is not paused.
            BackendsBusy: another step is under way; nothing has changed.
        """
        return await self._operate(LoadWeights(folder=folder, timeout_s=timeout_s))

    async def resume(self, policy_version: str | None = None) -> UpdateReport:
        """Let completions begin again, recorded under `policy_version` if that is given.

        Raises:
            UpdateRefused: an engine failed to load the weights of that version; the pool stays paused.
            BackendsBusy: another pause or resume is under way; nothing has changed.
        """
        return await self._operate(ResumeBackends(policy_version=policy_version))

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
