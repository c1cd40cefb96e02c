"""Checks of jobs by the fleet's nodes before the head accepts them: a malformed job is refused at submission."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import trio

from prorl_trio.types.errors import MalformedJob, ServiceError, UnknownHandler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorl_ipc.session import Rejected
    from prorl_trio.client.client import RolloutClient
    from prorl_trio.types.models import JobSpec

logger = logging.getLogger(__name__)

KEPT: Final = 100_000
"""Number of cached answers; the oldest is dropped."""
REFUSAL_S: Final = 10.0
"""Age after which a refusal is checked again: another node may have the handler, or more time."""
TIMEOUT_S: Final = 60.0
"""Limit of the wait for a node's answer. Jobs without an answer by then are not refused."""
JOBS_PER_REQUEST: Final = 200

_encode = msgspec.msgpack.Encoder().encode


class _Known(NamedTuple):
    refusal: ServiceError | None
    asked_s: float


class JobChecks:
    """The answers of nodes to `CheckJobs`, by the checked fields: the jobs of a group need only one check."""

    def __init__(self, choose: Callable[[], Sequence[RolloutClient]]) -> None:
        """Create an empty cache. `choose` returns the sessions on available nodes, the best one first."""
        self._choose = choose
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def is_unknown(self, spec: JobSpec) -> bool:
        """Return whether a node must check this job."""
        key = _key(spec)
        if key is None:
            return False
        known = self._known.get(key)
        return known is None or (known.refusal is not None and trio.current_time() - known.asked_s > REFUSAL_S)

    def refusal(self, spec: JobSpec) -> ServiceError | None:
        """Return why a node refuses such jobs; None if it accepts them or was not asked."""
        key = _key(spec)
        known = None if key is None else self._known.get(key)
        return None if known is None else known.refusal

    async def examine(self, specs: Sequence[JobSpec]) -> None:
        """Ask nodes about these jobs, one node at a time until one answers, for at most `TIMEOUT_S`. Safe to cancel."""
        wanted: dict[bytes, JobSpec] = {}
        for spec in specs:
            if (key := _key(spec)) is not None:
                wanted.setdefault(key, spec)
        keys = list(wanted)
        with trio.move_on_after(TIMEOUT_S):
            await trio.lowlevel.checkpoint()
            for start in range(0, len(keys), JOBS_PER_REQUEST):
                await self._ask({key: wanted[key] for key in keys[start : start + JOBS_PER_REQUEST]})

    async def _ask(self, wanted: dict[bytes, JobSpec]) -> None:
        for client in self._choose():
            try:
                answers = await client.check(list(wanted.values()))
            except ServiceError as exc:
                logger.info("node %s does not check jobs: %s", client.node_id, exc)
                continue
            refused = {answer.index: _error_of(answer) for answer in answers}
            for index, key in enumerate(wanted):
                self._known[key] = _Known(refused.get(index), trio.current_time())
                self._known.move_to_end(key)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            return


def _key(spec: JobSpec) -> bytes | None:
    """Return a hash of all that `NodeApi.validate` reads; None if the job contains a value that cannot be encoded."""
    try:
        content = _encode((spec.instance.handler, spec.instance.payload, spec.agent, spec.mcp))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return hashlib.blake2b(content, digest_size=16).digest()


def _error_of(answer: Rejected) -> ServiceError | None:
    """Return the error raised by the node; None if another node may answer differently."""
    if answer.code == UnknownHandler.code:
        return UnknownHandler(answer.message)
    return MalformedJob(answer.message, answer.path) if answer.code == MalformedJob.code else None
