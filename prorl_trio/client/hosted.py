"""An async block that a blocking client's loop stays in, for what works in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

T = TypeVar("T")


class _Abandoned(Exception):
    """Raised inside a block that is to be left as by an exception."""


class HostedBlock(Generic[T]):
    """A block, entered by a task of its own. It holds no reference to the client whose loop it is in.

    Attributes:
        value: the block's; it is there once the block is entered.
        error: the exception that ended it, if one did after it was entered.
    """

    value: T

    def __init__(self, block: AbstractAsyncContextManager[T]) -> None:
        self.error: Exception | None = None
        self._block = block
        self._abandoned = False
        self._leave = trio.Event()
        self._left = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Be in the block until it is to be left. An exception before it is entered is raised, a later one is kept."""
        entered = False
        try:
            async with self._block as self.value:
                entered = True
                task_status.started()
                await self._leave.wait()
                if self._abandoned:
                    raise _Abandoned
        except _Abandoned:
            pass
        except Exception as exc:
            if not entered:
                raise
            self.error = exc
        finally:
            self._left.set()

    async def leave(self, *, abandon: bool) -> None:
        """Leave the block, as by an exception if `abandon`, and return when it is left. Twice does no more."""
        self._abandoned = self._abandoned or abandon
        self._leave.set()
        await self._left.wait()
