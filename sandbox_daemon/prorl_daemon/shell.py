"""A shell process on a pseudo-terminal. `shell_protocol` marks commands and their ends."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import signal
import termios
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import trio

from prorl_daemon.children import born_with
from prorl_daemon.keeper import StartFailed
from prorl_daemon.output import BarrierSplitter, OutputBuffer
from prorl_daemon.plain_text import CommandOutput
from prorl_daemon.processes import kill_until_gone
from prorl_daemon.shell_protocol import BEGUN_MARK, NONCE_MARK, PROMPT_MARK, CommandEnd, ShellFiles
from prorl_daemon.threads import run_blocking

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from prorl_daemon.children import Child, ChildReaper
    from prorl_daemon.output import CappedOutput
    from prorl_daemon.processes import ProcessEntry, ProcessTable
    from prorl_daemon.shell_protocol import Dialect


START_TIMEOUT_S = 10.0
DRAIN_GRACE_S = 0.1
"""Time for output to arrive after the shell ended while another process still holds the terminal."""
KILL_DEADLINE_S = 2.0
START_OUTPUT_BYTES = 4096
BEGIN_GRACE_S = 0.25
"""Time that an interrupt waits for a shell that has not yet read its command."""
SETTLE_GRACE_S = 2.0
"""Time for a ready shell, on a busy machine, to show another prompt."""
IDLE_OUTPUT_BYTES = 64 * 1024
"""Limit of the output kept between two calls."""
INTERRUPT_KEYS = b"\x03\x1c"
r"""C-c and C-\, which bash may answer with another prompt."""
STREAM_BUFFER_CHUNKS = 16
RECORD_PIPE_BYTES = 64 * 1024
MAX_EXIT_CODE = 255
_EXIT_CODE = re.compile(rb"[0-9]{1,3}")
"""Other data that a command has written into the pipe is not a record: the shell's own will follow."""
TRAP_WORDS = b"trap -- "
"""The first words of the traps that a shell sends before its record. A command may have sent other text there."""
RECORD_FIELDS = 6
"""Number of fields of a complete record after its exit code: the fields of `CommandEnd`, and an empty one."""

ROWS, COLUMNS = 24, 160
READ_BYTES = 64 * 1024
RESTORED_SIGNALS = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGCHLD,
)
"""Reset to their default action in children: Python and shells ignore some signals, which is inherited."""
TIOCGPTPEER = 0x5441
"""ioctl: opens the other end of a pty, wherever its name is mounted."""
_IFLAG, _OFLAG, _LFLAG = 0, 1, 3


class Terminal:
    """The controlling end of a pty. Owns its file descriptor; `close` hangs up the terminal."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._plain_mode = _plain_mode(fd)
        self._closed = False

    def __repr__(self) -> str:
        return f"<Terminal fd {self._fd}{', closed' if self._closed else ''}>"

    def reset_mode(self) -> None:
        """Reset the terminal's mode: lines, signals by key, no echo, output untranslated."""
        if self._closed:
            return
        with suppress(termios.error):
            if termios.tcgetattr(self._fd) != self._plain_mode:  # setting it waits for the terminal's current work
                termios.tcsetattr(self._fd, termios.TCSANOW, self._plain_mode)

    def foreground_group(self) -> int | None:
        if self._closed:
            return None
        try:
            return os.tcgetpgrp(self._fd) or None
        except OSError:
            return None

    def read_nowait(self) -> bytes | None:
        """Read the available data, about `READ_BYTES` at most.

        None if there is none; `b""` once every process has closed the other end.
        """
        pieces: list[bytes] = []
        size_bytes = 0
        while size_bytes < READ_BYTES and not self._closed:
            try:
                piece = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return b"".join(pieces) or None
            except OSError as exc:
                if exc.errno != errno.EIO:  # a pty's end of file
                    raise
                break
            pieces.append(piece)
            size_bytes += len(piece)
        return b"".join(pieces)

    async def wait_readable(self) -> None:
        """Return when `read_nowait` will not return None.

        Raises:
            trio.ClosedResourceError: it was closed in the meantime.
        """
        if self._closed:
            raise trio.ClosedResourceError
        await trio.lowlevel.wait_readable(self._fd)

    def drop_input(self) -> None:
        """Discard typed input that was not read."""
        if self._closed:
            return
        with suppress(OSError, termios.error):
            peer = fcntl.ioctl(self._fd, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                termios.tcflush(peer, termios.TCIFLUSH)
            finally:
                os.close(peer)

    async def write(self, keys: bytes) -> None:
        """Type `keys`. Waits while the terminal's input queue is full; a cancelled write may have typed a part.

        Raises:
            trio.ClosedResourceError: it was closed in the meantime.
            trio.BrokenResourceError: no process has the other end open.
        """
        while keys:
            if self._closed:
                raise trio.ClosedResourceError
            try:
                keys = keys[os.write(self._fd, keys) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._fd)
            except OSError as exc:
                raise trio.BrokenResourceError from exc

    def close(self) -> None:
        """Hang up. Idempotent. Waiting tasks get `trio.ClosedResourceError`."""
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._fd)
            os.close(self._fd)


def spawn_on_terminal(
    argv: list[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    inherited: Mapping[int, int],
    terminal_copy: int | None,
    limit_this: Callable[[], None],
) -> tuple[int, int]:
    """Start `argv` as leader of a new session with a new pty as its controlling terminal. Blocks: call it in a thread.

    Args:
        argv: program (looked up in this process's PATH unless it is a path) and arguments.
        env: its whole environment.
        cwd: its working directory; `/` if that is gone.
        inherited: file descriptor in the child -> file descriptor here.
        terminal_copy: an additional file descriptor of the child for the terminal, or None.
        limit_this: called in the child, directly before the program is executed.

    Returns:
        The process id, and the pty's controlling end, which the caller owns.

    Raises:
        OSError: it could not be started.
    """
    from ptyprocess import PtyProcess

    def prepare() -> None:
        for number in RESTORED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # A failing chdir by ptyprocess itself would leave a second daemon running.
        os.chdir(cwd if os.path.isdir(cwd) else "/")
        termios.tcsetattr(0, termios.TCSANOW, _plain_mode(0))
        for there, here in inherited.items():
            os.dup2(here, there)
        if terminal_copy is not None:
            os.dup2(0, terminal_copy)
        limit_this()

    process = PtyProcess.spawn(
        argv,
        env=dict(env),
        preexec_fn=prepare,
        dimensions=(ROWS, COLUMNS),
        pass_fds=tuple(inherited.values()),
    )
    # ptyprocess kills on garbage collection, and sleeps when it closes: use only its numbers and end it ourselves.
    fd = os.dup(process.fd)
    process.fileobj.close()
    process.closed = True
    return process.pid, fd


def _plain_mode(fd: int) -> list[Any]:
    mode = termios.tcgetattr(fd)
    mode[_IFLAG] = (mode[_IFLAG] | termios.ICRNL) & ~(termios.IXON | termios.IXOFF | termios.ISTRIP | termios.INLCR)
    mode[_OFLAG] &= ~termios.OPOST
    mode[_LFLAG] |= termios.ICANON | termios.ISIG | termios.IEXTEN
    mode[_LFLAG] &= ~(termios.ECHO | termios.ECHOE | termios.ECHOK | termios.ECHONL | termios.TOSTOP)
    return mode


class RunningCommand:
    """A command in progress. `end` is None after `ended` if the shell was lost with it, or before it.

    `was_read` distinguishes these cases: it is False after `ended` if the shell never read the command. The output goes
    to the call that attends to the command, or into a small buffer.
    """

    def __init__(self) -> None:
        self.nonce = NONCE_MARK + secrets.token_hex(16)
        self.end: CommandEnd | None = None
        self.was_read = False
        self.was_interrupted = False
        self.ended = trio.Event()
        self.last_output_s = trio.current_time()
        """The time of its last output, on trio's clock."""
        self.splitter = BarrierSplitter(self.nonce.encode())
        self._output = CommandOutput(0)
        self._chunks: trio.MemorySendChannel[bytes] | None = None
        self._unattended: OutputBuffer | None = OutputBuffer(IDLE_OUTPUT_BYTES)

    def attend(self, output: CommandOutput, chunks: trio.MemorySendChannel[bytes] | None = None) -> None:
        """Store its output in `output` from now on, beginning with the unattended output.

        Args:
            output: the output of the current call.
            chunks: also gets the output as it arrives, if given; closed at the end.
        """
        assert self._unattended is not None
        unattended, self._unattended = self._unattended, None
        self._output, self._chunks = output, chunks
        self.take_nowait(unattended.capped().data)
        if self.ended.is_set():
            self._close_chunks()

    def leave(self) -> CappedOutput:
        """Return the output since `attend`; the command continues unattended. Call it before its end."""
        capped, rest = self._output.leave()
        self._unattended = OutputBuffer(IDLE_OUTPUT_BYTES)
        self._unattended.append(rest)
        self._close_chunks()
        return capped

    def take_nowait(self, data: bytes) -> None:
        """Store `data` as the beginning of a call's output, without waiting."""
        if data:
            self._keep(data)
            if self._chunks is not None:
                self._chunks.send_nowait(data)

    async def take(self, data: bytes) -> None:
        """Store `data`, output of the command, and send it to the stream, if any.

        Waits while the stream's reader is behind, which in turn delays the command.
        """
        if not data:
            return
        self.last_output_s = trio.current_time()
        self._keep(data)
        if self._chunks is not None:
            try:
                await self._chunks.send(data)
            except trio.BrokenResourceError:
                self._chunks = None  # the reader is gone

    def finish(self, end: CommandEnd | None, last: bytes = b"") -> None:
        """Set `end` and `ended`, after storing `last`, which is not streamed; no output may follow."""
        if last:
            self._keep(last)
        self.end = end
        self._close_chunks()
        self.ended.set()

    def output(self) -> CappedOutput:
        """Return the output since `attend`. Call it once, after its end."""
        return self._output.end()

    def unattended_output(self) -> bytes:
        """Return the output since `leave`, or since the start."""
        return b"" if self._unattended is None else self._unattended.capped().data

    def _keep(self, data: bytes) -> None:
        (self._output if self._unattended is None else self._unattended).append(data)

    def _close_chunks(self) -> None:
        if self._chunks is not None:
            self._chunks.close()
            self._chunks = None


class Shell:
    """A running shell. One command at a time, which its caller ensures."""

    def __init__(self, child: Child, terminal: Terminal, dialect: Dialect) -> None:
        self.child = child
        self.last_end = CommandEnd(0, "/")
        self._terminal = terminal
        self._dialect = dialect
        self._files = dialect.files
        self._gate_taken = False
        self.is_unsettled = False
        """A signal may still be in flight to the shell: call `settle` before the next command."""
        self._records = b""
        self._repeated_nonce = b""
        self._nonce_repeated = trio.Event()
        self._running: RunningCommand | None = None
        self._idle_output = OutputBuffer(IDLE_OUTPUT_BYTES)
        self._output_ended = trio.Event()
        self._gone = trio.Event()

    def __repr__(self) -> str:
        state = "gone" if self._gone.is_set() else "busy" if self._running else "idle"
        return f"<Shell {self.child.pid}: {state}>"

    async def wait_gone(self) -> None:
        """Wait until the shell has ended for any reason, and its last output has been received."""
        await self._gone.wait()

    async def begin(self, command: str, running: RunningCommand) -> None:
        """Start `command`, evaluated at the top level of the shell; it must not contain a NUL.

        Returns when it was sent.

        Output since the last command becomes the beginning of its output. If the shell has ended or ends, `running`
        ends without an `end`.
        """
        idle_output, self._idle_output = self._idle_output, OutputBuffer(IDLE_OUTPUT_BYTES)
        running.take_nowait(idle_output.capped().data)
        if self._gone.is_set():
            running.finish(None)
            return
        assert self._running is None
        self._running = running
        self._terminal.reset_mode()
        self._drain_records()
        self._records = b""
        trigger = self._dialect.trigger(command, running.nonce, self.last_end)
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # gone: `serve` finishes the command
            await self._terminal.write(trigger)

    async def type_keys(self, keys: bytes, running: RunningCommand) -> None:
        """Type `keys` only for `running`, and not at all if it is ending.

        Waits until the shell has read the command, and while the terminal's input queue is full; a cancelled call may
        have typed a part.
        """
        await self._wait_read(running)  # it may be at the gate before: without the token it would never read it
        if self._running is not running or not (self._gate_taken or self._files.take_gate()):
            return
        self._gate_taken = True
        if any(key in keys for key in INTERRUPT_KEYS):
            running.was_interrupted = True
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._terminal.write(keys)

    async def interrupt(self, already: set[int]) -> None:
        """Send SIGINT to the foreground process group: the command's foreground job, or the shell itself.

        Waits until the shell has read the command, so that the signal is not too early. The group of a program is added
        to `already`, and is not signalled again, so that it can clean up after an interrupt. This does not apply to the
        shell's own group, nor to a copy of the shell that is about to become a program, which may lose the signal. Has
        no effect when the command has ended.
        """
        running = self._running
        if running is None:
            return
        with trio.move_on_after(BEGIN_GRACE_S):
            await self._wait_read(running)
        if running.ended.is_set():
            return
        running.was_interrupted = True
        group = self._terminal.foreground_group()
        if group is not None and group not in already:
            if _link(group, "exe") != _link(
                self.child.pid, "exe"
            ):  # else it is the shell, or about to become a program
                already.add(group)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGINT)

    async def settle(self) -> None:
        """Wait until the shell, ready again, has processed all signals sent when the command just ended.

        Returns at once if it is gone. Otherwise a signal could arrive while it reads the next trigger, and discard the
        trigger. An empty line makes it show another prompt, and so does a signal. If no prompt appears within
        `SETTLE_GRACE_S`, `is_unsettled` stays set. The newlines with which it answers a signal are discarded.
        """
        if self._gone.is_set():
            return
        self.is_unsettled = True
        self._drain_records()
        self._records = b""
        self._terminal.reset_mode()
        self._files.open_gate()
        self._nonce_repeated = trio.Event()
        with trio.move_on_after(SETTLE_GRACE_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._terminal.write(b"\n")
            # A signal may arrive when the shell has just taken the token: it then repeats the record, and waits.
            await self._wait_mark(PROMPT_MARK, self._files.open_gate)
            self.is_unsettled = False
            await self._nonce_repeated.wait()  # the earlier terminal data has been received
        # Output of background processes in between is kept for the next command.
        if not self._idle_output.capped().data.strip(b"\n"):
            self._idle_output = OutputBuffer(IDLE_OUTPUT_BYTES)

    async def kill_foreground(self) -> None:
        """Kill (SIGKILL) the foreground job and its descendants. The shell continues with the rest of the command."""
        group = self._terminal.foreground_group()
        if group is not None and group != self.child.pid:
            await kill_until_gone(lambda table: table.with_descendants(lambda entry: entry.group == group))

    async def ask_for_report(self) -> None:
        """Type a line that makes a ready shell report, after the command has disabled its normal report.

        If a builtin of the shell reads the terminal instead, it gets the line.
        """
        if not self._gone.is_set() and self._terminal.foreground_group() == self.child.pid:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._terminal.write(self._dialect.report_line())

    def give_up(self) -> None:
        """Send SIGINT to the shell itself, which drops the rest of the command unless it ignores that signal."""
        self.child.kill_group(signal.SIGINT)

    async def kill(self) -> None:
        """Kill (SIGKILL) the shell, its session and its descendants; return when all have ended."""
        session = self.child.pid

        def members(table: ProcessTable) -> set[ProcessEntry]:
            return table.with_descendants(lambda entry: entry.session == session)

        self.child.kill_group(signal.SIGKILL)
        await kill_until_gone(members)

    async def serve(self) -> None:
        """Read the shell's output until it ends, then close all its resources. On cancellation it is killed."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_output)
                await self.child.wait()
                with trio.move_on_after(DRAIN_GRACE_S):
                    await self._output_ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            if self.child.exit_code is None:
                with trio.move_on_after(KILL_DEADLINE_S, shield=True):
                    await self.kill()
            self._drain_records()
            self._terminal.close()
            trio.lowlevel.notify_closing(self._files.record_read)
            self._files.close()
            self._gone.set()
            if self._running is not None:
                running, self._running = self._running, None
                running.was_read = BEGUN_MARK in self._records
                running.finish(None, running.splitter.flush())

    async def _take_output(self) -> None:
        while True:
            await self._terminal.wait_readable()
            data = self._terminal.read_nowait()
            if data is None:
                continue
            if not data:
                self._output_ended.set()
                return
            data = self._without_repeated_nonce(data)
            if self._running is None:
                self._idle_output.append(data)
            else:
                await self._take_command_output(self._running, data)

    def _without_repeated_nonce(self, data: bytes) -> bytes:
        if not self._repeated_nonce or self._repeated_nonce not in data:
            return data
        self._nonce_repeated.set()
        return data.replace(self._repeated_nonce, b"")

    async def _take_command_output(self, running: RunningCommand, data: bytes) -> None:
        before, after = running.splitter.feed(data)
        await running.take(before)
        while after is not None:
            end = self._read_record(running.nonce)
            if end is not None:
                self.last_end = end
                self._running = None
                # An interrupt may have cut off the prompt just after writing this; then it is repeated.
                self.is_unsettled = running.was_interrupted
                self._repeated_nonce = running.nonce.encode()  # repeated by every prompt until the next command
                if self._gate_taken:
                    self._gate_taken = False
                    self._terminal.drop_input()
                    self._files.open_gate()
                running.was_read = True
                self._idle_output.append(self._without_repeated_nonce(after))
                running.finish(end)
                return
            await running.take(running.nonce.encode())  # printed by the command itself
            before, after = running.splitter.feed(after)
            await running.take(before)

    async def _wait_read(self, running: RunningCommand) -> None:
        """Wait until the shell has read the current or last command, or is gone."""
        self._drain_records()
        if running.ended.is_set() or BEGUN_MARK in self._records:
            return

        async def stop_at_end(scope: trio.CancelScope) -> None:
            await running.ended.wait()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_at_end, nursery.cancel_scope)
            await self._wait_mark(BEGUN_MARK)
            nursery.cancel_scope.cancel()

    async def _wait_mark(self, mark: bytes, heard: Callable[[], None] | None = None) -> None:
        """Wait until the shell has sent `mark`, or is gone. `heard` is called after any other data."""
        with suppress(trio.ClosedResourceError):
            while mark not in self._records and not self._gone.is_set():
                await trio.lowlevel.wait_readable(self._files.record_read)
                if not self._drain_records():
                    await self._gone.wait()
                elif heard is not None:
                    heard()

    def _drain_records(self) -> bool:
        """Read the shell's messages. Return False if it can send no more."""
        if self._gone.is_set():
            return False
        try:
            sent = os.read(self._files.record_read, RECORD_PIPE_BYTES)
        except BlockingIOError:
            return True
        self._records = (self._records + sent)[-RECORD_PIPE_BYTES:]
        return bool(sent)

    def _read_record(self, nonce: str) -> CommandEnd | None:
        self._drain_records()
        before, *records = self._records.split(nonce.encode() + b"\0")
        _, begun, sent = before.partition(BEGUN_MARK)
        if not begun:
            return None
        for record in records:  # an interrupt may have cut off the first; records after a complete one may contain less
            code, *fields = record.split(b"\0")
            if _EXIT_CODE.fullmatch(code) and int(code) <= MAX_EXIT_CODE and len(fields) >= RECORD_FIELDS:
                self._records = b""
                cwd, flags, traps, *rest = map(os.fsdecode, fields[: RECORD_FIELDS - 1])
                if sent.startswith(TRAP_WORDS):
                    traps = os.fsdecode(sent) + traps
                return CommandEnd(int(code), cwd or _link(self.child.pid, "cwd") or "/", flags, traps, *rest)
        return None


@asynccontextmanager
async def open_shell(
    reaper: ChildReaper,
    dialect: type[Dialect],
    *,
    executable: str,
    env: dict[str, str],
    cwd: str,
    limiter: trio.CapacityLimiter,
) -> AsyncIterator[Shell]:
    """Start a shell and yield it ready for its first command; on exit, the rest of its session is killed.

    If a shell ends by itself, its session is not killed: its background processes live on.

    Raises:
        StartFailed: it could not be started, or was not ready within `START_TIMEOUT_S`.
    """
    shell = await _spawn(reaper, dialect, executable=executable, env=env, cwd=cwd, limiter=limiter)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shell.serve)
        first = RunningCommand()
        first.attend(CommandOutput(START_OUTPUT_BYTES))
        with trio.move_on_after(START_TIMEOUT_S):
            await shell.begin(dialect.init_command, first)
            await first.ended.wait()
        ready = first.end is not None
        if ready:
            yield shell
        nursery.cancel_scope.cancel()
    if not ready:
        said = first.output().text
        raise StartFailed(f"{executable} did not get ready (limit {START_TIMEOUT_S:g} s); it said: {said}")


async def _spawn(
    reaper: ChildReaper,
    dialect_type: type[Dialect],
    *,
    executable: str,
    env: dict[str, str],
    cwd: str,
    limiter: trio.CapacityLimiter,
) -> Shell:
    dialect = dialect_type(ShellFiles())

    def spawn() -> tuple[int, int]:
        with born_with(0):
            return spawn_on_terminal(
                [executable, *dialect.options],
                env=env,
                cwd=cwd,
                inherited=dialect.inherited(),
                terminal_copy=dialect.terminal_fd,
                limit_this=reaper.limit_this,
            )

    with ExitStack() as unused:
        unused.callback(dialect.files.close)
        try:
            with reaper.starting():
                pid, terminal_fd = await run_blocking(spawn, limiter=limiter)
                child = reaper.adopt(pid)
        except OSError as exc:
            raise StartFailed(f"{executable} could not be started: {exc}") from exc
        unused.pop_all()
    return Shell(child, Terminal(terminal_fd), dialect)


def _link(pid: int, name: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return None
