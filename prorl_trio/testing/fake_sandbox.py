"""A sandbox provider in memory: no process and no socket, so tests with trio's autojump clock can use it.

It fulfils the contract of the real providers (`sandbox_contract.CORE_CHECKS`), and fails on request. Its shell knows a
few commands, and its Python a few expressions. Uploads and downloads read and write this machine's files in a thread,
like the real providers.
"""

from __future__ import annotations

import ast
import errno
import math
import operator
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple, TypeVar

import msgspec
import trio

from prorl_ipc.errors import CallFailed
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
    TreeContent,
    TreeEntry,
    TreeParts,
    UploadBegin,
    UploadEnd,
    UploadEnded,
    UploadParts,
    UploadTaken,
)
from prorl_ipc.sandbox_calls import (
    BashInput,
    BashRestart,
    BashRestarted,
    BashResult,
    BashRun,
    CellError,
    CellResult,
    Exec,
    ExecInput,
    ExecInputTaken,
    ExecResult,
    IpythonRestart,
    IpythonRestarted,
    IpythonRun,
    Ping,
    Pong,
)
from prorl_trio.sandbox.images.locate import check_host_layers, locate_root
from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider, SandboxSpec
from prorl_trio.sandbox.sandbox import Sandbox, ShellBusy, ShellIdle
from prorl_trio.types.errors import SandboxLost, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

    from prorl_ipc.file_calls import TreePart
    from prorl_ipc.sandbox_calls import SandboxCall, SandboxReply
    from prorl_trio.sandbox.program import OnOutput


T = TypeVar("T", bound=msgspec.Struct)

_BINARY: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

HOME: Final = "/home/agent"
_FOLDERS: Final = {PurePosixPath("/"), PurePosixPath("/tmp"), PurePosixPath(HOME)}
_FOLDER_MODE: Final = 0o755
_FILE_MODE: Final = 0o644

INTERRUPTED: Final = 130
_INTERRUPT_KEY: Final = b"\x03"

How = Literal["ended", "quiet", "timed_out"]


class FakeShell:
    """A shell with a few commands.

    It supports `NAME=VALUE`, `echo WORDS` with `$NAME` and `$?`, `cd DIR`, `pwd`, `true`, `false`, `read NAME`, `sleep
    SECONDS` and `exit CODE`, one command per line or after `;`.

    Attributes:
        cwd, exit_code: the state after the last command.
        is_running: whether a command is running.
        restarted: whether the last command ended the shell.
    """

    def __init__(self, env: Mapping[str, str], lost: trio.Event) -> None:
        self._env = env
        self._lost = lost
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.cwd = HOME
        self.exit_code = 0
        self.restarted = False
        self._variables: dict[str, str] = {}
        self._lines: deque[str] = deque()
        self._typed = ""
        self._wake_s: float | None = None

    @property
    def is_running(self) -> bool:
        return bool(self._lines)

    def begin(self, command: str) -> None:
        """Prepare `command` for `go_on`."""
        self.restarted = False
        self._lines.extend(line.strip() for line in command.replace(";", "\n").splitlines())

    def type_keys(self, keys: bytes) -> None:
        """Drop the command on C-c; pass other keys to its `read`."""
        if _INTERRUPT_KEY in keys:
            self._drop(INTERRUPTED)
        else:
            self._typed += keys.decode(errors="replace")

    async def go_on(self, output: list[str], *, timeout_s: float, quiet_timeout_s: float | None) -> How:
        """Run to the end, to the deadline, or until it has been quiet for `quiet_timeout_s`.

        A cancel drops the command.
        """
        deadline_s = trio.current_time() + timeout_s
        try:
            while self._lines and not self._lost.is_set():
                quiet_at_s = deadline_s if quiet_timeout_s is None else trio.current_time() + quiet_timeout_s
                if not await self._waited(self._lines[0], min(deadline_s, quiet_at_s)):
                    if quiet_at_s < deadline_s:
                        return "quiet"
                    self._drop(0)
                    return "timed_out"
                if not self._run_line(self._lines.popleft(), output):
                    exit_code = self.exit_code
                    self.restart()
                    self.exit_code, self.restarted = exit_code, True
        except trio.Cancelled:
            self._drop(INTERRUPTED)
            raise
        self._typed = ""
        return "ended"

    def _drop(self, exit_code: int) -> None:
        self._lines.clear()
        self._wake_s, self.exit_code = None, exit_code

    async def _waited(self, line: str, until_s: float) -> bool:
        """Return whether the event that `line` waits for happens by then."""
        word, _, rest = line.partition(" ")
        if word == "sleep":
            self._wake_s = self._wake_s or trio.current_time() + float(rest)
            await self._wait_until(min(self._wake_s, until_s))
            if self._wake_s > trio.current_time():
                return False
            self._wake_s = None
        elif word == "read" and "\n" not in self._typed:
            await self._wait_until(until_s)
            return False
        return True

    async def _wait_until(self, time_s: float) -> None:
        with trio.move_on_at(time_s):
            await self._lost.wait()

    def _run_line(self, line: str, output: list[str]) -> bool:
        """Run one simple command; return False if it ended the shell."""
        word, _, rest = line.partition(" ")
        name, assigned, value = word.partition("=")
        rest = self._expand(rest)
        self.exit_code = 0
        if assigned and name.isidentifier():
            self._variables[name] = self._expand(value)
        elif word == "read":
            self._variables[rest], _, self._typed = self._typed.partition("\n")
        elif word == "echo":
            output.append(rest + "\n")
        elif word == "pwd":
            output.append(self.cwd + "\n")
        elif word == "cd":
            self.cwd = str(PurePosixPath(self.cwd) / (rest or HOME))
        elif word == "false":
            self.exit_code = 1
        elif word == "exit":
            self.exit_code = int(rest or 0)
            return False
        elif word not in ("", "true", "sleep"):
            output.append(f"bash: {word}: command not found\n")
            self.exit_code = 127
        return True

    def _expand(self, text: str) -> str:
        for name, value in {"?": str(self.exit_code), **self._env, **self._variables}.items():
            text = text.replace(f"${name}", value)
        return text


def cap_bytes(raw: bytes, max_bytes: int) -> tuple[bytes, int]:
    """Return the head and the tail of an oversized output, and the number of omitted bytes."""
    if len(raw) <= max_bytes:
        return raw, 0
    head, tail = raw[: max_bytes // 2], raw[len(raw) - max_bytes // 2 :]
    dropped = len(raw) - len(head) - len(tail)
    return head + f"\n[... {dropped} bytes left out ...]\n".encode() + tail, dropped


class _Upload(NamedTuple):
    """An upload in progress: its target and the files so far, of which the last one is still growing."""

    path: str
    files: dict[str, bytes]


class FakeFiles:
    """Stores files by absolute path, without folders, modes or links.

    Attributes:
        content: of each file.
    """

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self._uploads: dict[int, _Upload] = {}
        self._downloads: dict[int, list[TreePart]] = {}

    def answer(self, request: SandboxCall) -> SandboxReply:
        """Carry out a file call."""
        match request:
            case FileRead():
                data = self._read(request.path)
                end = request.offset + request.max_bytes
                return FileData(data=data[request.offset : end], size_bytes=len(data), eof=end >= len(data))
            case FileWrite():
                self._check_path(request.path)
                before = self.content.get(request.path, b"") if request.append else b""
                self.content[request.path] = before + bytes(request.data)
                return FileWritten(size_bytes=len(self.content[request.path]))
            case EditFile():
                return self._edit(request)
        return self._transfer(request)

    def _read(self, path: str) -> bytes:
        self._check_path(path)
        if path not in self.content:
            raise FileNotFoundError(errno.ENOENT, path)
        return self.content[path]

    def _check_path(self, path: str) -> None:
        if not path.startswith("/"):
            raise ValueError(f"{path} is not absolute")
        folders = {parent for file in self.content for parent in PurePosixPath(file).parents}
        if PurePosixPath(path) in _FOLDERS | folders:
            raise IsADirectoryError(errno.EISDIR, path)

    def _edit(self, edit: EditFile) -> FileEdited:
        """Support `view` of a whole file, `create` and `str_replace`."""
        known = edit.path in self.content
        text = self.content.get(edit.path, b"").decode()
        match edit.command:
            case "create" if not known:
                self.content[edit.path] = (edit.file_text or "").encode()
                return FileEdited(output=f"File created successfully at: {edit.path}", ok=True)
            case "view" if known:
                lines = "".join(f"{number:6}\t{line}\n" for number, line in enumerate(text.splitlines(), 1))
                return FileEdited(output=f"Here's the result of running `cat -n` on {edit.path}:\n{lines}", ok=True)
            case "str_replace" if known and edit.old_str and text.count(edit.old_str) == 1:
                self.content[edit.path] = text.replace(edit.old_str, edit.new_str or "").encode()
                return FileEdited(output=f"The file {edit.path} has been edited.", ok=True)
        return FileEdited(output=f"{edit.command} cannot be done to {edit.path}.", ok=False)

    def _transfer(self, request: SandboxCall) -> SandboxReply:
        match request:
            case UploadBegin(transfer_id=number, path=path, overwrite=overwrite):
                if self._below(path) and not overwrite:
                    raise FileExistsError(errno.EEXIST, path)
                self._uploads[number] = _Upload(path, {})
                return TransferBegun()
            case UploadParts(transfer_id=number, parts=parts):
                for part in parts:
                    _take(self._uploads[number], part)
                return UploadTaken()
            case UploadEnd(transfer_id=number):
                upload = self._uploads.pop(number)
                for path in self._below(upload.path):
                    del self.content[path]
                self.content.update(upload.files)
                return UploadEnded()
            case DownloadBegin(transfer_id=number, path=path):
                self._downloads[number] = self._tree(path)
                return TransferBegun()
            case DownloadParts(transfer_id=number):
                return TreeParts(parts=self._downloads.pop(number), done=True)
            case TransferAbort(transfer_id=number):
                self._uploads.pop(number, None)
                self._downloads.pop(number, None)
                return TransferAborted()
        raise TypeError(f"{type(request).__name__} is not about files")

    def _below(self, path: str) -> list[str]:
        return sorted(file for file in self.content if file == path or file.startswith(f"{path}/"))

    def _tree(self, path: str) -> list[TreePart]:
        files = self._below(path)
        if not files:
            raise FileNotFoundError(errno.ENOENT, path)
        parts: dict[str, list[TreePart]] = {}
        for file in files:
            inner = file[len(path) + 1 :]
            for folder in reversed(PurePosixPath(inner).parents):
                name = "" if str(folder) == "." else str(folder)
                if inner:
                    parts.setdefault(name, [TreeEntry(name.encode(), "folder", _FOLDER_MODE)])
            content = self.content[file]
            parts[inner] = [TreeEntry(inner.encode(), "file", _FILE_MODE), *([TreeContent(content)] if content else [])]
        return [part for some in parts.values() for part in some]


def _take(upload: _Upload, part: TreePart) -> None:
    files = upload.files
    if isinstance(part, TreeContent):
        files[next(reversed(files))] += part.data
    elif part.kind == "file":
        files[f"{upload.path}/{part.path.decode()}" if part.path else upload.path] = b""


class FakePython:
    """A Python session: its names, and the number of cells so far."""

    def __init__(self) -> None:
        self._names: dict[str, float | str | None] = {}
        self._execution_count = 0

    def run(self, request: IpythonRun) -> CellResult:
        """Run a cell to its end; it takes no simulated time."""
        self._execution_count += 1
        printed: list[str] = []
        value: float | str | None = None
        error: CellError | None = None
        try:
            for statement in ast.parse(request.code).body:
                value = self._run_statement(statement, printed)
        except (ArithmeticError, NameError, SyntaxError, TypeError) as exc:
            name = type(exc).__name__
            error = CellError(name=name, value=str(exc), traceback=f"{name}: {exc}")
        kept, dropped = cap_bytes("".join(printed).encode(), request.max_output_bytes)
        return CellResult(
            stdout=kept.decode(errors="replace"),
            stderr="",
            result=None if value is None or error else repr(value),
            error=error,
            execution_count=self._execution_count,
            duration_s=0.0,
            dropped_bytes=dropped,
        )

    def _run_statement(self, statement: ast.stmt, printed: list[str]) -> float | str | None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._names[name] = self._evaluate(value)
                return None
            case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=args)):
                printed.append(" ".join(str(self._evaluate(arg)) for arg in args) + "\n")
                return None
            case ast.Expr(value=value):
                return self._evaluate(value)
        raise TypeError(f"the fake cannot run {type(statement).__name__}")

    def _evaluate(self, node: ast.expr) -> float | str | None:
        match node:
            case ast.Constant(value=int() | float() | str() | None as value):
                return value
            case ast.Name(id=name):
                if name not in self._names:
                    raise NameError(f"name {name!r} is not defined")
                return self._names[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](self._number(left), self._number(right))
        raise TypeError(f"the fake cannot evaluate {type(node).__name__}")

    def _number(self, node: ast.expr) -> float:
        value = self._evaluate(node)
        if isinstance(value, int | float):
            return value
        raise TypeError(f"{value!r} is not a number")


class FakeProvider(SandboxProvider):
    """Starts `FakeSandbox`es.

    Attributes:
        start_s: duration of each start, on trio's clock.
        failures: raised by the next starts, in order.
        live: the open sandboxes.
        opened_total: number of successful starts.
        close_gate: closing waits for it, shielded; initially set.
    """

    name: ClassVar[str] = "fake"
    isolated: ClassVar[bool] = False
    has_layers: ClassVar[bool] = True

    def __init__(self, *, start_s: float = 0.0, failures: Iterable[SandboxUnavailable] = ()) -> None:
        self.start_s = start_s
        self.failures = list(failures)
        self.live: list[FakeSandbox] = []
        self.opened_total = 0
        self.close_gate = trio.Event()
        self.close_gate.set()
        self._ids = count(1)

    async def probe(self) -> ProviderReport:
        await trio.lowlevel.checkpoint()
        return ProviderReport(name=self.name, usable=True, version="in memory")

    @asynccontextmanager
    async def open_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        with trio.move_on_after(spec.start_timeout_s) as patience:
            await trio.sleep(self.start_s)
        if patience.cancelled_caught:
            raise SandboxUnavailable(f"fake: not ready within {spec.start_timeout_s:g} s")
        if self.failures:
            raise self.failures.pop(0)
        if spec.image != "host":
            raise SandboxUnavailable(f"image {spec.image} does not exist; the fake has only `host`")
        sandbox = FakeSandbox(f"fake-{next(self._ids)}", dict(spec.env))
        if spec.layers:
            sandbox.files.update(await trio.to_thread.run_sync(_files_of, spec.layers))
        self.live.append(sandbox)
        self.opened_total += 1
        try:
            yield sandbox
        finally:
            if not self.close_gate.is_set():
                with trio.CancelScope(shield=True):
                    await self.close_gate.wait()
            self.live.remove(sandbox)
            sandbox.lose("it was closed")


class FakeSandbox(Sandbox):
    """A sandbox whose state is in dictionaries. `lose` ends it like a crash.

    Attributes:
        actions: the requested actions, in order.
        files: the content of each file by absolute path.
        call_gate: calls wait for it; initially set.

    bash is a `FakeShell`, IPython a `FakePython`, files are `FakeFiles`. `exec` supports the programs `true`, `false`,
    `echo WORDS`, `cat` and `sleep SECONDS`, and only the default user.
    """

    def __init__(self, sandbox_id: str, env: dict[str, str]) -> None:
        super().__init__(sandbox_id)
        self.actions: list[str] = []
        self._files = FakeFiles()
        self.files = self._files.content
        self.call_gate = trio.Event()
        self.call_gate.set()
        self._lost = trio.Event()
        self._why_lost = ""
        self._shell = FakeShell(env, self._lost)
        self._python = FakePython()
        self._inputs: dict[int, tuple[trio.MemorySendChannel[ExecInput], trio.MemoryReceiveChannel[ExecInput]]] = {}

    def lose(self, reason: str) -> None:
        """Make the current call and every later call raise `SandboxLost`."""
        self._why_lost = self._why_lost or f"sandbox {self.sandbox_id} is gone: {reason}"
        self._lost.set()

    async def wait_lost(self) -> None:
        await self._lost.wait()

    async def call(
        self, request: SandboxCall, reply_type: type[T], timeout_s: float, on_output: OnOutput | None = None
    ) -> T:
        await self.call_gate.wait()
        self._raise_if_lost()
        if isinstance(request, Exec):
            _check_program(request)
            reply: SandboxReply = await self._exec(request, on_output)
        else:
            with _refusals():
                reply = await self._answer(request)
        if not isinstance(reply, reply_type):
            raise TypeError(f"{type(request).__name__} is answered by {type(reply).__name__}")
        return reply

    async def _answer(self, request: SandboxCall) -> SandboxReply:
        match request:
            case BashRun() | BashInput() | BashRestart():
                return await self._bash(request)
            case IpythonRun() | IpythonRestart():
                return self._ipython(request)
            case ExecInput():
                self._input(request.input_id)[0].send_nowait(request)
                return ExecInputTaken(wanted=True)
            case Ping():
                return Pong(uptime_s=0.0, open_fds=0)
        if action := _file_action(request):
            self.actions.append(action)
        return self._files.answer(request)

    def _input(self, input_id: int) -> tuple[trio.MemorySendChannel[ExecInput], trio.MemoryReceiveChannel[ExecInput]]:
        if input_id not in self._inputs:
            self._inputs[input_id] = trio.open_memory_channel[ExecInput](math.inf)
        return self._inputs[input_id]

    def _raise_if_lost(self) -> None:
        if self._why_lost:
            raise SandboxLost(self._why_lost)

    async def _bash(self, request: BashRun | BashInput | BashRestart) -> BashResult | BashRestarted:
        match request:
            case BashRun(command=command):
                if self._shell.is_running:
                    raise ShellBusy(f"sandbox {self.sandbox_id}: a command is still running")
                self.actions.append(command)
                self._shell.begin(command)
            case BashInput(keys=keys):
                if not self._shell.is_running:
                    raise ShellIdle(f"sandbox {self.sandbox_id}: no command is running")
                self.actions.append(repr(keys))
                self._shell.type_keys(keys)
            case _:
                self.actions.append("restart_bash")
                self._shell.restart()
                return BashRestarted(pid=1)
        start_s = trio.current_time()
        output: list[str] = []
        how = await self._shell.go_on(output, timeout_s=request.timeout_s, quiet_timeout_s=request.quiet_timeout_s)
        self._raise_if_lost()
        kept, dropped = cap_bytes("".join(output).encode(), request.max_output_bytes)
        return BashResult(
            output=kept.decode(errors="replace"),
            exit_code=self._shell.exit_code if how == "ended" else None,
            cwd=self._shell.cwd,
            duration_s=trio.current_time() - start_s,
            timed_out=how == "timed_out",
            restarted=self._shell.restarted,
            dropped_bytes=dropped,
            running=how == "quiet",
        )

    def _ipython(self, request: IpythonRun | IpythonRestart) -> SandboxReply:
        self.actions.append(request.code if isinstance(request, IpythonRun) else "restart_ipython")
        if request.kernel:
            kernel = f"there is no Jupyter kernel {request.kernel!r}; installed: none"
            raise SandboxUnavailable(f"{self.sandbox_id}: {kernel}")
        if isinstance(request, IpythonRun):
            return self._python.run(request)
        self._python = FakePython()
        return IpythonRestarted(pid=1)

    async def _exec(self, request: Exec, on_output: OnOutput | None) -> ExecResult:
        program, *words = request.argv
        self.actions.append(" ".join(request.argv))
        written = bytearray()

        def write(data: bytes) -> None:
            written.extend(data)
            if on_output is not None and request.stream and data:
                on_output("stdout", data)

        with trio.move_on_after(request.timeout_s) as patience:
            await trio.lowlevel.checkpoint()
            match program:
                case "cat":
                    write(request.stdin)
                    last = not request.input_id
                    while not last:
                        piece = await self._input(request.input_id)[1].receive()
                        write(piece.data)
                        last = piece.last
                case "echo":
                    write(f"{' '.join(words)}\n".encode())
                case "sleep":
                    with trio.move_on_after(float(words[0])):
                        await self._lost.wait()
        self._inputs.pop(request.input_id, None)
        self._raise_if_lost()
        kept, dropped = cap_bytes(bytes(written), request.max_output_bytes)
        return ExecResult(
            exit_code=None if patience.cancelled_caught else int(program == "false"),
            stdout=kept,
            stderr=b"",
            duration_s=0.0,
            timed_out=patience.cancelled_caught,
            stdout_dropped_bytes=dropped,
        )


def _check_program(request: Exec) -> None:
    with _refusals():
        if request.user:
            raise PermissionError(errno.EACCES, f"user: {request.user!r} is another one than everything here runs as")
        if request.argv[0] not in ("true", "false", "echo", "cat", "sleep"):
            raise FileNotFoundError(errno.ENOENT, request.argv[0])


@contextmanager
def _refusals() -> Iterator[None]:
    """Set the cause of errors as a real sandbox does."""
    try:
        yield
    except (OSError, ValueError) as exc:
        raise exc from CallFailed("io" if isinstance(exc, OSError) else "bad_request", str(exc))


def _files_of(layers: Sequence[str]) -> dict[str, bytes]:
    """Return the content of each file in `layers`; later layers hide earlier ones."""
    folders = locate_root("host", layers).layers
    check_host_layers(folders)
    files = ((folder, path) for folder in folders for path in folder.rglob("*") if path.is_file())
    return {f"/{path.relative_to(folder)}": path.read_bytes() for folder, path in files}


def _file_action(request: SandboxCall) -> str:
    """Return the name of the action that begins with this call; empty if it continues one."""
    match request:
        case FileRead(path=path, offset=0):
            return f"read {path}"
        case FileWrite(path=path, append=False):
            return f"write {path}"
        case EditFile(command=command, path=path):
            return f"{command} {path}"
        case UploadBegin(path=path):
            return f"upload {path}"
        case DownloadBegin(path=path):
            return f"download {path}"
    return ""
