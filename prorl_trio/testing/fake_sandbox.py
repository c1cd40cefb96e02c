"""A sandbox provider in memory: no process, no thread, no socket, so tests with trio's autojump clock can use it.

It keeps the contract of the real ones (`sandbox_contract.CORE_CHECKS`) with a shell of a few words and a Python of a
few expressions, and fails on request.
"""

from __future__ import annotations

import ast
import errno
import operator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, ClassVar, Final

import trio

from ipc.file_calls import FileEdited
from ipc.sandbox_calls import BashResult, CellError, CellResult, ExecResult, Pong
from prorl_trio.sandbox.provider import (
    DEFAULT_TRANSFER,
    ProviderReport,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    ShellBusy,
    ShellIdle,
    TransferReport,
)
from prorl_trio.testing.fake_shell import HOME, FakeShell
from prorl_trio.types.errors import SandboxLost, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from ipc.file_calls import EditFile
    from prorl_trio.sandbox.provider import TransferOptions

__all__ = ["FakeProvider", "FakeSandbox"]

_BINARY: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ROOT: Final = PurePosixPath("/")


class FakeProvider(SandboxProvider):
    """Starts `FakeSandbox`es.

    Attributes:
        start_s: how long each start takes, on trio's clock.
        failures: raised by the next starts, first to first.
        live: those that are open now.
        opened_total: starts that succeeded.
        close_gate: ends wait for it, shielded; set at first.
    """

    name: ClassVar[str] = "fake"
    isolated: ClassVar[bool] = False

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
    """State in dictionaries. `actions` is what was asked of it, in order; `lose` ends it as a crash would.

    bash is a `FakeShell`. A cell may assign and evaluate arithmetic and `print`.
    """

    def __init__(self, sandbox_id: str, env: dict[str, str]) -> None:
        self.sandbox_id = sandbox_id
        self.actions: list[str] = []
        self.files: dict[str, bytes] = {}
        self._turn = trio.Lock()
        self._lost = trio.Event()
        self._why_lost = ""
        self._shell = FakeShell(env, self._lost)
        self._names: dict[str, float | str | None] = {}
        self._execution_count = 0

    def lose(self, reason: str) -> None:
        """Every call from now on, and the one going on, raises `SandboxLost`."""
        self._why_lost = self._why_lost or f"sandbox {self.sandbox_id} is gone: {reason}"
        self._lost.set()

    async def bash(
        self,
        command: str,
        *,
        timeout_s: float,
        quiet_timeout_s: float | None = None,
        max_output_bytes: int = 64 * 1024,
        raw: bool = False,
    ) -> BashResult:
        del raw
        async with self._turn:
            if self._shell.is_running:
                raise ShellBusy(f"sandbox {self.sandbox_id}: a command is still running")
            await self._begin(command)
            self._shell.begin(command)
            return await self._go_on(timeout_s, quiet_timeout_s, max_output_bytes)

    async def bash_input(
        self,
        keys: bytes,
        *,
        timeout_s: float,
        quiet_timeout_s: float | None = None,
        max_output_bytes: int = 64 * 1024,
        raw: bool = False,
    ) -> BashResult:
        del raw
        async with self._turn:
            if not self._shell.is_running:
                raise ShellIdle(f"sandbox {self.sandbox_id}: no command is running")
            await self._begin(repr(keys))
            self._shell.type_keys(keys)
            return await self._go_on(timeout_s, quiet_timeout_s, max_output_bytes)

    async def restart_bash(self) -> None:
        async with self._turn:
            await self._begin("restart_bash")
            self._shell.restart()

    async def _go_on(self, timeout_s: float, quiet_timeout_s: float | None, max_output_bytes: int) -> BashResult:
        start_s = trio.current_time()
        output: list[str] = []
        how = await self._shell.go_on(output, timeout_s=timeout_s, quiet_timeout_s=quiet_timeout_s)
        self._raise_if_lost()
        text, dropped = _cap("".join(output), max_output_bytes)
        return BashResult(
            output=text,
            exit_code=self._shell.exit_code if how == "ended" else None,
            cwd=self._shell.cwd,
            duration_s=trio.current_time() - start_s,
            timed_out=how == "timed_out",
            restarted=self._shell.restarted,
            dropped_bytes=dropped,
            running=how == "quiet",
        )

    async def _begin(self, action: str) -> None:
        await trio.lowlevel.checkpoint()
        self._raise_if_lost()
        self.actions.append(action)

    def _raise_if_lost(self) -> None:
        if self._why_lost:
            raise SandboxLost(self._why_lost)

    async def ipython(
        self, code: str, *, timeout_s: float, max_output_bytes: int = 64 * 1024, kernel: str = ""
    ) -> CellResult:
        async with self._turn:
            await self._begin(code)
            self._check_kernel(kernel)
            self._execution_count += 1
            printed: list[str] = []
            value: float | str | None = None
            error: CellError | None = None
            try:
                for statement in ast.parse(code).body:
                    value = self._run_statement(statement, printed)
            except (ArithmeticError, NameError, SyntaxError, TypeError) as exc:
                name = type(exc).__name__
                error = CellError(name=name, value=str(exc), traceback=f"{name}: {exc}")
            text, dropped = _cap("".join(printed), max_output_bytes)
            return CellResult(
                stdout=text,
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

    def _check_kernel(self, kernel: str) -> None:
        if kernel:
            raise SandboxUnavailable(f"{self.sandbox_id}: there is no Jupyter kernel {kernel!r}; installed: none")

    async def restart_ipython(self, *, kernel: str = "") -> None:
        async with self._turn:
            await self._begin("restart_ipython")
            self._check_kernel(kernel)
            self._names, self._execution_count = {}, 0

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
        """Knows the programs `true`, `false`, `echo WORDS`, `cat` and `sleep SECONDS`, and no other user."""
        del cwd, env
        if user:
            raise PermissionError(errno.EACCES, f"user: {user!r} is another one than everything here runs as")
        async with self._turn:
            await self._begin(" ".join(argv))
            if argv[0] not in ("true", "false", "echo", "cat", "sleep"):
                raise FileNotFoundError(errno.ENOENT, argv[0])
            with trio.move_on_after(timeout_s) as patience:
                await trio.lowlevel.checkpoint()
                if argv[0] == "sleep":
                    with trio.move_on_after(float(argv[1])):
                        await self._lost.wait()
            self._raise_if_lost()
            written = stdin if argv[0] == "cat" else f"{' '.join(argv[1:])}\n".encode() if argv[0] == "echo" else b""
            kept, dropped = _cap_bytes(written, max_output_bytes)
            return ExecResult(
                exit_code=None if patience.cancelled_caught else int(argv[0] == "false"),
                stdout=kept,
                stderr=b"",
                duration_s=0.0,
                timed_out=patience.cancelled_caught,
                stdout_dropped_bytes=dropped,
            )

    async def ping(self) -> Pong:
        async with self._turn:
            await trio.lowlevel.checkpoint()
            self._raise_if_lost()
            return Pong(uptime_s=0.0, open_fds=0)

    async def wait_lost(self) -> None:
        await self._lost.wait()

    async def read_file(self, path: str, *, max_bytes: int = 64 * 1024 * 1024) -> bytes:
        async with self._turn:
            await self._begin(f"read {path}")
            self._check_path(path)
            if path not in self.files:
                raise FileNotFoundError(errno.ENOENT, path)
            if len(self.files[path]) > max_bytes:
                raise ValueError(f"{path} has {len(self.files[path])} bytes; the limit is {max_bytes}")
            return self.files[path]

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        async with self._turn:
            await self._begin(f"write {path}")
            self._check_path(path)
            self.files[path] = bytes(data)

    async def edit_file(self, edit: EditFile) -> FileEdited:
        """Knows `view` of a whole file, `create` and `str_replace`."""
        async with self._turn:
            await self._begin(f"{edit.command} {edit.path}")
            known = edit.path in self.files
            text = self.files.get(edit.path, b"").decode()
            match edit.command:
                case "create" if not known:
                    self.files[edit.path] = (edit.file_text or "").encode()
                    return FileEdited(output=f"File created successfully at: {edit.path}", ok=True)
                case "view" if known:
                    lines = "".join(f"{number:6}\t{line}\n" for number, line in enumerate(text.splitlines(), 1))
                    return FileEdited(output=f"Here's the result of running `cat -n` on {edit.path}:\n{lines}", ok=True)
                case "str_replace" if known and edit.old_str and text.count(edit.old_str) == 1:
                    self.files[edit.path] = text.replace(edit.old_str, edit.new_str or "").encode()
                    return FileEdited(output=f"The file {edit.path} has been edited.", ok=True)
            return FileEdited(output=f"{edit.command} cannot be done to {edit.path}.", ok=False)

    async def upload(
        self,
        local: Path,
        remote: str,
        *,
        options: TransferOptions = DEFAULT_TRANSFER,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> TransferReport:
        """Keeps files, and no folders or links."""
        async with self._turn:
            await self._begin(f"upload {remote}")
            known = [path for path in self.files if path == remote or path.startswith(f"{remote}/")]
            if known and not options.overwrite:
                raise FileExistsError(errno.EEXIST, remote)
            taken = _read_tree(local, remote)
            for path_inside in known:
                del self.files[path_inside]
            self.files.update(taken)
            return _reported(taken.values(), options, on_progress)

    async def download(
        self,
        remote: str,
        local: Path,
        *,
        options: TransferOptions = DEFAULT_TRANSFER,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> TransferReport:
        async with self._turn:
            await self._begin(f"download {remote}")
            found = {path: self.files[path] for path in self.files if path == remote or path.startswith(f"{remote}/")}
            if not found:
                raise FileNotFoundError(errno.ENOENT, remote)
            report = _reported(found.values(), options, on_progress)
            _write_tree(local, remote, found, overwrite=options.overwrite)
            return report

    def _check_path(self, path: str) -> None:
        if not path.startswith("/"):
            raise ValueError(f"{path} is not absolute")
        folders = {parent for file in self.files for parent in PurePosixPath(file).parents}
        if PurePosixPath(path) in {_ROOT, PurePosixPath("/tmp"), PurePosixPath(HOME), *folders}:
            raise IsADirectoryError(errno.EISDIR, path)


def _read_tree(local: Path, remote: str) -> dict[str, bytes]:
    if local.is_file():
        return {remote: local.read_bytes()}
    files = (path for path in sorted(local.rglob("*")) if path.is_file())
    return {f"{remote}/{path.relative_to(local).as_posix()}": path.read_bytes() for path in files}


def _write_tree(local: Path, remote: str, files: Mapping[str, bytes], *, overwrite: bool) -> None:
    if local.exists() and not overwrite:
        raise FileExistsError(errno.EEXIST, str(local))
    for path, content in files.items():
        target = local if path == remote else local / path.removeprefix(f"{remote}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _reported(
    contents: Collection[bytes], options: TransferOptions, on_progress: Callable[[int, int], None] | None
) -> TransferReport:
    size_bytes = sum(map(len, contents))
    if size_bytes > options.max_bytes:
        raise ValueError(f"the tree has more than {options.max_bytes} bytes (max_bytes)")
    if on_progress is not None:
        on_progress(len(contents), size_bytes)
    return TransferReport(entries=len(contents), size_bytes=size_bytes)


def _cap(text: str, max_bytes: int) -> tuple[str, int]:
    kept, dropped = _cap_bytes(text.encode(), max_bytes)
    return kept.decode(errors="replace"), dropped


def _cap_bytes(raw: bytes, max_bytes: int) -> tuple[bytes, int]:
    if len(raw) <= max_bytes:
        return raw, 0
    head, tail = raw[: max_bytes // 2], raw[len(raw) - max_bytes // 2 :]
    dropped = len(raw) - len(head) - len(tail)
    return head + f"\n[... {dropped} bytes left out ...]\n".encode() + tail, dropped
