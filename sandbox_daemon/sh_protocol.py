"""A POSIX shell (dash, busybox) in the words of `shell_protocol`.

It has no `PROMPT_COMMAND`, and reads no descriptor above 9 by number: what it inherits it opens by the paths in
/proc/self. (The daemon's own descriptors cannot be opened from another process: see `limits.hide_self`.)

1. The trigger writes `BEGUN_MARK`, sets `PS1` and sources the command's file.
2. `PS1` has a command substitution that sources the hook: at each prompt it sends `PROMPT_MARK` and the record, writes
   the nonce to the terminal, and passes the gate. It runs in a subshell, so it cannot remember what it did: later
   prompts repeat it. A command that changes `PS1` and then does not return to the trigger (a syntax error, C-c) takes
   its own report away; its time runs out and the shell is replaced. busybox shows our next trigger after a command that
   left the terminal's echo on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sandbox_daemon.shell_protocol import Dialect, replace_content

if TYPE_CHECKING:
    from sandbox_daemon.shell_protocol import CommandEnd, ShellFiles

__all__ = ["PosixShell"]

_HOOK = r"""__prorl_status=${{__prorl_status:-$?}}
trap "" INT
set +eux
IFS= read -r __prorl_nonce <{nonce}
command printf '\6%s\0%s\0%s\0\0' "$__prorl_nonce" "$__prorl_status" "${{PWD-}}" >{record}
command printf '%s' "$__prorl_nonce" >/dev/tty
read -r __prorl_gate <{gate}
echo >{gate}
"""
_TRIGGER = (
    r"""{{ __prorl_status=; PS1='{prompt}' PS2=; command printf '\2' >{record}; }} 2>/dev/null; {status}"""
    r""". {command}; {{ __prorl_status=$?; PS1='{prompt}' PS2=; }} 2>/dev/null"""
)
_RESTORE_STATUS = "(exit {}); "
_FIRST_FD = 60
_PROMPT = "$({{ . {hook}; }} 2>/dev/null)"


class PosixShell(Dialect):
    """An interactive `sh`. It edits no lines, for its terminal does not echo."""

    options: ClassVar[tuple[str, ...]] = ("-i",)
    init_command = "PS4='+ '"

    def __init__(self, files: ShellFiles) -> None:
        super().__init__(files)
        fds = {
            "command": files.command,
            "nonce": files.nonce,
            "record": files.record_write,
            "gate": files.gate,
            "hook": files.hook,
        }
        self._inherited = dict(enumerate(fds.values(), _FIRST_FD))
        self._paths = {name: f"/proc/self/fd/{fd}" for name, fd in zip(fds, self._inherited, strict=True)}
        replace_content(files.hook, _HOOK.format(**self._paths))

    def inherited(self) -> dict[int, int]:
        return self._inherited

    def lay_ready(self, command: str, nonce: str, last: CommandEnd) -> None:
        replace_content(self.files.command, f"{command}\n")
        replace_content(self.files.nonce, f"{nonce}\n")

    def trigger_line(self, last: CommandEnd) -> bytes:
        status = _RESTORE_STATUS.format(last.exit_code) if last.exit_code else ""
        prompt = _PROMPT.format(**self._paths)
        return _TRIGGER.format(prompt=prompt, status=status, **self._paths).encode() + b"\n"
