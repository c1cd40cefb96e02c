"""Uploads and downloads, at the node's end. Data from a sandbox is treated as hostile."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec
import trio

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
from prorl_ipc.tree import TreeLimits, TreeRefused
from prorl_ipc.tree_reader import TreeReader
from prorl_ipc.tree_writer import TreeWriter
from prorl_trio.threads import run_blocking

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from prorl_ipc.sandbox_calls import SandboxCall
    from prorl_ipc.tree import TreeCounts

STEP_TIMEOUT_S: Final = 60.0
"""Time limit for the sandbox's end to read or write one piece."""
END_TIMEOUT_S: Final = 30.0
"""Time limit for removing the leftovers of an ended transfer."""

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)
Tree = TypeVar("Tree", TreeReader, TreeWriter)


class TransferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a transfer of files and folders, in or out.

    Attributes:
        overwrite: replace an existing path as a whole. Otherwise an existing path is an error.
        max_bytes: limit for all files together.
        max_entries: limit of files, folders and links.
        remote_roots: allowed folders inside, with links resolved; `~` is the home directory.
    """

    overwrite: bool = False
    max_bytes: int = 4 * 1024**3
    max_entries: int = 200_000
    remote_roots: tuple[str, ...] = ("~", "/tmp", "/workspace", "/testbed")


DEFAULT_TRANSFER: Final = TransferOptions()


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report on a transfer.

    `left_out` names the first 100 skipped paths, and `left_out_total` counts all: links that lead out of the folder,
    devices, pipes, sockets, and paths that vanished during the transfer.
    """

    entries: int
    size_bytes: int
    left_out: tuple[str, ...] = ()
    left_out_total: int = 0


class Call(Protocol):
    """Sends one call to the daemon and returns its reply."""

    async def __call__(self, call: SandboxCall, reply_type: type[R], timeout_s: float, /) -> R: ...


async def upload_tree(
    call: Call,
    transfer_id: int,
    local: Path,
    remote: str,
    options: TransferOptions,
    on_progress: Callable[[int, int], None] | None,
) -> TransferReport:
    """See `Sandbox.upload`."""
    limits = _limits(options)
    async with (
        _opened(lambda: TreeReader(os.fsencode(os.path.realpath(local)), limits)) as reader,
        _remote(call, transfer_id),
    ):
        begin = UploadBegin(
            transfer_id=transfer_id,
            path=remote,
            roots=list(options.remote_roots),
            overwrite=options.overwrite,
            max_bytes=options.max_bytes,
            max_entries=options.max_entries,
        )
        await call(begin, TransferBegun, STEP_TIMEOUT_S)
        done = False
        while not done:
            parts, done = await _guarded(reader.next_parts)
            if parts:
                await call(UploadParts(transfer_id=transfer_id, parts=parts), UploadTaken, STEP_TIMEOUT_S)
                _tell(on_progress, reader.counts)
        await call(UploadEnd(transfer_id=transfer_id), UploadEnded, STEP_TIMEOUT_S)
        return _report(reader.counts, reader.left_out, reader.left_out_total)


async def download_tree(
    call: Call,
    transfer_id: int,
    remote: str,
    local: Path,
    options: TransferOptions,
    on_progress: Callable[[int, int], None] | None,
) -> TransferReport:
    """See `Sandbox.download`."""
    limits = _limits(options)

    def open_writer() -> TreeWriter:
        path = os.path.join(os.path.realpath(local.parent), local.name)
        return TreeWriter(os.fsencode(path), limits, overwrite=options.overwrite)

    async with (
        _opened(open_writer) as writer,
        _remote(call, transfer_id),
    ):
        begin = DownloadBegin(
            transfer_id=transfer_id,
            path=remote,
            roots=list(options.remote_roots),
            max_bytes=options.max_bytes,
            max_entries=options.max_entries,
        )
        await call(begin, TransferBegun, STEP_TIMEOUT_S)
        while True:
            piece = await call(DownloadParts(transfer_id=transfer_id), TreeParts, STEP_TIMEOUT_S)
            if not piece.parts and not piece.done:
                empty = TreeRefused("unsafe", f"{remote}: the sandbox sends pieces without anything in them")
                raise ValueError(empty.message) from empty
            await _guarded(partial(writer.take, piece.parts))
            _tell(on_progress, writer.counts)
            if piece.done:
                break
        await _guarded(writer.finish)
        return _report(writer.counts, piece.left_out, piece.left_out_total)


@asynccontextmanager
async def _opened(open_tree: Callable[[], Tree]) -> AsyncIterator[Tree]:
    tree = await _guarded(open_tree)
    try:
        yield tree
    finally:
        with trio.move_on_after(END_TIMEOUT_S, shield=True):
            await run_blocking(tree.close)


@asynccontextmanager
async def _remote(call: Call, transfer_id: int) -> AsyncIterator[None]:
    """End the transfer at the other side as well if the block ends early."""
    ended = False
    try:
        yield
        ended = True
    finally:
        if not ended:
            with trio.move_on_after(END_TIMEOUT_S, shield=True):
                await call(TransferAbort(transfer_id=transfer_id), TransferAborted, END_TIMEOUT_S)


async def _guarded(action: Callable[[], T]) -> T:
    try:
        return await run_blocking(action)
    except TreeRefused as exc:
        if exc.code == "exists":
            raise FileExistsError(exc.message) from exc
        raise ValueError(exc.message) from exc


def _limits(options: TransferOptions) -> TreeLimits:
    return TreeLimits(max_bytes=options.max_bytes, max_entries=options.max_entries)


def _tell(on_progress: Callable[[int, int], None] | None, counts: TreeCounts) -> None:
    if on_progress is not None:
        on_progress(counts.entries, counts.size_bytes)


def _report(counts: TreeCounts, left_out: list[bytes], left_out_total: int) -> TransferReport:
    names = tuple(name.decode(errors="backslashreplace") for name in left_out)
    return TransferReport(
        entries=counts.entries, size_bytes=counts.size_bytes, left_out=names, left_out_total=left_out_total
    )
