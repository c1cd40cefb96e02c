"""The structs that cross the Unix socket between a node and a sandbox daemon. Text of the protocol: PROTOCOL.md.

Two layers, both msgpack by msgspec, both tagged unions that refuse unknown fields:

* the **envelope** (`Hello` .. `Failure`) is what `rpc.py` understands; its bodies are opaque `msgspec.Raw`;
* the **sandbox calls** (`SandboxCall`) and their replies are what the daemon understands. Each call's reply type is
  in `REPLY_OF`.

A result's `breach` is the limit of the sandbox that was run into since the result before, empty if none; `breach_text`
says in a sentence what it was and what was done about it.

Sizes are bytes, times are seconds. Times on the wire are relative (a budget, not a clock reading).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ipc.limits import Breach

__all__ = [
    "MAX_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "REPLY_OF",
    "BashInput",
    "BashRestart",
    "BashRestarted",
    "BashResult",
    "BashRun",
    "Cancel",
    "CellError",
    "CellResult",
    "Chunk",
    "Display",
    "DownloadBegin",
    "DownloadParts",
    "EditFile",
    "Envelope",
    "Exec",
    "ExecResult",
    "Failure",
    "FileData",
    "FileEdited",
    "FileRead",
    "FileWrite",
    "FileWritten",
    "Hello",
    "HelloOk",
    "IpythonRestart",
    "IpythonRestarted",
    "IpythonRun",
    "Ping",
    "Pong",
    "Refused",
    "Request",
    "Result",
    "SandboxCall",
    "SandboxReply",
    "TransferAbort",
    "TransferAborted",
    "TransferBegun",
    "TreeContent",
    "TreeEntry",
    "TreePart",
    "TreeParts",
    "UploadBegin",
    "UploadEnd",
    "UploadEnded",
    "UploadParts",
    "UploadTaken",
]

PROTOCOL_VERSION = 1
"""Changes with every incompatible change of a struct below. Peers of different versions refuse each other."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Default maximum of one frame's payload."""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every struct on the wire: immutable, tagged with its class name, strict."""


# ---------------------------------------------------------------- envelope


class Hello(_Wire, frozen=True):
    """First frame of a connection, client to server."""

    version: int
    token: str


class HelloOk(_Wire, frozen=True):
    """The server accepts. `pid` is the server's, in its own PID namespace."""

    version: int
    pid: int


class Refused(_Wire, frozen=True):
    """The server refuses and closes. `code` is `version`, `token` or `protocol`."""

    code: Literal["version", "token", "protocol"]
    message: str


class Request(_Wire, frozen=True):
    """One call. `id` is unique on this connection and never reused; `timeout_s` is what is left of its budget.

    After `timeout_s` the server cancels the handler and answers `Failure(code="timeout")`.
    """

    id: int
    timeout_s: float
    body: msgspec.Raw


class Cancel(_Wire, frozen=True):
    """Stop call `id`. It is still answered, by `Failure(code="cancelled")` unless its result was already sent.
    A cancel for an unknown or answered id is ignored."""

    id: int


class Chunk(_Wire, frozen=True):
    """A piece of streamed output of call `id`, before its answer. `stream` names which."""

    id: int
    stream: str
    data: bytes


class Result(_Wire, frozen=True):
    """Call `id` succeeded. Its last frame."""

    id: int
    body: msgspec.Raw


class Failure(_Wire, frozen=True):
    """Call `id` failed. Its last frame. `code` is machine-readable (`timeout`, `cancelled`, `bad_request`, ...)."""

    id: int
    code: str
    message: str


Envelope = Hello | HelloOk | Refused | Request | Cancel | Chunk | Result | Failure


# ---------------------------------------------------------------- sandbox calls


class Ping(_Wire, frozen=True):
    """Is the daemon alive?"""


class Pong(_Wire, frozen=True):
    """Answer to `Ping`. `uptime_s` since the daemon listened, `open_fds` of the daemon process."""

    uptime_s: float
    open_fds: int


class BashRun(_Wire, frozen=True):
    """Run `command` in the persistent shell. Refused with the code `busy` while a command is still running there.

    After `timeout_s` the foreground process group is interrupted and then killed; if the shell itself does not come
    back, it is killed with everything in its session and started anew (`restarted`). With `quiet_timeout_s`, the call
    is answered (`running`) when that long no output came; the command goes on, and `BashInput` follows it up.
    Of the output at most `max_output_bytes` are kept: the first and the last half. It is plain text, or, if `raw`,
    what the terminal got. With `stream` it is sent as it comes as well, as chunks of stream `output`, always raw.
    """

    command: str
    timeout_s: float
    max_output_bytes: int = 64 * 1024
    stream: bool = False
    quiet_timeout_s: float | None = None
    raw: bool = False


class BashInput(_Wire, frozen=True):
    """Type `keys` into the terminal of the command that is still running, and wait for it as `BashRun` does.

    0x03 interrupts (C-c), 0x04 ends its input (C-d), 0x1a stops it (C-z); no keys: only wait. Keys are dropped if the
    command has ended meanwhile, which the result tells. Without a command to follow up: the code `not_running`.
    """

    keys: bytes
    timeout_s: float
    max_output_bytes: int = 64 * 1024
    stream: bool = False
    quiet_timeout_s: float | None = None
    raw: bool = False


class BashResult(_Wire, frozen=True):
    """What a command did since the call before.

    `output` is the terminal's (stdout and stderr in order), decoded as UTF-8 with replacement, newlines plain.
    `exit_code` is None if the command was killed by the timeout, took the shell with it and left no code, or is still
    `running`. `dropped_bytes` were left out in the middle of `output`, where a line says so. `cwd` is the shell's
    afterwards. `restarted`: the shell was lost (`exit`, `exec`, killed, or timed out beyond rescue); a new one has
    taken its place, without the old one's variables, functions and working directory.
    """

    output: str
    exit_code: int | None
    cwd: str
    duration_s: float
    timed_out: bool = False
    restarted: bool = False
    dropped_bytes: int = 0
    running: bool = False
    breach: Breach = ""
    breach_text: str = ""


class BashRestart(_Wire, frozen=True):
    """Kill the shell with everything in its session, also a running command, and start a new one."""


class BashRestarted(_Wire, frozen=True):
    """Answer to `BashRestart`: the new shell is ready. `pid` is its own, in the daemon's PID namespace."""

    pid: int


class IpythonRun(_Wire, frozen=True):
    """Run one cell in the persistent shell of `kernel`, started on first use.

    `kernel` is empty for the IPython that comes with the daemon, or the name of an installed Jupyter kernelspec.
    After `timeout_s` the cell is interrupted (KeyboardInterrupt); if it does not end, the shell is killed and started
    anew (`restarted`). Stdout and stderr are each capped to `max_output_bytes`, head and tail kept.
    """

    code: str
    timeout_s: float
    max_output_bytes: int = 64 * 1024
    stream: bool = False
    kernel: str = ""


class CellError(_Wire, frozen=True):
    """An exception that ended a cell. `traceback` is plain text without colour codes."""

    name: str
    value: str
    traceback: str


class Display(_Wire, frozen=True):
    """Something a cell showed beside text: an image (`image/png`, `image/jpeg`), `image/svg+xml` or `text/html`.

    `data` is the image's file as it is; empty if only named: whatever is no PNG or JPEG, and what the limits leave out
    (4 MiB a cell, all images together). `size_bytes` is its size in either case.
    """

    mime: str
    data: bytes
    size_bytes: int


class CellResult(_Wire, frozen=True):
    """What a cell did. `result` is the `repr` of its last expression, None if there was none.

    `displays` are in order, results with a rich form and open matplotlib figures among them; `dropped_displays` counts
    those beyond the first 32.
    """

    stdout: str
    stderr: str
    result: str | None
    error: CellError | None
    execution_count: int
    duration_s: float
    timed_out: bool = False
    restarted: bool = False
    dropped_bytes: int = 0
    displays: list[Display] = []
    dropped_displays: int = 0
    breach: Breach = ""
    breach_text: str = ""


class IpythonRestart(_Wire, frozen=True):
    """Throw the state of a kernel's shell away and start a new one. `kernel` as in `IpythonRun`."""

    kernel: str = ""


class IpythonRestarted(_Wire, frozen=True):
    """Answer to `IpythonRestart`: the new shell is ready. `pid` is its own, in the daemon's PID namespace."""

    pid: int


# ---------------------------------------------------------------- one-shot commands


class Exec(_Wire, frozen=True):
    """Run `argv` (no shell) to its end, in a session of its own, with `stdin` as its whole input.

    `cwd` empty is where shells start; `env` is added to the tools' environment. After `timeout_s` it is killed, and
    however it ends, so is what it left running. Of stdout and of stderr at most `max_output_bytes` are kept each.
    """

    argv: list[str]
    timeout_s: float
    cwd: str = ""
    env: dict[str, str] = {}
    stdin: bytes = b""
    max_output_bytes: int = 1024 * 1024


class ExecResult(_Wire, frozen=True):
    """What a one-shot command did. `exit_code` is 128 + n after signal n, None if the timeout ended it.

    Output is as it was written, not decoded. `*_dropped_bytes` were left out in the middle, where a line says so.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    duration_s: float
    timed_out: bool = False
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    breach: Breach = ""
    breach_text: str = ""


# ---------------------------------------------------------------- files


class FileRead(_Wire, frozen=True):
    """Read up to `max_bytes` of the file at the absolute `path`, from `offset`."""

    path: str
    offset: int = 0
    max_bytes: int = 1024 * 1024


class FileData(_Wire, frozen=True):
    """A part of a file. `size_bytes` is the whole file's."""

    data: bytes
    size_bytes: int
    eof: bool


class FileWrite(_Wire, frozen=True):
    """Write `data` to the absolute `path` (parents are made). `append` adds to the end instead of replacing."""

    path: str
    data: bytes
    append: bool = False
    mode: int = 0o644


class FileWritten(_Wire, frozen=True):
    """Answer to `FileWrite`. `size_bytes` is the whole file's afterwards."""

    size_bytes: int


# ---------------------------------------------------------------- transfers of files and folders


class TreeEntry(_Wire, frozen=True):
    """One member of a tree. `path` is relative, `/` between names, empty for the root, which comes first.

    A folder comes before what is in it. `mode` has permission bits only. `target` is a symbolic link's text, or the
    path of the file in the tree of which a hard link is a second name. A file's content follows it.
    """

    path: bytes
    kind: Literal["folder", "file", "symlink", "hardlink"]
    mode: int
    target: bytes = b""


class TreeContent(_Wire, frozen=True):
    """The next bytes, at least one, of the file whose entry came last."""

    data: bytes


TreePart = TreeEntry | TreeContent


class UploadBegin(_Wire, frozen=True):
    """Begin to make the file or folder at the absolute `path`, which must lie below one of `roots` (`~`: the home).

    Without `overwrite` nothing may be there. It appears with `UploadEnd`, whole. `transfer_id` is the caller's choice,
    unlike those of open transfers, of which there may be four.
    """

    transfer_id: int
    path: str
    roots: list[str]
    overwrite: bool
    max_bytes: int
    max_entries: int


class DownloadBegin(_Wire, frozen=True):
    """Begin to read the file or folder at the absolute `path`, which must lie below one of `roots` or be one."""

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
    """Answer to `UploadParts`: they are written."""


class UploadEnd(_Wire, frozen=True):
    """That was all: give the tree its name."""

    transfer_id: int


class UploadEnded(_Wire, frozen=True):
    """Answer to `UploadEnd`: the tree is there."""


class DownloadParts(_Wire, frozen=True):
    """Ask for the next parts of a download."""

    transfer_id: int


class TreeParts(_Wire, frozen=True):
    """Answer to `DownloadParts`: at least one part, unless `done`, which ends the transfer.

    With `done`, `left_out` names the first 100 of what was left out, and `left_out_total` counts all of it: links that
    lead out of the tree, devices, pipes, sockets, what vanished meanwhile.
    """

    parts: list[TreePart]
    done: bool
    left_out: list[bytes] = []
    left_out_total: int = 0


class TransferAbort(_Wire, frozen=True):
    """Forget a transfer; nothing of it is left. An unknown or ended one is fine."""

    transfer_id: int


class TransferAborted(_Wire, frozen=True):
    """Answer to `TransferAbort`."""


# ---------------------------------------------------------------- editor


class EditFile(_Wire, frozen=True):
    """One call of an agent's `str_replace_editor`. Which fields a `command` needs is checked there, and told there.

    `command` is `view` (`view_range`), `create` (`file_text`), `str_replace` (`old_str`, `new_str`), `insert`
    (`insert_line`, `new_str`) or `undo_edit`. Of numbered lines at most `max_output_bytes` are shown.
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
    """Answer to `EditFile`: what the agent reads. `ok` is False if nothing was done; `output` says why."""

    output: str
    ok: bool


SandboxCall = (
    Ping
    | Exec
    | BashRun
    | BashInput
    | BashRestart
    | IpythonRun
    | IpythonRestart
    | FileRead
    | FileWrite
    | EditFile
    | UploadBegin
    | UploadParts
    | UploadEnd
    | DownloadBegin
    | DownloadParts
    | TransferAbort
)
SandboxReply = (
    Pong
    | ExecResult
    | BashResult
    | BashRestarted
    | CellResult
    | IpythonRestarted
    | FileData
    | FileWritten
    | FileEdited
    | TransferBegun
    | UploadTaken
    | UploadEnded
    | TreeParts
    | TransferAborted
)

REPLY_OF: dict[type[SandboxCall], type[SandboxReply]] = {
    Ping: Pong,
    Exec: ExecResult,
    BashRun: BashResult,
    BashInput: BashResult,
    BashRestart: BashRestarted,
    IpythonRun: CellResult,
    IpythonRestart: IpythonRestarted,
    FileRead: FileData,
    FileWrite: FileWritten,
    EditFile: FileEdited,
    UploadBegin: TransferBegun,
    UploadParts: UploadTaken,
    UploadEnd: UploadEnded,
    DownloadBegin: TransferBegun,
    DownloadParts: TreeParts,
    TransferAbort: TransferAborted,
}
