"""The protocol between the daemon and any shell: marks, files, and the differences between shells.

For each command the daemon writes the command and a nonce to two unnamed files, and types one line, the trigger, into
the shell's terminal. However the command ends, the shell reports it with a record in a pipe, and marks the end of the
output with the nonce on the terminal. The kernel may deliver the record before the last output, so the nonce marks the
end of the output. Only the record makes it valid: a nonce that a program prints is output like any other.

**The gate** is a pipe with one newline in it. Before the shell reads its terminal again it takes the newline and puts
it back. The daemon removes it before it types anything for a command, and returns it after discarding input that the
command did not read. So the shell never runs input that was meant for a command.
"""

from __future__ import annotations

import abc
import os
from contextlib import suppress
from typing import ClassVar, Final

import msgspec

from prorl_daemon.memory_files import make_memory_file

BEGUN_MARK: Final = b"\x02"
"""In the record pipe: the shell has read the command, so that SIGINT now reaches the command, not the prompt."""
PROMPT_MARK: Final = b"\x06"
"""In the record pipe: a prompt without a preceding command."""
NONCE_MARK: Final = "\x1e"
"""First character of a nonce, so that terminal data without it need not be searched."""
GATE_TOKEN: Final = b"\n"
GATE_READ_BYTES: Final = 64


class CommandEnd(msgspec.Struct, frozen=True):
    """The end of a command, as reported by the shell.

    Attributes:
        exit_code, cwd: the command's exit code, and the shell's directory afterwards.
        flags: the shell's options: letters as in `$-`, a colon, names as in `$SHELLOPTS`.
        traps, disabled, function: shell code for the traps that run for every command, the disabled builtins, and a
            function that hides a builtin that the dialect calls.
    """

    exit_code: int
    cwd: str
    flags: str = ""
    traps: str = ""
    disabled: str = ""
    function: str = ""


class ShellFiles:
    """The daemon's ends of the files shared with one shell. Owns its descriptors; `close` closes them.

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
        """Allow the shell to read its terminal. Idempotent."""
        self.take_gate()
        os.write(self._gate_write, GATE_TOKEN)

    def take_gate(self) -> bool:
        """Prevent the shell from reading its terminal.

        False if it has already passed the command, or the gate is taken.
        """
        with suppress(BlockingIOError):
            return bool(os.read(self._gate_read, GATE_READ_BYTES))
        return False

    def close(self) -> None:
        """Close all descriptors. Call it once."""
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
    """The syntax for one kind of shell, over `files`."""

    options: ClassVar[tuple[str, ...]]
    terminal_fd: ClassVar[int | None] = None
    """The number of the shell's own descriptor for its terminal."""
    init_command: ClassVar[str]
    """The first command, before the user's."""

    def __init__(self, files: ShellFiles) -> None:
        self.files = files

    @abc.abstractmethod
    def inherited(self) -> dict[int, int]:
        """Descriptor in the shell -> descriptor here."""

    @abc.abstractmethod
    def trigger(self, command: str, nonce: str, last: CommandEnd) -> bytes:
        """Write the files for the shell, and return the line that runs `command`, which must not contain a NUL.

        The command finds the exit code of `last`, the previous command, in `$?`.
        """

    @abc.abstractmethod
    def report_line(self) -> bytes:
        """Return a line with which a ready shell that did not report the previous command reports it."""


def replace_content(fd: int, text: str) -> None:
    """Replace the file's content and rewind the offset that its readers may share."""
    content = text.encode(errors="surrogateescape")
    os.pwrite(fd, content, 0)
    if os.fstat(fd).st_size > len(content):  # truncating costs more than all the rest here
        os.ftruncate(fd, len(content))
    os.lseek(fd, 0, os.SEEK_SET)
