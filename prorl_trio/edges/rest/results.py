"""`/v1/results`: a session's outcomes by cursor, as a long poll."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from prorl_trio.edges.rest.call import Call, Endpoint, Reply
from prorl_trio.edges.rest.schema import ResultEntry, ResultsQuery, ResultsReply

if TYPE_CHECKING:
    from prorl_trio.sessions.session import Session


async def results(call: Call) -> Reply:
    """Answer with the unacknowledged outcomes, oldest first. If `cursor` is given, first acknowledge up to it.

    Waits up to `wait` seconds for a first outcome. A client that lost the answer repeats the request with the same
    cursor.
    """
    query: ResultsQuery = call.query
    config = call.api.config
    session = call.api.open_session(call.session_id, query.cursor or 0)
    if query.cursor is not None:
        session.ack(query.cursor)
    await call.api.wait_for(lambda: _first(session), query.wait)
    entries: list[ResultEntry] = []
    size_bytes = 0
    for place in list(islice(session.log.cursors(), min(query.limit, config.max_results_per_reply))):
        if (held := await session.outcome_at(place)) is None:  # acknowledged or deleted by another client
            continue
        size_bytes += len(held.outcome)
        if entries and size_bytes > config.max_reply_bytes:
            break
        entries.append(ResultEntry(cursor=held.cursor, job_id=held.job_id, outcome=held.decode()))
    cursor = entries[-1].cursor if entries else session.log.acked
    body = ResultsReply(
        session=session.session_id,
        cursor=cursor,
        more=cursor < session.log.last,
        running=session.running,
        results=entries,
    )
    return Reply(body=body, outcomes=len(entries))


async def _first(session: Session) -> None:
    while not len(session.log):
        await session.wait_arrival()


ENDPOINTS: Final = (
    Endpoint(
        method="GET",
        path="/v1/results",
        handler=results,
        summary="Outcomes that are not acknowledged, oldest first; `cursor` acknowledges everything up to it.",
        query=ResultsQuery,
        replies={200: ResultsReply},
        errors=(429,),
    ),
)
