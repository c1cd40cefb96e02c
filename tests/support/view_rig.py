"""The viewer's servers for tests, in a thread with a loop of its own: over recorded runs, and over a node."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import trio

from prorl_trio.config import ListenConfig
from prorl_trio.runs.book import RunBook
from prorl_trio.runs.served import serve_runs
from support.fake_node import FakeNode
from support.fake_rest import TOKEN, open_rest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path


class Served(NamedTuple):
    """Where the page is, and what lets a test act in the server's loop."""

    url: str
    token: str
    node: FakeNode | None = None
    call: Callable[..., Any] = lambda *_: None

    @property
    def page(self) -> str:
        return f"{self.url}/ui#token={quote(self.token)}"


class ShownNode(FakeNode):
    """A node with a live state like a real one's."""

    def statistics(self) -> dict[str, object]:
        jobs = [
            {"job_id": job_id, "session_id": "s", "status": "run", "age_s": 9.0, "last_progress_s": 2.0, "turns": 2,
             "waiting_on": "tool bash", "stuck": False, "agent": "codex"}
            for job_id in self.live
        ]  # fmt: skip
        backends = [
            {"url": "http://gpu0:8000", "state": "active", "in_flight": 3, "max_tasks": 8, "kv_usage": 0.914,
             "engine_running": 3, "engine_waiting": 1, "policy_version": "7", "suspended": False, "error": ""},
            {"url": "http://gpu1:8000", "state": "down", "in_flight": 0, "error": "no \x1b[2Janswer"},
        ]  # fmt: skip
        return {
            "node_id": "n1", "members": {"member-1": {"host": "h1", "connected": False}}, "left_out": {"b": "x"},
            "draining": False, "uptime_s": trio.current_time() % 1e6, "jobs": jobs,
            "totals": {"jobs_ended": len(self.submitted) - len(self.live), "turns": 200, "tokens_sampled": 5000},
            "loop": {"p99_ms": 3.0, "max_ms": 20.0},
            "pipeline": {
                "jobs": len(jobs), "outcomes": {"completed": 48, "failed": 2},
                "stages": {name: {"busy": 2, "workers": 4, "queued": 7} for name in ("init", "run", "eval")},
            },
            "sandboxes": {"provider": "apptainer", "live": 5, "warm": 2, "starting": 1, "started_total": 9},
            "backends": {"backends": backends},
        }  # fmt: skip


@contextmanager
def served(opened: Callable[[], AbstractAsyncContextManager[Served]]) -> Iterator[Served]:
    """Keep what `opened` opens open in a thread."""
    found: list[Served] = []
    errors: list[BaseException] = []
    ready, over = threading.Event(), trio.Event()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        async with opened() as one:
            found.append(one._replace(call=partial(trio.from_thread.run_sync, trio_token=tokens[0])))
            ready.set()
            await over.wait()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as exc:  # noqa: ASYNC103 - the test raises it
            errors.append(exc)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="viewer")
    thread.start()
    ready.wait(30)
    try:
        if errors:
            raise errors[0]
        yield found[0]
    finally:
        if not errors:
            trio.from_thread.run_sync(over.set, trio_token=tokens[0])
        thread.join(30)


@asynccontextmanager
async def runs_view(root: Path, *, follow: bool = False, model: Path | None = None) -> AsyncIterator[Served]:
    """Serve the viewer over recorded runs."""
    book = RunBook(root, model)
    async with trio.open_nursery() as nursery:
        serve = partial(serve_runs, book, ListenConfig(port=0, token=TOKEN), follow=follow)
        host, port = await nursery.start(serve)
        yield Served(f"http://{host}:{port}", TOKEN)
        nursery.cancel_scope.cancel()
    book.close()


@asynccontextmanager
async def node_view() -> AsyncIterator[Served]:
    """Serve the viewer over a node that a test drives."""
    node = ShownNode()
    async with open_rest(node) as rest:
        yield Served(rest.url, TOKEN, node)
