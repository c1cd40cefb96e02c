"""Calls of a sandbox daemon for single files, transfers of whole trees, and edits. PROTOCOL.md describes them.

They are a part of `sandbox_calls.SandboxCall`. Sizes are bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every struct here: immutable, tagged with its class name, strict."""


class FileRead(_Wire, frozen=True):
    """Read up to `max_bytes` of the file at the absolute `path`, from `offset`."""

    path: str
    offset: int = 0
    max_bytes: int = 1024 * 1024


class FileData(_Wire, frozen=True):
    """Answer to `FileRead`. `size_bytes` is the size of the whole file; `eof`: the piece ends the file."""

    data: bytes
    size_bytes: int
    eof: bool


class FileWrite(_Wire, frozen=True):
    """Write `data` to the absolute `path`, creating parents. `append` adds to the end; 420 is the mode 0644."""

    path: str
    data: bytes
    append: bool = False
    mode: int = 0o644


class FileWritten(_Wire, frozen=True):
    """Answer to `FileWrite`. `size_bytes` is the size of the whole file afterwards."""

    size_bytes: int


# ---------------------------------------------------------------- transfers of files and folders


class TreeEntry(_Wire, frozen=True):
    """A member of a tree. A folder precedes its members; a file's content follows it.

    Attributes:
        path: relative path with `/` between names; empty for the root, which comes first.
        kind: type of the member.
        mode: permission bits.
        target: text of a symbolic link, or the path in the tree of a hard link's file.
    """

    path: bytes
    kind: Literal["folder", "file", "symlink", "hardlink"]
    mode: int
    target: bytes = b""


class TreeContent(_Wire, frozen=True):
    """The next bytes, at least one, of the file of the last entry."""

    data: bytes


TreePart = TreeEntry | TreeContent


class UploadBegin(_Wire, frozen=True):
    """Begin an upload to the absolute `path`, which must lie below one of `roots` (`~`: the home).

    Without `overwrite`, the path must not exist. The whole tree appears with `UploadEnd`. The caller chooses
    `transfer_id`, which must be unique among open transfers. At most four may be open.
    """

    transfer_id: int
    path: str
    roots: list[str]
    overwrite: bool
    max_bytes: int
    max_entries: int


class DownloadBegin(_Wire, frozen=True):
    """Begin a download of the file or folder at the absolute `path`, which is in `roots` or below one."""

    transfer_id: int
    path: str
    roots: list[str]
    max_bytes: int
    max_entries: int


class TransferBegun(_Wire, frozen=True):
    """Answer to `UploadBegin` and `DownloadBegin`."""


class UploadParts(_Wire, frozen=True):
    """The next parts of an upload: about 1 MiB at most."""

    transfer_id: int
    parts: list[TreePart]


class UploadTaken(_Wire, frozen=True):
    """Answer to `UploadParts`: the parts are written."""


class UploadEnd(_Wire, frozen=True):
    """The tree is complete: move it to its path."""

    transfer_id: int


class UploadEnded(_Wire, frozen=True):
    """Answer to `UploadEnd`: the tree is at its path."""


class DownloadParts(_Wire, frozen=True):
    """Request the next parts of a download."""

    transfer_id: int


class TreeParts(_Wire, frozen=True):
    """Answer to `DownloadParts`: at least one part, unless `done`, which ends the transfer.

    With `done`, `left_out` names the first 100 omitted members, and `left_out_total` counts all: links that lead out of
    the tree, devices, pipes, sockets, and members that vanished.
    """

    parts: list[TreePart]
    done: bool
    left_out: list[bytes] = []
    left_out_total: int = 0


class TransferAbort(_Wire, frozen=True):
    """Abort a transfer and remove its data. An unknown or ended transfer is ignored."""

    transfer_id: int


class TransferAborted(_Wire, frozen=True):
    """Answer to `TransferAbort`."""


# ---------------------------------------------------------------- editor


class EditFile(_Wire, frozen=True):
    """A call of an agent's `str_replace_editor`. The editor checks which fields a `command` needs.

    `command` is `view` (`view_range`), `create` (`file_text`), `str_replace` (`old_str`, `new_str`), `insert`
    (`insert_line`, `new_str`) or `undo_edit`. At most `max_output_bytes` of numbered lines are shown.
    """

    command: str
    path: str
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: int | None = None
    view_range: list[int] | None = None
    max_output_bytes: int = 16 * 1024


class FileEdited(_Wire, frozen=True):
    """Answer to `EditFile`. `output` is the text for the agent. `ok` is False if the edit was refused."""

    output: str
    ok: bool
