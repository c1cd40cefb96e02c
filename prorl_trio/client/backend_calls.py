"""The operations on a node's pool of LLM backends, as methods of clients."""

from __future__ import annotations

import abc
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, Self, cast, overload

import msgspec

from prorl_ipc.session import BackendsAnswer, CallBackends
from prorl_ipc.wire import UNDECODABLE
from prorl_trio.types.backends import (
    AddBackend,
    AnswerT,
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
    WeighBackend,
)
from prorl_trio.types.errors import (
    BackendError,
    BackendsBusy,
    NoAgentWanted,
    PauseTimeout,
    ProtocolError,
    ServiceError,
    UnknownBackend,
    UnknownJob,
    UpdateRefused,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prorl_trio.client.requests import FrameT, RequestFrame
    from prorl_trio.types.backends import NodeRequest
    from prorl_trio.weights.store import WeightStores

P = ParamSpec("P")

_SERVICE_ERRORS: Final = {
    error.code: error for error in (BackendsBusy, NoAgentWanted, PauseTimeout, UnknownJob, UpdateRefused)
}


class _Verb(Generic[P, AnswerT]):
    """A method that has the node carry out the request made from its arguments."""

    def __init__(self, request: Callable[P, NodeRequest[AnswerT]]) -> None:
        self._request = request
        self.__doc__ = getattr(request, "func", request).__doc__

    @overload
    def __get__(self, client: BackendCalls, owner: object = None) -> Callable[P, Awaitable[AnswerT]]: ...
    @overload
    def __get__(self, client: BlockingBackendCalls, owner: object = None) -> Callable[P, AnswerT]: ...
    @overload
    def __get__(self, client: None, owner: object = None) -> Self: ...
    def __get__(self, client: Any, owner: object = None) -> Any:
        if client is None:
            return self

        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.operate(self._request(*args, **kwargs))

        method.__doc__ = self.__doc__
        return method


class _BackendVerbs:
    """The operations on the pool of LLM backends, one line each, for clients of every kind.

    Jobs continue during a change.

    Each method takes the fields of its request, a Struct in `prorl_trio.types.backends`, and has the docstring of that
    Struct.
    """

    list_backends = _Verb(ListBackends)
    add_backend = _Verb(AddBackend)
    drain_backend = _Verb(DrainBackend)
    weigh_backend = _Verb(WeighBackend)
    remove_backend = _Verb(RemoveBackends)
    clear_backends = _Verb(partial(RemoveBackends, all=True))
    pause = _Verb(PauseBackends)
    renew_update = _Verb(RenewUpdate)
    expect_transfer = _Verb(ExpectTransfer)
    confirm_weights = _Verb(ConfirmWeights)
    load_weights = _Verb(LoadWeights)
    load_adapter = _Verb(LoadAdapter)
    resume = _Verb(ResumeBackends)


class BlockingBackendCalls(_BackendVerbs, abc.ABC):
    """The operations on the pool of LLM backends, as blocking calls."""

    @abc.abstractmethod
    def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        """Have the node carry out a request. See `BackendCalls.operate`."""


class BackendCalls(_BackendVerbs, abc.ABC):
    """The operations on the node's pool of LLM backends.

    Each method returns when the node has answered, and raises ServiceError when the session is over. A cancel withdraws
    the request. It then changes nothing, unless the node had already carried it out.

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

    async def operate(self, request: NodeRequest[AnswerT]) -> AnswerT:
        """Have the node carry out a request. The other methods are built on this one.

        The request's docstring lists its errors.
        """
        arguments = msgspec.Raw(msgspec.msgpack.encode(request))
        call = partial(CallBackends, operation=request.operation, arguments=arguments)
        answer = await self._ask(BackendsAnswer, lambda request_id: call(request_id=request_id))
        if answer.code:
            raise _error_of(answer)
        try:
            return cast("AnswerT", msgspec.msgpack.decode(answer.answer, type=request.answer))
        except UNDECODABLE as exc:
            raise ProtocolError(f"the answer to {request.operation!r} cannot be read: {exc}") from None


def _error_of(answer: BackendsAnswer) -> ServiceError | BackendError:
    if (known := _SERVICE_ERRORS.get(answer.code)) is not None:
        return known(answer.message)
    if answer.code == "unknown_backend":
        return UnknownBackend(answer.message)
    return BackendError(answer.message, retryable=answer.code == "backend_down")
