"""The trainer's changes of a node's pool of LLM backends: a part of `RolloutClient`."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from ipc.session import AddBackend, BackendChanged, ClearBackends, DrainBackend, RemoveBackend, WeighBackend
from prorl_trio.types.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.client.requests import AnswerT, RequestFrame

__all__ = ["BackendCalls"]


class BackendCalls(abc.ABC):
    """Jobs run meanwhile. Each method raises ServiceError when the session is over."""

    @abc.abstractmethod
    async def _ask(self, answer_type: type[AnswerT], build: Callable[[int], RequestFrame]) -> AnswerT:
        """The answer to one request."""

    async def add_backend(self, url: str, weight: float | None = None) -> None:
        """Register an LLM backend with the node, which probes it first; a drained one takes tasks again.

        `weight` is its share of the tasks beside others: 1 for a new one, and what it was, where it is not given.

        Raises:
            BackendError: it is not fit; the message says why.
        """
        _check(await self._ask(BackendChanged, lambda i: AddBackend(request_id=i, url=url, weight=weight)))

    async def drain_backend(self, url: str) -> None:
        """Give a backend no new tasks. Its tasks move with their next completion, if another one takes them.

        Raises:
            BackendError: it is not in the pool.
        """
        _check(await self._ask(BackendChanged, lambda i: DrainBackend(request_id=i, url=url)))

    async def weigh_backend(self, url: str, weight: float) -> None:
        """Change a backend's share of the tasks, from the next one on.

        Raises:
            BackendError: it is not in the pool, or `weight` is not above 0.
        """
        _check(await self._ask(BackendChanged, lambda i: WeighBackend(request_id=i, url=url, weight=weight)))

    async def remove_backend(self, url: str) -> None:
        """Take an LLM backend out of the node's pool. Its running calls finish.

        Raises:
            BackendError: it is not in the pool.
        """
        _check(await self._ask(BackendChanged, lambda i: RemoveBackend(request_id=i, url=url)))

    async def clear_backends(self) -> None:
        """Take all backends out. Running calls finish; jobs wait for the backends that are added next."""
        _check(await self._ask(BackendChanged, lambda i: ClearBackends(request_id=i)))


def _check(answer: BackendChanged) -> None:
    if answer.error:
        raise BackendError(answer.error, retryable=False)
