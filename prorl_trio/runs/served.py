"""Recorded runs over HTTP: the viewer's page and its data, on the project's own server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import trio

from prorl_trio.edges.auth import Door
from prorl_trio.edges.requests import ErrorDetail
from prorl_trio.edges.responses import Response
from prorl_trio.edges.rest.app import RestApp
from prorl_trio.edges.rest.call import ApiError, Endpoint
from prorl_trio.edges.serve import Server
from prorl_trio.edges.tcp import open_listeners
from prorl_trio.edges.viewer.pages import viewer_endpoints
from prorl_trio.runs.book import shown_path
from prorl_trio.runs.index import RowFilter, groups_of
from prorl_trio.runs.rollout_view import keyed
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.config import ListenConfig
    from prorl_trio.edges.rest.call import Call
    from prorl_trio.runs.book import RunBook

Place = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


class ViewQuery(RowFilter, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of all requests. Each request reads only the ones it needs.

    Attributes:
        run: the run's path below the viewed folder. `job`: the id of one of its rollouts.
        part, segment: the name of a long text, or the number of a segment, of that rollout.
        offset, limit: the window of rows, characters or tokens.
    """

    run: str = ""
    job: str = ""
    part: str = ""
    segment: Place = 0
    offset: Place = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1024 * 1024)] = 100


def run_endpoints(book: RunBook) -> list[Endpoint]:
    """Return the endpoints that show the runs of `book`."""

    def runs(_query: ViewQuery) -> object:
        found = [run.describe() for run in book.runs()]
        return {"root": shown_path(book.root), "runs": sorted(found, key=lambda each: -each["changed_s"])}

    def about(query: ViewQuery) -> object:
        return book.run(query.run).about()

    def rollouts(query: ViewQuery) -> object:
        rows = book.index(query.run).select(query)
        return {"total": len(rows), "rows": rows[query.offset : query.offset + query.limit]}

    def groups(query: ViewQuery) -> object:
        return page_of_groups(groups_of(book.index(query.run).select(query)), query)

    def rollout(query: ViewQuery) -> object:
        row = book.index(query.run).row(query.job)
        siblings = book.index(query.run).select(RowFilter(group=row.group_id)) if row.group_id else [row]
        view = book.rollout(query.run, query.job).about
        return {**view, "row": row, "siblings": [[each.job_id, each.reward] for each in siblings]}

    def text(query: ViewQuery) -> object:
        return book.rollout(query.run, query.job).text(query.part, query.offset, query.limit)

    def tokens(query: ViewQuery) -> object:
        return book.rollout(query.run, query.job).tokens(query.segment, query.offset, query.limit)

    def outcome(query: ViewQuery) -> object:
        found = book.index(query.run).read(query.job)
        return msgspec.structs.replace(found, details=keyed(found.details))

    return [
        _endpoint("/v1/runs", runs, "The recorded runs of the folder, the latest first."),
        _endpoint("/v1/runs/about", about, "A run's figures and learning curve, and values for filters."),
        _endpoint("/v1/runs/rollouts", rollouts, "The rollouts that match a filter, sorted, a page of them."),
        _endpoint("/v1/runs/groups", groups, "The same by group, with the rewards of each."),
        _endpoint("/v1/runs/rollout", rollout, "A rollout without its tokens; long texts are cut."),
        _endpoint("/v1/runs/text", text, "A part of a long text of a rollout."),
        _endpoint("/v1/runs/tokens", tokens, "A window of a segment's tokens, 4,096 at most."),
        _endpoint("/v1/runs/outcome", outcome, "A rollout's outcome as it was recorded."),
    ]


def page_of_groups(groups: list[dict[str, Any]], query: ViewQuery) -> dict[str, Any]:
    """Return a page of groups. Sorting by reward uses their mean, by tokens their sum; otherwise the order of rows."""
    key = {"reward": "mean", "sampled": "sampled"}.get(query.sort)
    if key is not None:
        known = [group for group in groups if group[key] is not None]
        known.sort(key=lambda group: group[key], reverse=query.descending)
        groups = known + [group for group in groups if group[key] is None]
    return {"total": len(groups), "groups": groups[query.offset : query.offset + query.limit]}


def _endpoint(path: str, find: Callable[[ViewQuery], object], summary: str) -> Endpoint:
    def work(wanted: ViewQuery) -> bytes:
        try:
            return msgspec.json.encode(find(wanted), enc_hook=str)
        except (ConfigError, OSError, RecursionError) as exc:
            raise ApiError(422, ErrorDetail(code="unreadable", message=str(exc))) from exc
        except (IndexError, ValueError) as exc:  # someone has changed it
            said = f"the recorded outcome contradicts itself: {exc!r}"
            raise ApiError(422, ErrorDetail(code="unreadable", message=said)) from exc

    async def answer(call: Call) -> Response:
        body = await run_sync(work, call.query)
        return Response(body, headers={"Cache-Control": "no-store"}, media_type="application/json")

    return Endpoint(
        method="GET",
        path=path,
        handler=answer,
        summary=summary,
        query=ViewQuery,
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

    Requests need the token of `listen`, but the page itself needs none. With `follow` the page polls for new outcomes.

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
