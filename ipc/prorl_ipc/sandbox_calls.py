"""Calls of a sandbox daemon and their answers: bash, IPython, one-shot commands, files. Text: PROTOCOL.md.

`SandboxCall` is a tagged union that refuses unknown fields, `SandboxReply` what it is answered with. Both travel as
bodies in the envelope of `wire`.

A result's `breach` is the limit of the sandbox that was run into since the result before, empty if none; `breach_text`
says in a sentence what it was and what was done about it.

Sizes are bytes, times are seconds. Times on the wire are relative (a budget, not a clock reading).
"""

from __future__ import annotations

import msgspec

from prorl_ipc.file_calls import (
    DownloadBegin,
    DownloadParts,
    EditFile,
    FileData,
    FileEdited,
    FileRead,
    FileWrite,
    FileWritten,
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
from prorl_ipc.limits import Breach, NamespaceLimits

OWN_ERROR_EXIT = 70
"""Exit code of a daemon that an error of its own ended, and nothing that its tools can do: EX_SOFTWARE of sysexits."""

MAX_FORK_BYTES = 4096
"""Size of a packet."""
MAX_FORK_FDS = 16
"""Descriptors that may travel with one."""


class ForkSandbox(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Start a sandbox.

    Attributes:
        fds: the numbers by which its first process is to have the descriptors that come along, in their order.
        disk_bytes: of each of its file systems in memory: /tmp, /dev/shm and the home directory.
        limits: of its namespaces.
        prestart_ipython: fork its IPython as well.
    """

    fds: list[int]
    disk_bytes: int
    limits: NamespaceLimits
    prestart_ipython: bool = False


class Forked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """The answer.

    Attributes:
        pid: of the sandbox's first process, a child of the node, in the node's PID namespace; 0 where there is none.
        problem: why there is none; empty if there is.
    """

    pid: int = 0
    problem: str = ""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every struct here: immutable, tagged with its class name, strict."""


class Ping(_Wire, frozen=True):
    """Is the daemon alive?"""


class Pong(_Wire, frozen=True):
    """Answer to `Ping`. `uptime_s` since the daemon listened, `open_fds` of the daemon process."""

    uptime_s: float
    open_fds: int


class PortOpen(_Wire, frozen=True):
    """Listen on `port` of 127.0.0.1, of the sandbox's own network; 0: any free one.

    The listening socket is sent on the socket of the start line (`ports_fd`), with `PortOpened` as its message, and is
    the receiver's alone. Refused with the code `no_ports` where there is no such pair, and `io` if it cannot listen.
    """

    port: int = 0


class PortOpened(_Wire, frozen=True):
    """Answer to `PortOpen`."""

    port: int


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
    """Answer to `BashRun` and `BashInput`: the result of the command since the call before.

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
    """An exception that ended a cell.

    Attributes:
        traceback: plain text, without colour codes.
        errno: the number of an `OSError`; a Jupyter kernel says none.
    """

    name: str
    value: str
    traceback: str
    errno: int | None = None


class Display(_Wire, frozen=True):
    """Something a cell showed beside text.

    Attributes:
        mime: `image/png`, `image/jpeg`, `image/svg+xml` or `text/html`.
        data: the image's file as it is; empty if only named: whatever is no PNG or JPEG, and what the limits leave out
            (4 MiB a cell, all images together).
        size_bytes: its size in either case.
    """

    mime: str
    data: bytes
    size_bytes: int


class CellResult(_Wire, frozen=True):
    """Answer to `IpythonRun`. `result` is the `repr` of the cell's last expression, None if there was none.

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
    """Run `argv` (no shell) to its end, in a session of its own, with `stdin` as its input.

    `cwd` empty is where shells start; `env` is added to the tools' environment. After `timeout_s` it is killed, and
    however it ends, so is what it left running `linger_s` later. Of stdout and of stderr at most `max_output_bytes` are
    kept each.
    `user` is a name or a number that the image knows; empty is that of all tools. With an `input_id` that is not 0,
    more input follows in `ExecInput` calls, which may be sent at once. With `stream` all of the output is sent as it
    comes as well, as chunks of the streams `stdout` and `stderr`; the program waits while the caller reads slowly.
    With an `own_limit_s` that is not 0 it is killed as well when it has used more of its own time: the time that has
    passed without that in which it waited for a CPU. If it is `lenient`, and has waited for a CPU, it may use as much
    more, up to twice the limit.
    """

    argv: list[str]
    timeout_s: float
    cwd: str = ""
    env: dict[str, str] = {}
    stdin: bytes = b""
    max_output_bytes: int = 1024 * 1024
    user: str = ""
    input_id: int = 0
    stream: bool = False
    own_limit_s: float = 0.0
    lenient: bool = False
    linger_s: float = 0.0
    watch: list[str] = []


class ExecInput(_Wire, frozen=True):
    """The next piece of a program's input; `last` ends it. Answered when the program's pipe has taken the one before.

    `input_id` is that of its `Exec`, the caller's choice, unlike those of others that run. With an `own_limit_s` that
    is not 0 the program may use so much of its own time (see `Exec`) from here on, and with 0 what the piece before
    left of it; that time stands still from each end of a line of its output to the next piece. A chunk of the stream
    `late` comes before a line that used more, of a program that is `lenient`.
    """

    input_id: int
    data: bytes
    last: bool
    own_limit_s: float = 0.0


class ExecInputTaken(_Wire, frozen=True):
    """Answer to `ExecInput`. Not `wanted`: the program has ended, or reads no more, and nothing more is to be sent."""

    wanted: bool


class ExecResult(_Wire, frozen=True):
    """Answer to `Exec`: the result of the command. `exit_code` is 128 + n after signal n, None if the timeout ended it.

    `was_killed`: a signal ended the program itself. A program may exit with 128 + n on its own, too. `outlived`:
    something that it started ran on for more than `linger_s`, and was killed, or a file of `watch` was changed after
    the program's end; never without a `linger_s`.

    Output is as it was written, not decoded. `*_dropped_bytes` were left out in the middle, where a line says so.
    `own_s` is what was used of the last `own_limit_s`, and `cpu_s` about how much of it was CPU time; 0 without one.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    duration_s: float
    timed_out: bool = False
    was_killed: bool = False
    outlived: bool = False
    stdout_dropped_bytes: int = 0
    stderr_dropped_bytes: int = 0
    own_s: float = 0.0
    cpu_s: float = 0.0
    breach: Breach = ""
    breach_text: str = ""


SandboxCall = (
    Ping
    | PortOpen
    | Exec
    | ExecInput
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
    | PortOpened
    | ExecResult
    | ExecInputTaken
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
