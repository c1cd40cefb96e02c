"""A node's edge in a thread, for a trainer that has no trio loop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Self

import trio

from support.fake_node import FakeNode
from support.fake_service import Service, open_service

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_S: Final = 30


class NodeThread:
    """A node with its edge in a thread of its own: here it is the trainer that has none."""

    def __init__(self) -> None:
        self.node = FakeNode()
        self._service: Service | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._ready = threading.Event()
        self._stop = trio.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,), name="node")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.call(self._stop.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        assert self._service is not None
        return self._service.url

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn` in the node's loop."""
        return trio.from_thread.run_sync(fn, *args, trio_token=self._token)

    async def _main(self) -> None:
        with trio.fail_after(2 * DEADLINE_S):
            async with open_service(self.node) as service:
                self._service, self._token = service, trio.lowlevel.current_trio_token()
                self._ready.set()
                await self._stop.wait()
