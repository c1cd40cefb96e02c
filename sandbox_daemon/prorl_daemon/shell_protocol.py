"""The protocol between the daemon and any shell: marks, files, and what differs from shell to shell.

For each command the daemon lays the command and a nonce ready in two unnamed files, and types one line, the trigger,
into the shell's terminal. However the command ends, the shell reports it with a record in a pipe, and marks the end of
the output with the nonce on the terminal. The kernel may deliver the record before the last output, so the nonce tells
where the output ends; the record makes it true: the nonce alone, printed by a program, is output like any other.

**The gate** is a pipe with one newline in it. Before the shell reads its terminal again it takes that and puts it back.
The daemon takes it away before it types anything for a command, and puts it back when it has thrown away what the
command did not read: what was meant for a command is never run by the shell.
"""

from __future__ import annotations

import abc
import os
from contextlib import suppress
from typing import ClassVar, Final

import msgspec

from prorl_daemon.memory_files import make_memory_file

BEGUN_MARK: Final = b"\x02"
"""In the record pipe: the shell has read the command. From here on SIGINT reaches it, not the prompt before it."""
PROMPT_MARK: Final = b"\x06"
"""In the record pipe: a prompt that no command came before."""
NONCE_MARK: Final = "\x1e"
"""First character of a nonce, so that the terminal's bytes need no look at unless it occurs."""
GATE_TOKEN: Final = b"\n"
GATE_READ_BYTES: Final = 64


class CommandEnd(msgspec.Struct, frozen=True):
    """The end of a command, as the shell tells it.

    Attributes:
        exit_code, cwd: the command's, and the shell's afterwards.
        flags: the shell's options: letters as in `$-`, a colon, names as in `$SHELLOPTS`.
        traps, disabled, function: the shell's words for the traps that it runs for its every command, the builtins that
            are disabled, and a function that hides what the dialect calls.
    """

    exit_code: int
    cwd: str
    flags: str = ""
    traps: str = ""
    disabled: str = ""
    function: str = ""


class ShellFiles:
    """The daemon's ends of what it shares with one shell. Owns its descriptors; `close` closes them.

    Attributes:
        command, nonce, hook: unnamed files.
        record_read: not blocking.
        record_write, gate: the shell's ends, blocking.
    """

    def __init__(self) -> None:
        self.command = make_memory_file("command")
        self.nonce = make_memory_file("nonce")
        self.hook = make_memory_file("hook")
        self.record_read, self.record_write = os.pipe2(os.O_CLOEXEC)
        self._gate_read, self._gate_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.gate = os.open(f"/proc/self/fd/{self._gate_read}", os.O_RDWR | os.O_CLOEXEC)
        os.set_blocking(self.record_read, False)
        self.open_gate()

    def open_gate(self) -> None:
        """Let the shell read its terminal. Idempotent."""
        self.take_gate()
        os.write(self._gate_write, GATE_TOKEN)

    def take_gate(self) -> bool:
        """Keep the shell from reading its terminal. False if it is past the command already, or the gate is taken."""
        with suppress(BlockingIOError):
            return bool(os.read(self._gate_read, GATE_READ_BYTES))
        return False

    def close(self) -> None:
        """Close them all. Call it once."""
        for fd in (
            self.command,
            self.nonce,
            self.hook,
            self.record_read,
            self.record_write,
            self.gate,
            self._gate_read,
            self._gate_write,
        ):
            os.close(fd)


class Dialect(abc.ABC):
    """The words in which one kind of shell is spoken to, over `files`."""

    options: ClassVar[tuple[str, ...]]
    terminal_fd: ClassVar[int | None] = None
    """The number at which the shell gets a descriptor of its own for its terminal."""
    init_command: ClassVar[str]
    """The first command, before the user's."""

    def __init__(self, files: ShellFiles) -> None:
        self.files = files

    @abc.abstractmethod
    def inherited(self) -> dict[int, int]:
        """Descriptor in the shell -> descriptor here."""

    @abc.abstractmethod
    def trigger(self, command: str, nonce: str, last: CommandEnd) -> bytes:
        """Lay ready what the shell reads, and return the line that runs `command`, which has no NUL.

        The command finds the exit code of `last`, the command before, in `$?`.
        """

    @abc.abstractmethod
    def report_line(self) -> bytes:
        """Return a line by which a shell that is ready, and did not say so, reports the command before."""


def replace_content(fd: int, text: str) -> None:
    """Write the file anew and rewind the offset that its readers may share."""
    content = text.encode(errors="surrogateescape")
    os.pwrite(fd, content, 0)
    if os.fstat(fd).st_size > len(content):  # to cut a file off costs more than all the rest here
        os.ftruncate(fd, len(content))
    os.lseek(fd, 0, os.SEEK_SET)
