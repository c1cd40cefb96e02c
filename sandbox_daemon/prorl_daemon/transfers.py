"""Uploads and downloads in progress, at the sandbox's end: where they may be, who works on them, how they end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import trio

from prorl_daemon.files import file_error
from prorl_daemon.threads import run_blocking
from prorl_ipc.file_calls import (
    DownloadBegin,
    DownloadParts,
    TransferAbort,
    TransferAborted,
    TransferBegun,
    TreeParts,
    UploadBegin,
    UploadEnd,
    UploadEnded,
    UploadParts,
    UploadTaken,
)
from prorl_ipc.server import CallError
from prorl_ipc.tree import TreeLimits, TreeRefused
from prorl_ipc.tree_reader import TreeReader
from prorl_ipc.tree_writer import TreeWriter

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_TRANSFERS = 4
END_TIMEOUT_S = 30.0
"""For the removal of what an ended transfer leaves."""

TransferCall = UploadBegin | UploadParts | UploadEnd | DownloadBegin | DownloadParts | TransferAbort
TransferReply = TransferBegun | UploadTaken | UploadEnded | TreeParts | TransferAborted
T = TypeVar("T")


class Transfers:
    """All open transfers of a daemon. A transfer that fails, or of which a call is cancelled, has left nothing."""

    def __init__(self, *, home: str, limiter: trio.CapacityLimiter) -> None:
        self._home = home
        self._limiter = limiter
        self._open: dict[int, TreeReader | TreeWriter] = {}
        self._busy: set[int] = set()

    def __repr__(self) -> str:
        return f"<Transfers: {len(self._open)} open, {len(self._busy)} at work>"

    async def answer(self, call: TransferCall) -> TransferReply:
        """Do the next step of a transfer. A cancelled call returns when the step that is on its way has ended.

        Raises:
            CallError: `permission` (outside of the roots), `busy`, `no_transfer`, `unsafe`, `too_large`, `exists`,
                `bad_request`, or a code of `files`.
        """
        if call.transfer_id in self._busy:
            raise CallError("busy", f"transfer {call.transfer_id} is at work; one call at a time")
        self._busy.add(call.transfer_id)
        ended = True
        try:
            reply = await self._step(call)
            ended = isinstance(reply, UploadEnded | TransferAborted) or (isinstance(reply, TreeParts) and reply.done)
            return reply
        finally:
            if ended:
                with trio.move_on_after(END_TIMEOUT_S, shield=True):
                    await self._end(call.transfer_id)
            self._busy.discard(call.transfer_id)

    def close(self) -> None:
        """End all transfers. For the end of the daemon: blocks."""
        while self._open:
            self._open.popitem()[1].close()

    async def _step(self, call: TransferCall) -> TransferReply:
        tree = self._open.get(call.transfer_id)
        match call, tree:
            case UploadBegin() | DownloadBegin(), None:
                if len(self._open) >= MAX_TRANSFERS:
                    raise CallError("busy", f"{MAX_TRANSFERS} transfers are open; end one of them")
                opened = await self._in_thread(lambda: self._begin(call), call.path)
                self._open[call.transfer_id] = opened
                return TransferBegun()
            case UploadParts(parts=parts), TreeWriter():
                await self._in_thread(lambda: tree.take(parts), "upload")
                return UploadTaken()
            case UploadEnd(), TreeWriter():
                await self._in_thread(tree.finish, "upload")
                return UploadEnded()
            case DownloadParts(), TreeReader():
                return await self._in_thread(lambda: _next_parts(tree), "download")
            case TransferAbort(), _:
                await trio.lowlevel.checkpoint()
                return TransferAborted()
        raise CallError("no_transfer", f"{type(call).__name__}: there is no such transfer {call.transfer_id}")

    def _begin(self, call: UploadBegin | DownloadBegin) -> TreeReader | TreeWriter:
        if any("\0" in each for each in (call.path, *call.roots)):
            raise CallError("bad_request", "path, roots: one holds a NUL")
        if not os.path.isabs(call.path):
            raise CallError("not_absolute", f"{call.path!r} is not an absolute path")
        limits = TreeLimits(max_bytes=call.max_bytes, max_entries=call.max_entries)
        path = os.path.normpath(call.path)
        if isinstance(call, DownloadBegin):
            real = os.path.realpath(path)
            self._check_roots(real, call.roots, below=False)
            return TreeReader(os.fsencode(real), limits)
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        self._check_roots(real, call.roots, below=True)
        return TreeWriter(os.fsencode(real), limits, overwrite=call.overwrite)

    def _check_roots(self, real: str, roots: list[str], *, below: bool) -> None:
        for root in roots:
            real_root = os.path.realpath(self._home if root == "~" else root)
            if real.startswith(real_root.rstrip("/") + "/") or (real == real_root and not below):
                return
        raise CallError("permission", f"{real} is not below any of the allowed roots: {', '.join(roots)}")

    async def _in_thread(self, action: Callable[[], T], path: str) -> T:
        try:
            return await run_blocking(action, limiter=self._limiter)
        except TreeRefused as exc:
            raise CallError(exc.code, exc.message) from exc
        except OSError as exc:
            raise file_error(exc, path) from exc

    async def _end(self, transfer_id: int) -> None:
        tree = self._open.pop(transfer_id, None)
        if tree is not None:
            await run_blocking(tree.close, limiter=self._limiter, or_here=True)


def _next_parts(tree: TreeReader) -> TreeParts:
    parts, done = tree.next_parts()
    if done:
        return TreeParts(parts=parts, done=True, left_out=tree.left_out, left_out_total=tree.left_out_total)
    return TreeParts(parts=parts, done=False)
