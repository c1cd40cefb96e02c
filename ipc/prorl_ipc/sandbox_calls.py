"""Calls of a sandbox daemon and their answers: bash, IPython, one-shot commands, files. Text: PROTOCOL.md.

`SandboxCall` is a tagged union that refuses unknown fields, and `SandboxReply` is the union of its answers. Both travel
as bodies in the envelope of `wire`.

A result's `breach` is the sandbox limit that was exceeded since the previous result, empty if none. `breach_text`
describes the breach and its consequence in a sentence.

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
"""Exit code of a daemon that ended by an error of its own, which its tools cannot cause: EX_SOFTWARE of sysexits."""

MAX_FORK_BYTES = 4096
"""Maximum size of a packet."""
MAX_FORK_FDS = 16
"""Maximum number of descriptors sent with a packet."""


class ForkSandbox(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Start a sandbox.

    Attributes:
        fds: descriptor numbers in its first process for the descriptors sent along, in order.
        disk_bytes: size of each file system in memory: /tmp, /dev/shm and the home directory.
        limits: limits of its namespaces.
        prestart_ipython: also fork its IPython.
    """

    fds: list[int]
    disk_bytes: int
    limits: NamespaceLimits
    prestart_ipython: bool = False


class Forked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Answer to `ForkSandbox`.

    Attributes:
        pid: process id of the sandbox's first process, a child of the node, in the node's PID namespace; 0 on failure.
        problem: description of the failure; empty on success.
    """

    pid: int = 0
    problem: str = ""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of every struct here: immutable, tagged with its class name, strict."""


class Ping(_Wire, frozen=True):
    """Check that the daemon is alive."""


class Pong(_Wire, frozen=True):
    """Answer to `Ping`. `uptime_s`: seconds since the daemon began to listen. `open_fds`: its open descriptors."""

    uptime_s: float
    open_fds: int


class PortOpen(_Wire, frozen=True):
    """Listen on `port` of 127.0.0.1, in the sandbox's own network; 0: any free port.

    The listening socket is sent on the socket of the start line (`ports_fd`), with `PortOpened` as its message, and
    only the receiver keeps it. Refused with the code `no_ports` without such a socket, and `io` if it cannot listen.
    """

    port: int = 0


class PortOpened(_Wire, frozen=True):
    """Answer to `PortOpen`."""

    port: int


class BashRun(_Wire, frozen=True):
    """Run `command` in the persistent shell. Refused with the code `busy` while another command is running.

    After `timeout_s` the foreground process group is interrupted and then killed. If the shell does not respond, it is
    killed with everything in its session and restarted (`restarted`). With `quiet_timeout_s`, the call is answered
    (`running`) after that many seconds without output; the command keeps running, and `BashInput` continues it.
    At most `max_output_bytes` of the output are kept, the first and the last half, as plain text, or with `raw` as the
    terminal received it. With `stream`, the output is also sent in chunks of stream `output`, always raw.
    """

    command: str
    timeout_s: float
    max_output_bytes: int = 64 * 1024
    stream: bool = False
    quiet_timeout_s: float | None = None
    raw: bool = False


class BashInput(_Wire, frozen=True):
    """Type `keys` into the terminal of the running command, and wait for it as `BashRun` does.

    0x03 interrupts (C-c), 0x04 ends its input (C-d), 0x1a stops it (C-z). Without keys the call only waits. Keys are
    dropped if the command has ended, which the result reports. Without such a command: the code `not_running`.
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
    `exit_code` is None if the command was killed by the timeout, ended the shell without a code, or is still `running`.
    `dropped_bytes` were omitted in the middle of `output`, where a line marks it. `cwd` is the shell's directory
    afterwards. `restarted`: the shell was lost (`exit`, `exec`, killed, or not responding after a timeout) and
    replaced, without its variables, functions and working directory.
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
    """Kill the shell with everything in its session, including a running command, and start a new shell."""


class BashRestarted(_Wire, frozen=True):
    """Answer to `BashRestart`: the new shell is ready. `pid` is its process id, in the daemon's PID namespace."""

    pid: int


class IpythonRun(_Wire, frozen=True):
    """Run one cell in the persistent shell of `kernel`, which is started on first use.

    `kernel` is empty for the daemon's IPython, or the name of an installed Jupyter kernelspec. After `timeout_s` the
    cell is interrupted (KeyboardInterrupt). If it does not end, the shell is killed and restarted (`restarted`).
    At most `max_output_bytes` of stdout and of stderr are kept, head and tail.
    """

    code: str
    timeout_s: float
    max_output_bytes: int = 64 * 1024
    stream: bool = False
    kernel: str = ""


class CellError(_Wire, frozen=True):
    """An exception that ended a cell.

    Attributes:
        name: name of the exception's type.
        value: its message.
        traceback: plain text, without colour codes.
        errno: error number of an `OSError`; a Jupyter kernel reports none.
    """

    name: str
    value: str
    traceback: str
    errno: int | None = None


class Display(_Wire, frozen=True):
    """An image or other rich output of a cell.

    Attributes:
        mime: `image/png`, `image/jpeg`, `image/svg+xml` or `text/html`.
        data: the file of a PNG or JPEG; empty for other types, and beyond 4 MiB of images per cell.
        size_bytes: its size, also if `data` is empty.
    """

    mime: str
    data: bytes
    size_bytes: int


class CellResult(_Wire, frozen=True):
    """Answer to `IpythonRun`. `result` is the `repr` of the cell's last expression, or None without one.

    `displays` are in order and include rich results and open matplotlib figures. `dropped_displays` counts displays
    beyond the first 32.
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
    """Discard the state of a kernel's shell and start a new shell. `kernel` as in `IpythonRun`."""

    kernel: str = ""


class IpythonRestarted(_Wire, frozen=True):
    """Answer to `IpythonRestart`: the new shell is ready. `pid` is its process id, in the daemon's PID namespace."""

    pid: int


# ---------------------------------------------------------------- one-shot commands


class Exec(_Wire, frozen=True):
    """Run `argv` (no shell) to its end, in a session of its own, with `stdin` as its input.

    An empty `cwd` is the start directory of shells; `env` is added to the tools' environment. The program is killed
    after `timeout_s`. However it ends, its remaining processes are killed `linger_s` later. At most `max_output_bytes`
    are kept of stdout and of stderr.
    `user` is a name or number known in the image; empty is the user of all tools. With a nonzero `input_id`, more input
    follows in `ExecInput` calls, which may be sent at once. With `stream`, all output is also sent in chunks of the
    streams `stdout` and `stderr`; the program waits for a slow reader.
    With a nonzero `own_limit_s`, the program is also killed when it has used more of its own time: elapsed time without
    waits for a CPU. A `lenient` program that waited for a CPU may use as much more, up to twice the limit.
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
    """The next piece of a program's input; `last` ends it. Answered when the pipe has accepted the previous piece.

    `input_id` is that of its `Exec`, chosen by the caller and unique among running programs. A nonzero `own_limit_s`
    limits the program's own time (see `Exec`) from here on; 0 keeps the rest of the previous limit. That clock stops
    from each end of an output line to the next piece. For a `lenient` program, a chunk of the stream `late` precedes a
    line that exceeded the limit.
    """

    input_id: int
    data: bytes
    last: bool
    own_limit_s: float = 0.0


class ExecInputTaken(_Wire, frozen=True):
    """Answer to `ExecInput`. If not `wanted`, the program has ended or stopped reading; send no further input."""

    wanted: bool


class ExecResult(_Wire, frozen=True):
    """Answer to `Exec`: the result of the command. `exit_code` is 128 + n after signal n, None after the timeout.

    `was_killed`: a signal ended the program, because a program may also exit with 128 + n. `outlived`: a process that
    it started ran for more than `linger_s` and was killed, or a file of `watch` changed after the program's end; never
    without a `linger_s`.

    Output is not decoded. `*_dropped_bytes` were omitted in the middle, where a line marks it. `own_s` is the used part
    of the last `own_limit_s`, and `cpu_s` about the CPU time in it; 0 without a limit.
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
