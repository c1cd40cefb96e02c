"""A resources server of NeMo Gym for tests: sessions by a cookie, a counter as its tool, and faults on demand."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import msgspec
import trio

from prorl_trio.testing.fake_http import Answer, serve_http

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "strict": True,
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
}
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Add 1, then 2."}], "tools": [TOOL]},
    "expected": 3,
    "note": {"kept": ["as", "it", "is"]},
}


class CounterServer:
    """Its faults, by path: an answer, or a coroutine function that makes one.

    Attributes:
        seen: the path and the body of each request.
        sums: by session.
    """

    def __init__(self):
        self.faults: dict[str, Any] = {}
        self.seen: list[Any] = []
        self.sums: dict[str, int] = {}
        self.url = ""
        self._numbers = count()
        self.scope = trio.CancelScope()

    def bodies(self, path):
        return [body for seen, body in self.seen if seen == path]

    async def answer(self, call):
        await trio.lowlevel.checkpoint()
        body: Any = json.loads(call.body) if call.body else None
        self.seen.append((call.path, body))
        session = call.headers.get("cookie", "").removeprefix("gym=")
        if (fault := self.faults.get(call.path)) is not None:
            return fault if isinstance(fault, Answer) else await fault(body)
        match call.path:
            case "/seed_session":
                session = f"s{next(self._numbers)}"
                self.sums[session] = 0
                return Answer(200, b"{}", headers=(("Set-Cookie", f"gym={session}; path=/; httponly"),))
            case "/add":
                if not isinstance(body.get("count"), int):
                    return Answer(422, b'{"detail": "count is no integer"}')
                self.sums[session] += body["count"]
                return Answer(200, b'{"success": true}')
            case "/verify":
                reward = float(self.sums[session] == body["expected"])
                return Answer(200, msgspec.json.encode({**body, "reward": reward, "sum": self.sums[session]}))
        return Answer(404, b'{"detail": "Not Found"}')


@asynccontextmanager
async def open_counter_server():
    server = CounterServer()
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    server.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"

    async def serve():
        with server.scope:
            await trio.serve_listeners(partial(serve_http, handle=server.answer), [listener])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        yield server
        nursery.cancel_scope.cancel()
