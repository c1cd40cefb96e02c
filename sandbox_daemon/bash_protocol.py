"""bash in the words of `shell_protocol`: over descriptors of its own. The text that it reads is all here.

1. The trigger, typed at the shell's top level, reads the nonce and the command from their files, writes `BEGUN_MARK` to
   the record pipe, evaluates the command with our descriptors closed, so that nothing it starts has them, and reports.
2. A report writes the record to that pipe: nonce, exit code, directory, options, traps, disabled builtins and function,
   with a NUL after each. Then it writes the nonce to the terminal and passes the gate. `PROMPT_COMMAND`, which bash
   runs whenever it is ready again, reports a command that was interrupted; after a command that was reported it writes
   `PROMPT_MARK` and the last nonce. (The nonce lies ready twice, because a command may unset our variables.)
3. A report also takes away what could disturb our own lines: the options of `NEUTRAL`, aliases, the traps that bash
   runs for its every command, and a function `builtin`; it enables the builtins that we call. The next command begins
   with text that puts all of that back.

What ends the shell: `exit`, `exec`, a failing command under `set -e`, end of file on its input, `TMOUT`; and what takes
the report's means away, such as a limit below our descriptors' numbers (`ulimit -n 4`) or a restricted shell: it exits
then with the command's exit code. A `DEBUG` trap that refuses every command under `extdebug` refuses our lines as well:
such a shell is replaced when the command's time is up.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar, Final

from sandbox_daemon.shell_protocol import Dialect, replace_content

if TYPE_CHECKING:
    from sandbox_daemon.shell_protocol import CommandEnd, ShellFiles

__all__ = ["Bash"]

COMMAND_FD, RECORD_FD, TERMINAL_FD, NONCE_FD, GATE_FD, HOOK_FD = 50, 51, 52, 53, 54, 55
"""Above what people use and bash saves descriptors in, and below any usual limit."""
NEUTRAL: Final = "aeEkTtuvx"
"""Options, as letters of `$-`, that are off in our own lines. All but `-v` are put back."""
NONCE_CHARS = 33

# Our variables are the elements of one array, because `set -a` exports no array: 1 the exit code and 2 the options
# after the command, 3 whether it is reported, 4 whether `builtin` works, 5 text that puts it back, 6 nothing that
# matters, 7 the nonce, 8 the command, 9 `PROMPT_COMMAND`. Backslashes keep aliases out. Output of `set -x`, traps, and
# complaints about our own lines go nowhere. SIGINT makes bash drop what it does and show another prompt: what it cuts
# off here is done anew. Until `set` runs, a line that fails may end the shell, and so may an unset variable.
_FIX_BUILTIN = (
    r"""__prorl[5]=$(POSIXLY_CORRECT=1; \unset -f declare enable; \declare -f builtin; \enable -n) || __prorl[4]=; """
    r"""case :$BASHOPTS: in *:inherit_errexit:*) __prorl[4]=1;; esac; \enable unset || __prorl[6]=; """
    # In POSIX mode no function comes before `unset`.
    r"""case :$SHELLOPTS: in *:posix:*) \unset -f builtin enable;; """
    r"""*) POSIXLY_CORRECT=1; \unset -f builtin enable; \unset POSIXLY_CORRECT;; esac; """
    r"""\enable builtin printf || \builtin :; """
    r"""case ${__prorl[4]-} in 1) ;; *) \builtin shopt -u inherit_errexit || \builtin :;; esac; """
)
_REPORT = (
    r"""{ __prorl[1]=${__prorl[1]:-$?} __prorl[2]=${__prorl[2]:-$-:$SHELLOPTS} __prorl[4]=; """
    r"""\builtin printf -v "__prorl[4]" x || __prorl[4]=; """
    rf"""case ${{__prorl[4]-}} in x) ;; *) {_FIX_BUILTIN};; esac; """
    rf"""\builtin set +{NEUTRAL} || __prorl[4]=; \builtin set +o history; """
    r"""case ${#BASH_ALIASES[@]}:$BASHOPTS: in 0:*) ;; *:expand_aliases:*) \builtin shopt -u expand_aliases; """
    r"""__prorl[2]+=:aliases;; esac; """
    r"""case ${__prorl[3]-} in 1) \builtin printf "\6" >&51;; *) """
    r"""case ${__prorl[7]-} in "") \builtin read -r -N 33 -u 53 "__prorl[7]";; esac; """
    r"""{ \builtin printf "%s\0%s\0%s\0%s\0" "${__prorl[7]}" "${__prorl[1]}" "${PWD-}" "${__prorl[2]}"; """
    r"""\builtin trap -p DEBUG ERR RETURN; \builtin printf "\0"; \builtin enable -n; """
    r"""\builtin printf "\0%s\0" "${__prorl[5]-}"; } >&51 """
    r"""|| { \builtin exit "${__prorl[1]}"; \builtin exit "${__prorl[1]}"; };; esac; """
    r"""\builtin enable builtin enable eval exit printf read return set shopt trap unset; """
    rf"""\builtin set +{NEUTRAL}; \builtin trap - DEBUG ERR RETURN; """
    r"""case ${PS0+x} in x) \builtin unset PS0;; esac; \builtin printf -v PS1 %s ""; """
    r"""\builtin printf -v PS2 %s ""; @PROMPT@"""
    r"""\builtin printf %s "${__prorl[7]-}" >&52; case ${__prorl[3]-} in 1) ;; """
    r"""*) \builtin read -r -u 54 "__prorl[6]"; \builtin printf "\n" >&54; __prorl[3]=1;; esac; """
    r"""\builtin unset -f __prorl_r; __prorl[1]= __prorl[2]= __prorl[5]=; } </dev/null >/dev/null 2>&1 """
    r"""|| { \builtin exit "${__prorl[1]:-1}"; \builtin exit "${__prorl[1]:-1}"; }"""
)
_PROMPT_COMMAND = _REPORT.replace("@PROMPT@", "")
# A command may have made `PROMPT_COMMAND` a list, which an assignment leaves in place, or read-only.
_REPORT_ALL = _REPORT.replace(
    "@PROMPT@",
    r"""case ${__prorl[9]-} in "") \builtin read -r -N 99999 -u 55 "__prorl[9]";; esac; """
    r"""case ${PROMPT_COMMAND[@]+${#PROMPT_COMMAND[@]}} in ""|1) ;; *) \builtin unset PROMPT_COMMAND;; esac; """
    r"""\builtin printf -v PROMPT_COMMAND %s "${__prorl[9]-}"; """,
)
# A `read` that was interrupted leaves what it had not looked at yet in a buffer of bash's own, which the next `read`
# would take for what it reads: from /dev/null it only empties that. Other ways to read depend on `IFS`. A command may
# have switched line editing on, which only works at the top level.
_TRIGGER = (
    r"""__prorl[3]= __prorl[7]=; \builtin read -r -d "" "__prorl[8]" </dev/null || __prorl[8]=; """
    r"""\builtin read -r -N 33 -u 53 "__prorl[7]"; \builtin read -r -N 999999999 -u 50 "__prorl[8]" || __prorl[6]=; """
    r"""\builtin printf "\2" >&51; __prorl[1]= __prorl[2]=; @STATUS@"""
    rf"""\builtin eval "${{__prorl[8]-}}" 50<&- 51>&- 52>&- 53<&- 54<&- 55<&-; {_REPORT_ALL}; """
    r"""case :$SHELLOPTS: in *:vi:*|*:emacs:*) \builtin set +o vi; \builtin set +o emacs;; esac"""
)
# The command finds the last one's exit code in `$?`. A subshell could say `exit 3`, but an interrupt could catch it.
_RESTORE_STATUS = r"""__prorl_r() {{ \builtin return {0}; }}; __prorl_r || """


class Bash(Dialect):
    """bash, interactive, with no history, no `!` expansion and no mail check."""

    options: ClassVar[tuple[str, ...]] = ("--norc", "--noprofile", "--noediting", "-i")
    terminal_fd = TERMINAL_FD
    init_command = "set +o history +H; history -c; unset HISTFILE MAILCHECK; PS4='+ '"

    def __init__(self, files: ShellFiles) -> None:
        super().__init__(files)
        replace_content(files.hook, _PROMPT_COMMAND)

    def inherited(self) -> dict[int, int]:
        files = self.files
        return {
            COMMAND_FD: files.command,
            RECORD_FD: files.record_write,
            NONCE_FD: files.nonce,
            GATE_FD: files.gate,
            HOOK_FD: files.hook,
        }

    def lay_ready(self, command: str, nonce: str, last: CommandEnd) -> None:
        assert len(nonce) == NONCE_CHARS
        restore = _restore(last)
        replace_content(self.files.command, f"{restore}\n{command}" if restore else command)
        replace_content(self.files.nonce, nonce + nonce)
        os.lseek(self.files.hook, 0, os.SEEK_SET)

    def trigger_line(self, last: CommandEnd) -> bytes:
        status = _RESTORE_STATUS.format(last.exit_code) if last.exit_code and not _restore(last) else ""
        return _TRIGGER.replace("@STATUS@", status).encode() + b"\n"

    def report_line(self) -> bytes:
        return _REPORT_ALL.encode() + b"\n"


def _restore(last: CommandEnd) -> str:
    """Return lines that put back what the last report took away; empty if it was nothing."""
    letters, _, names = last.flags.partition(":")
    options = "".join(letter for letter in letters if letter in NEUTRAL and letter != "v")
    has_history, has_aliases = ("history" in names.split(":")), names.endswith(":aliases")
    if not (options or has_history or has_aliases or last.traps or last.disabled or last.function):
        return ""
    lines = [f"\\builtin {line}" if line.startswith("trap -- ") else line for line in last.traps.splitlines(True)]
    if has_aliases:
        lines.append("\\builtin shopt -s expand_aliases\n")
    if has_history:
        lines.append("\\builtin set -o history\n")
    if options:
        lines.append(f"\\builtin set -{options}\n")
    # `enable -n` of what our lines need, and then the function that hides it: nothing of ours can follow.
    function = "".join(line for line in last.function.splitlines(True) if not line.startswith("enable -n "))
    disabled = [
        line.removeprefix("enable -n ")
        for line in (last.disabled + last.function).splitlines()
        if line.startswith("enable -n ")
    ]
    if disabled:
        lines.append(f"\\builtin enable -n {' '.join(disabled)}\n")
    if function:
        lines.append(f"{function}\n")
    if not (disabled or function):
        # With `set -e`, a status that is not 0 would end the shell.
        lines.append(f"\\builtin return {0 if 'e' in options else last.exit_code}\n")
    return f"__prorl_r() {{ \\builtin unset -f __prorl_r\n{''.join(lines)}}}; __prorl_r >/dev/null 2>&1"
