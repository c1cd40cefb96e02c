"""bash in the words of `shell_protocol`: over descriptors of its own. The text that it reads is all here.

1. The files have a NUL at the end of each text, and both sides share their offsets: bash reads them in blocks, where it
   would read a pipe byte by byte.
2. The trigger, at the shell's top level, reads both, writes `BEGUN_MARK` to the record pipe, and evaluates the command
   with our descriptors closed, so that nothing it starts has them.
3. `PROMPT_COMMAND`, which bash runs whenever it is ready again, however the command ended, writes the record
   `nonce NUL exit code NUL directory NUL` to that pipe, and then the nonce to the terminal, and passes the gate. (The
   nonce lies ready twice: a command may unset our variables.) Where no command came before, it writes `PROMPT_MARK`
   instead.
"""

from __future__ import annotations

from typing import ClassVar

from sandbox_daemon.shell_protocol import Dialect, replace_content

__all__ = ["Bash"]

COMMAND_FD, RECORD_FD, TERMINAL_FD, NONCE_FD, GATE_FD = 250, 251, 252, 253, 254

# Backslashes keep aliases out. Output of `set -x` and complaints about our own lines go nowhere. SIGINT makes bash drop
# what it does and show another prompt: what it cuts off here is done anew.
_PROMPT_COMMAND = (
    r"""{ __prorl_status=${__prorl_status:-$?} PS1= PS2=; """
    r"""case $- in *x*) __prorl_xtrace="set -x; ";; *) __prorl_xtrace=;; esac; \builtin set +x; """
    r"""case ${__prorl_idle-} in 1) \builtin printf "\6" >&251;; *) """
    r"""case ${__prorl_nonce-} in "") IFS= \builtin read -r -d "" -u 253 __prorl_nonce;; esac; """
    r"""\builtin printf "%s\0%s\0%s\0" "$__prorl_nonce" "$__prorl_status" "${PWD-}" >&251; """
    r"""\builtin printf "%s" "$__prorl_nonce" >&252; """
    r"""\builtin read -r -u 254 __prorl_command; \builtin printf "\n" >&254; __prorl_idle=1;; esac; """
    r"""__prorl_nonce= __prorl_status= __prorl_command=; \builtin unset -f __prorl_restore; } 2>/dev/null"""
)
# Begins with no reserved word: after a syntax error in `eval`, bash does not recognise one there. A command may have
# switched line editing or the echo of input on. A `read` that was interrupted leaves what it had not looked at yet in a
# buffer of bash's own, which the next `read` would take for what it reads: from /dev/null it only empties that.
_TRIGGER = (
    r"""__prorl_idle=; \builtin read -r -d "" __prorl_nonce </dev/null || \builtin :; """
    r"""IFS= \builtin read -r -d "" -u 253 __prorl_nonce; """
    r"""IFS= \builtin read -r -d "" -u 250 __prorl_command; \builtin printf "\2" >&251; """
    r"""PROMPT_COMMAND='{prompt}'; {status}"""
    r"""\builtin eval "${{__prorl_xtrace-}}${{__prorl_command}}" 250<&- 251>&- 252>&- 253<&- 254<&-; """
    r"""{{ __prorl_status=$? PROMPT_COMMAND='{prompt}'; \builtin set +v +o vi +o emacs; }} 2>/dev/null"""
)
# The command finds the last one's exit code in `$?`. A subshell could say `exit 3`, but an interrupt could catch it.
_RESTORE_STATUS = r"""__prorl_restore() {{ \builtin return {0}; }}; __prorl_restore || """


class Bash(Dialect):
    """bash, interactive, with no history, no `!` expansion and no mail check."""

    options: ClassVar[tuple[str, ...]] = ("--norc", "--noprofile", "--noediting", "-i")
    terminal_fd = TERMINAL_FD
    init_command = "set +o history +H; history -c; unset HISTFILE MAILCHECK; PS4='+ '"

    def inherited(self) -> dict[int, int]:
        files = self.files
        return {COMMAND_FD: files.command, RECORD_FD: files.record_write, NONCE_FD: files.nonce, GATE_FD: files.gate}

    def lay_ready(self, command: str, nonce: str) -> None:
        replace_content(self.files.command, f"{command}\0")
        replace_content(self.files.nonce, f"{nonce}\0{nonce}\0")

    def trigger_line(self, last_exit_code: int) -> bytes:
        status = _RESTORE_STATUS.format(last_exit_code) if last_exit_code else ""
        return _TRIGGER.format(prompt=_PROMPT_COMMAND, status=status).encode() + b"\n"
