"""Recorded runs over HTTP: the viewer's page, and what it asks for, behind the one server of this project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import trio

from prorl_trio.edges.auth import Door
from prorl_trio.edges.requests import ErrorDetail
from prorl_trio.edges.responses import Response
from prorl_trio.edges.rest.app import RestApp
from prorl_trio.edges.rest.call import ApiError, Endpoint
from prorl_trio.edges.rest.schema import NoQuery
from prorl_trio.edges.serve import Server
from prorl_trio.edges.tcp import open_listeners
from prorl_trio.edges.viewer.pages import viewer_endpoints
from prorl_trio.runs.index import RowFilter, groups_of
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.config import ListenConfig
    from prorl_trio.edges.rest.call import Call
    from prorl_trio.runs.book import RunBook

Offset = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=1000)]
MAX_TEXT_CHARS: Final = 1024 * 1024


class RunQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run: its path below the folder that is viewed."""

    run: str


class RowsQuery(RowFilter, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of a run that are listed, and the page of them."""

    run: str
    offset: Offset = 0
    limit: Limit = 100


class RolloutQuery(RunQuery, frozen=True, kw_only=True):
    """A rollout of a run."""

    job: str


class WindowQuery(RolloutQuery, frozen=True, kw_only=True):
    """A window of a rollout: of the characters of a text, or of the tokens of a segment."""

    part: str = ""
    segment: Offset = 0
    offset: Offset = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_TEXT_CHARS)] = 1000


def run_endpoints(book: RunBook) -> list[Endpoint]:
    """Return the endpoints that show the runs of `book`."""

    def runs(_query: Any) -> object:
        found = [run.describe() for run in book.runs()]
        return {"root": str(book.root), "runs": sorted(found, key=lambda each: -each["changed_s"])}

    def about(query: Any) -> object:
        return book.run(query.run).about()

    def rollouts(query: Any) -> object:
        rows = book.index(query.run).select(query)
        return {"total": len(rows), "rows": rows[query.offset : query.offset + query.limit]}

    def groups(query: Any) -> object:
        return page_of_groups(groups_of(book.index(query.run).select(query)), query)

    def rollout(query: Any) -> object:
        row = book.index(query.run).row(query.job)
        siblings = book.index(query.run).select(RowFilter(group=row.group_id)) if row.group_id else [row]
        view = book.rollout(query.run, query.job).about
        return {**view, "row": row, "siblings": [[each.job_id, each.reward] for each in siblings]}

    def text(query: Any) -> object:
        return book.rollout(query.run, query.job).text(query.part, query.offset, query.limit)

    def tokens(query: Any) -> object:
        return book.rollout(query.run, query.job).tokens(query.segment, query.offset, query.limit)

    def outcome(query: Any) -> object:
        return book.rollout(query.run, query.job).outcome

    return [
        _endpoint("/v1/runs", runs, NoQuery, "The recorded runs of the folder, the latest first."),
        _endpoint("/v1/runs/about", about, RunQuery, "A run's figures and learning curve, and values for filters."),
        _endpoint(
            "/v1/runs/rollouts", rollouts, RowsQuery, "The rollouts that match a filter, sorted, a page of them."
        ),
        _endpoint("/v1/runs/groups", groups, RowsQuery, "The same by group, with the rewards of each."),
        _endpoint("/v1/runs/rollout", rollout, RolloutQuery, "A rollout without its tokens; long texts are cut."),
        _endpoint("/v1/runs/text", text, WindowQuery, "A part of a long text of a rollout."),
        _endpoint("/v1/runs/tokens", tokens, WindowQuery, "A window of a segment's tokens, 4,096 at most."),
        _endpoint("/v1/runs/outcome", outcome, RolloutQuery, "A rollout's outcome as it was recorded."),
    ]


def page_of_groups(groups: list[dict[str, Any]], query: RowsQuery) -> dict[str, Any]:
    """Return a page of groups. Sorted by reward they are by their mean, by tokens by their sum; else as their rows."""
    key = {"reward": "mean", "sampled": "sampled"}.get(query.sort)
    if key is not None:
        known = [group for group in groups if group[key] is not None]
        known.sort(key=lambda group: group[key], reverse=query.descending)
        groups = known + [group for group in groups if group[key] is None]
    return {"total": len(groups), "groups": groups[query.offset : query.offset + query.limit]}


def _endpoint(path: str, find: Callable[[Any], object], query: type[msgspec.Struct], summary: str) -> Endpoint:
    def work(wanted: Any) -> bytes:
        try:
            return msgspec.json.encode(find(wanted), enc_hook=str)
        except (ConfigError, OSError) as exc:
            raise ApiError(422, ErrorDetail(code="unreadable", message=str(exc))) from exc

    async def answer(call: Call) -> Response:
        body = await run_sync(work, call.query)
        return Response(body, headers={"Cache-Control": "no-store"}, media_type="application/json")

    return Endpoint(
        method="GET",
        path=path,
        handler=answer,
        summary=summary,
        query=query,
        replies={200: None},
        errors=(404,),
        operation_id=path.removeprefix("/v1/").replace("/", "_"),
    )


async def serve_runs(
    book: RunBook,
    listen: ListenConfig,
    *,
    follow: bool = False,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the runs of `book` until cancelled. Reports the (host, port) of the listener through `task_status`.

    Requests need the token of `listen`, the page itself none. With `follow` the page asks for what is new.

    Raises:
        ConfigError: the address cannot be bound.
    """
    door = Door(listen.token.encode(), listen.hosts, [listen.host])
    app = RestApp(None, [*viewer_endpoints("follow" if follow else "runs"), *run_endpoints(book)])
    listeners = await open_listeners(listen)
    server = Server(app, None, listen, door, trio.Event())
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run, listeners)
        host, port = listeners[0].socket.getsockname()[:2]
        task_status.started((host, port))
