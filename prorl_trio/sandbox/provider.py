"""What every sandbox provider is: a way to start one isolated process tree with a daemon in it, and to end it."""

from __future__ import annotations

import abc
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from ipc.limits import SandboxLimits
from prorl_trio.types.errors import HandlerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ipc.file_calls import EditFile, FileEdited
    from ipc.sandbox_calls import BashResult, CellResult, ExecResult, Pong

__all__ = [
    "DEFAULT_TRANSFER",
    "ProviderReport",
    "Sandbox",
    "SandboxProvider",
    "SandboxSpec",
    "ShellBusy",
    "ShellIdle",
    "TransferOptions",
    "TransferReport",
]


class ShellBusy(HandlerError):
    """A command that was left running has not ended; the new one was not started."""


class ShellIdle(HandlerError):
    """There is no command to type keys for, or to wait for."""


class SandboxSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a sandbox is made of.

    Attributes:
        image: `host` (the host's own /usr, /bin and /lib* and the project's Python, read-only over an empty root), the
            path of an unpacked root directory or of a `.sif` file, or what `prorl-trio image` has stored: the reference
            it was pulled by, or the name it was built as. Such an image needs no Python and no bash; its tools have its
            own libraries, PATH and variables. bubblewrap takes directories only (`prorl-trio image unpack`).
        network: False gives an empty network namespace with loopback only.
        env: variables for the tools. Nothing of the node's environment is passed on.
        start_timeout_s: from the start of the process to the daemon's handshake.
        limits: what the tools may use.
        prestart_ipython: start the IPython shell with the sandbox, not with its first cell.
    """

    image: str = "host"
    network: bool = False
    env: dict[str, str] = {}
    start_timeout_s: float = 30.0
    limits: SandboxLimits = SandboxLimits()
    prestart_ipython: bool = False


class ProviderReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a provider works on this machine, for `doctor` and the automatic choice.

    `problem` says what is missing and `remedy` what to do; both are empty when `usable`.
    """

    name: str
    usable: bool
    version: str = ""
    problem: str = ""
    remedy: str = ""


class TransferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How files and folders travel in and out.

    Attributes:
        overwrite: what has the name already is replaced, as a whole. Otherwise it is an error.
        max_bytes: of all files together.
        max_entries: files, folders and links.
        remote_roots: where inside a transfer may go to or come from, links resolved; `~` is the home directory.
    """

    overwrite: bool = False
    max_bytes: int = 4 * 1024**3
    max_entries: int = 200_000
    remote_roots: tuple[str, ...] = ("~", "/tmp", "/workspace", "/testbed")


DEFAULT_TRANSFER: Final = TransferOptions()


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was transferred.

    `left_out` names the first 100 of what was not, `left_out_total` counts all of it: links that lead out of the
    folder, devices, pipes, sockets, and what vanished meanwhile.
    """

    entries: int
    size_bytes: int
    left_out: tuple[str, ...] = ()
    left_out_total: int = 0


class Sandbox(abc.ABC):
    """A live sandbox. One action at a time; a second concurrent one waits for the first.

    Every method raises `SandboxLost` when the sandbox died or its channel broke, and then for ever after. A cancelled
    call cancels the action inside: the command's process group is killed before the call returns, or the sandbox is
    closed. No action is ever sent twice.
    """

    sandbox_id: str

    @abc.abstractmethod
    async def bash(
        self,
        command: str,
        *,
        timeout_s: float,
        quiet_timeout_s: float | None = None,
        max_output_bytes: int = 64 * 1024,
        raw: bool = False,
    ) -> BashResult:
        """Run `command` in the persistent shell (started on first use). A non-zero exit is a result, not an error.

        After `timeout_s` it is stopped. If no output comes for `quiet_timeout_s`, the result says `running` and the
        command goes on; `bash_input` follows it up, and until its end is known no other command can be run.
        The output is plain text (no escape sequences, progress bars in their last state) unless `raw`.

        Raises:
            ShellBusy: a command is still running; this one was not started.
        """

    @abc.abstractmethod
    async def bash_input(
        self,
        keys: bytes,
        *,
        timeout_s: float,
        quiet_timeout_s: float | None = None,
        max_output_bytes: int = 64 * 1024,
        raw: bool = False,
    ) -> BashResult:
        """Type `keys` for the command that is still running, and wait for it as `bash` does.

        `b"\\x03"` is C-c, `b"\\x04"` C-d, `b"\\x1a"` C-z; nothing only waits. Keys never reach the shell itself.

        Raises:
            ShellIdle: no command was left running, or its end has been told.
        """

    @abc.abstractmethod
    async def restart_bash(self) -> None:
        """End the shell with everything that runs in it, and start a new one."""

    @abc.abstractmethod
    async def ipython(
        self, code: str, *, timeout_s: float, max_output_bytes: int = 64 * 1024, kernel: str = ""
    ) -> CellResult:
        """Run one cell in a persistent shell (started on first use). An exception in it is a result.

        Args:
            kernel: empty for the IPython that every sandbox has, or the name of a Jupyter kernelspec installed in it.
                Each has a shell of its own.

        Raises:
            SandboxUnavailable: there is no such kernel, or it cannot be started. The sandbox itself lives on.
        """

    @abc.abstractmethod
    async def restart_ipython(self, *, kernel: str = "") -> None:
        """Throw the state of a kernel's shell away. `kernel` and errors as in `ipython`."""

    @abc.abstractmethod
    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = 1024 * 1024,
        user: str = "",
    ) -> ExecResult:
        """Run a program once, without a shell, in a fresh session: for evaluators. Nothing of it is left afterwards.

        That goes for what became a daemon too. What is to stay is started from `bash`.

        Args:
            argv: program (looked up in PATH unless it is a path) and arguments.
            timeout_s: after it the program is killed with all it started; then `exit_code` is None.
            cwd: empty takes the directory where shells start.
            env: added to the tools' environment.
            stdin: the program's whole input, 1 GiB at most (`client.MAX_STDIN_BYTES`). It travels in pieces, as the
                program reads it.
            max_output_bytes: of stdout and of stderr each; beyond it the first and the last half are kept.
            user: whom it runs as, a name or a number that the image knows; empty is whom everything runs as here. A
                sandbox has one user, and another is refused, but for Apptainer with `sandbox.fakeroot`, where tools are
                root and may become any user, if the node's own has a range of them (/etc/subuid).

        Raises:
            FileNotFoundError, PermissionError: the program, `cwd` or `user`, as seen inside. It did not run.
            ValueError: an argument or a limit that cannot be, or a `user` whom the image does not know.
        """

    @abc.abstractmethod
    async def ping(self) -> Pong:
        """Return when the sandbox answers, after the action that is going on. It is no action itself."""

    @abc.abstractmethod
    async def wait_lost(self) -> None:
        """Return when the sandbox is known to be lost, or is closed, whether or not anybody acts on it."""

    @abc.abstractmethod
    async def read_file(self, path: str, *, max_bytes: int = 64 * 1024 * 1024) -> bytes:
        """The whole file at the absolute `path` inside.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError: as seen inside.
            ValueError: it is larger than `max_bytes`.
        """

    @abc.abstractmethod
    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace the file at the absolute `path` inside; parents are made. Errors as `read_file`.

        A file that may not be written (mode 0444, say) is a `PermissionError`, and stays as it is.
        """

    @abc.abstractmethod
    async def edit_file(self, edit: EditFile) -> FileEdited:
        """View or edit a text file inside, in the way agents know; what is wrong with the call is in the result."""

    @abc.abstractmethod
    async def upload(
        self,
        local: Path,
        remote: str,
        *,
        options: TransferOptions = DEFAULT_TRANSFER,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> TransferReport:
        """Copy the file or folder `local` to the absolute path `remote` inside. It appears there whole or not at all.

        Missing parents are made. Permission bits travel (not set-user-id), and so do symbolic links, as links, if they
        stay in the folder; second names of a file stay second names. One piece of about 1 MiB is in memory at a time.
        A cancelled or failed transfer leaves nothing on either side. No other action goes on meanwhile.

        Args:
            on_progress: called with the number of entries and of bytes so far, after each piece.

        Raises:
            FileExistsError: something is there, and `options.overwrite` is not set.
            FileNotFoundError, PermissionError, OSError: as seen here or inside; also outside of `remote_roots`.
            ValueError: a limit is exceeded; `remote` is not absolute; `local` is neither a file nor a folder.
        """

    @abc.abstractmethod
    async def download(
        self,
        remote: str,
        local: Path,
        *,
        options: TransferOptions = DEFAULT_TRANSFER,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> TransferReport:
        """Copy the file or folder `remote` inside to `local`. As `upload`, the other way.

        Whatever code inside does meanwhile, nothing outside of `local` is written or read, and no link in it leads out.

        Raises:
            ValueError: besides the above: what came out of the sandbox is not a tree of files.
        """


class SandboxProvider(abc.ABC):
    """Starts sandboxes of one kind. Holds no state but its configuration; may be shared by all tasks."""

    name: ClassVar[str]
    isolated: ClassVar[bool]
    """False: runs code as the node itself. For tests only, and said so loudly when a node starts with it."""

    @abc.abstractmethod
    async def probe(self) -> ProviderReport:
        """Start the smallest possible sandbox of this kind and report. Never raises for a missing piece."""

    def open_shared(self) -> AbstractAsyncContextManager[None]:
        """Keep open what this provider's sandboxes share on this machine, so that not each start has to make it.

        Optional for users: a sandbox opens for itself what nobody holds open. Default: nothing is shared.
        """
        return nullcontext()

    @abc.abstractmethod
    def open_sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Start a sandbox, yield it when its daemon has answered the handshake, end it on leaving the block.

        On leaving, whether by return, error or cancellation, nothing is left: no process of its tree, no mount, no
        socket, no folder. Clean-up is shielded and bounded by a few seconds; what survives that is logged, and ended
        later, in the background.

        Raises:
            SandboxUnavailable: it could not be started, with the provider's own words and what to do.
        """
