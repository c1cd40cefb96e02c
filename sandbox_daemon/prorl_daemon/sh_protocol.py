"""A POSIX shell (dash, busybox) in the words of `shell_protocol`.

It has no `PROMPT_COMMAND`, and reads no descriptor above 9 by number: what it inherits it opens by the paths in
/proc/self. (The daemon's own descriptors cannot be opened from another process: see `limits.hide_self`.)

1. The trigger writes `BEGUN_MARK`, sets `PS1` and sources the command's file.
2. `PS1` has a command substitution that sources the hook: at each prompt it sends `PROMPT_MARK` and the record, writes
   the nonce to the terminal, and passes the gate. It runs in a subshell, so it cannot remember what it did: later
   prompts repeat it. Where a command has made `PS1` read-only, the end of the trigger sources the hook; after a command
   that changes `PS1` and never comes to that end (C-c), the daemon types a line that does. busybox shows our next
   trigger after a command that left the terminal's echo on.

Our lines in the shell itself are special builtins and syntax, which no function can hide, and backslashes keep aliases
out; the hook's subshell drops functions of its names. `set -v` is off between commands. `set -n`, which dash
obeys, ends the shell when the command's time is up.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from prorl_daemon.shell_protocol import Dialect, replace_content

if TYPE_CHECKING:
    from prorl_daemon.shell_protocol import CommandEnd, ShellFiles

_HOOK = r"""__prorl_status=${{__prorl_status:-$?}} __prorl_flags=$-
\trap "" INT
\set +euxv
\unset -f printf read
\printf '\6%s\0%s\0%s\0%s\0\0\0\0\0' {nonce} "$__prorl_status" "${{PWD-}}" "$__prorl_flags" >{record}
\printf %s {nonce} >/dev/tty
\read -r __prorl_gate <{gate}
\printf '\n' >{gate}
"""
# An assignment to a read-only variable would take the rest of the line with it, so a subshell tries it.
_SET_PROMPT = r"""case ${{PS1-}} in '{prompt}') ;; *) (PS1= PS2=) && PS1='{prompt}' PS2=;; esac"""
_TRIGGER = (
    rf"""{{{{ \unset __prorl_status; \:; {_SET_PROMPT}; (\unset -f printf; \printf '\2') >{{record}}; }}}} """
    r"""2>/dev/null; {status}\. {command}; {{ __prorl_status=${{__prorl_status-$?}}; \set +v; """
    rf"""{_SET_PROMPT} || (\. {{hook}}) || \:; }}}} 2>/dev/null"""
)
_RESTORE_STATUS = "(exit {}) || "
# With `set -e`, a file that ends with a status that is not 0 ends the shell, even if no command did (`! true`).
_KEEP_STATUS = "\n\n{ __prorl_status=$?; } 2>/dev/null\n"
_SETS_E = re.compile(r"\bset\b[^\n;|&]*(?:-\w*e|errexit)")
_FIRST_FD = 60
_PROMPT = r"$({{ \. {hook}; }} 2>/dev/null)"


class PosixShell(Dialect):
    """An interactive `sh`. It edits no lines, for its terminal does not echo."""

    options: ClassVar[tuple[str, ...]] = ("-i",)
    init_command = "PS4='+ '"

    def __init__(self, files: ShellFiles) -> None:
        super().__init__(files)
        fds = {
            "command": files.command,
            "record": files.record_write,
            "gate": files.gate,
            "hook": files.hook,
        }
        self._inherited = dict(enumerate(fds.values(), _FIRST_FD))
        self._paths = {name: f"/proc/self/fd/{fd}" for name, fd in zip(fds, self._inherited, strict=True)}

    def inherited(self) -> dict[int, int]:
        return self._inherited

    def trigger(self, command: str, nonce: str, last: CommandEnd) -> bytes:
        # Only where it may matter: what ends within the command, such as a here-document, would take the line in.
        end = _KEEP_STATUS if "e" in last.flags or _SETS_E.search(command) else "\n"
        replace_content(self.files.command, f"{command}{end}")
        replace_content(self.files.hook, _HOOK.format(nonce=nonce, **self._paths))
        status = _RESTORE_STATUS.format(last.exit_code) if last.exit_code else ""
        prompt = _PROMPT.format(**self._paths)
        return _TRIGGER.format(prompt=prompt, status=status, **self._paths).encode() + b"\n"

    def report_line(self) -> bytes:
        return b"(\\. " + self._paths["hook"].encode() + b") 2>/dev/null\n"
