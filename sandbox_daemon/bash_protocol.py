"""bash in the words of `shell_protocol`: over descriptors of its own. The text that it reads is all here.

1. The files have a NUL at the end of each text, and both sides share their offsets: bash reads them in blocks, where it
   would read a pipe byte by byte.
2. The trigger, at the shell's top level, reads both, writes `BEGUN_MARK` to the record pipe, and evaluates the command
   with our descriptors closed, so that nothing it starts has them.
3. `PROMPT_COMMAND`, which bash runs whenever it is ready again, however the command ended, writes the record
   `traps nonce NUL exit code NUL directory NUL options NUL` to that pipe, and then the nonce to the terminal, and
   passes the gate. (The nonce lies ready twice: a command may unset our variables.) Where no command came before, it
   writes `PROMPT_MARK` and the last nonce instead. The traps are those that bash runs for its every command, as `trap
   -p` tells them: they are taken away, and put back where the next command begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sandbox_daemon.shell_protocol import Dialect, replace_content

if TYPE_CHECKING:
    from sandbox_daemon.shell_protocol import CommandEnd

__all__ = ["Bash"]

COMMAND_FD, RECORD_FD, TERMINAL_FD, NONCE_FD, GATE_FD = 250, 251, 252, 253, 254

# Of our variables n is the nonce, c the command, s its exit code, f the options after it, i whether none runs. The
# function r puts things back. The names are short because bash reads all this anew each time.
# Backslashes keep aliases out. Output of `set -x`, traps, and complaints about our own lines go nowhere. SIGINT makes
# bash drop what it does and show another prompt: what it cuts off here is done anew.
_PROMPT_COMMAND = (
    r"""{ __prorl_s=${__prorl_s:-$?} __prorl_f=${__prorl_f:-$-} PS1= PS2=; """
    r"""case ${__prorl_i-} in 1) \builtin printf "\6" >&251;; *) """
    r"""case ${__prorl_n-} in "") IFS= \builtin read -r -d "" -u 253 __prorl_n;; esac; """
    r"""{ \builtin trap -p DEBUG ERR RETURN; """
    r"""\builtin printf "%s\0%s\0%s\0%s\0" "$__prorl_n" "$__prorl_s" "${PWD-}" "$__prorl_f"; } >&251;; esac; """
    r"""\builtin trap - DEBUG ERR RETURN; \builtin set +x; \builtin printf "%s" "${__prorl_n-}" >&252; """
    r"""case ${__prorl_i-} in 1) ;; *) \builtin read -r -u 254 __prorl_c; \builtin printf "\n" >&254; """
    r"""__prorl_i=1;; esac; __prorl_s= __prorl_f= __prorl_c=; \builtin unset -f __prorl_r; } """
    r""">/dev/null 2>&1"""
)
# Begins with no reserved word: after a syntax error in `eval`, bash does not recognise one there. A command may have
# switched line editing or the echo of input on. A `read` that was interrupted leaves what it had not looked at yet in a
# buffer of bash's own, which the next `read` would take for what it reads: from /dev/null it only empties that. A
# command may have made `PROMPT_COMMAND` a list, which an assignment leaves in place, or read-only, where one ends the
# line.
_TRIGGER = (
    r"""__prorl_i= __prorl_n=; \builtin read -r -d "" __prorl_n </dev/null || \builtin :; """
    r"""IFS= \builtin read -r -d "" -u 253 __prorl_n; IFS= \builtin read -r -d "" -u 250 __prorl_c; """
    r"""\builtin printf "\2" >&251; __prorl_f=; @STATUS@"""
    r"""\builtin eval "${__prorl_c}" 250<&- 251>&- 252>&- 253<&- 254<&-; { __prorl_s=$? __prorl_f=$-; """
    r"""case ${PROMPT_COMMAND[@]+${#PROMPT_COMMAND[@]}} in ""|1) ;; *) \builtin unset PROMPT_COMMAND;; esac; """
    rf"""\builtin printf -v PROMPT_COMMAND %s '{_PROMPT_COMMAND}'; \builtin set +v +o vi +o emacs; }} >/dev/null 2>&1"""
)
# The command finds the last one's exit code in `$?`. A subshell could say `exit 3`, but an interrupt could catch it.
_RESTORE_STATUS = r"""__prorl_r() {{ \builtin return {0}; }}; __prorl_r || """
# Our own lines run with neither traps nor `set -x`. The command begins with this line, which puts them back.
_RESTORE_ALL = (
    r"""__prorl_r() {{ \builtin unset -f __prorl_r; {traps}{xtrace}\builtin return {status}; }}; """
    r"""__prorl_r >/dev/null 2>&1"""
)


class Bash(Dialect):
    """bash, interactive, with no history, no `!` expansion and no mail check."""

    options: ClassVar[tuple[str, ...]] = ("--norc", "--noprofile", "--noediting", "-i")
    terminal_fd = TERMINAL_FD
    init_command = "set +o history +H; history -c; unset HISTFILE MAILCHECK; PS4='+ '"

    def inherited(self) -> dict[int, int]:
        files = self.files
        return {COMMAND_FD: files.command, RECORD_FD: files.record_write, NONCE_FD: files.nonce, GATE_FD: files.gate}

    def lay_ready(self, command: str, nonce: str, last: CommandEnd) -> None:
        restore = _restore(last)
        replace_content(self.files.command, f"{restore}\n{command}\0" if restore else f"{command}\0")
        replace_content(self.files.nonce, f"{nonce}\0{nonce}\0")

    def trigger_line(self, last: CommandEnd) -> bytes:
        status = _RESTORE_STATUS.format(last.exit_code) if last.exit_code and not _restore(last) else ""
        return _TRIGGER.replace("@STATUS@", status).encode() + b"\n"


def _restore(last: CommandEnd) -> str:
    """Return lines that put back the traps and the option of the last command's end; empty if there were none."""
    if not last.traps and "x" not in last.flags:
        return ""
    traps = "".join(
        f"\\builtin {line}" if line.startswith("trap -- ") else line for line in last.traps.splitlines(True)
    )
    # With `set -e`, a status that is not 0 would end the shell.
    status = 0 if "e" in last.flags else last.exit_code
    return _RESTORE_ALL.format(traps=traps, xtrace="\\builtin set -x; " if "x" in last.flags else "", status=status)
