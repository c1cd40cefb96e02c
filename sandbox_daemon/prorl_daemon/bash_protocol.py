"""bash as a dialect of `shell_protocol`, over its own descriptors. All text that bash reads is in this module.

1. The trigger, typed at the shell's top level, contains the nonce and the command. (A command that is long, or contains
   characters that a terminal treats specially, is read from its file.) It writes `BEGUN_MARK` to the record pipe,
   evaluates the command, and reports. Our descriptors are closed in all programs, but not in the shell itself.
2. A report writes the record to that pipe: nonce, exit code, directory, options, traps, disabled builtins and function,
   with a NUL after each; the traps may come before the nonce. Then it writes the nonce to the terminal and passes the
   gate. `PROMPT_COMMAND`, which bash runs whenever it is ready again, reports a command that was interrupted. At every
   prompt but the first after a report it writes `PROMPT_MARK` and the last nonce. (The nonce is also in a file, because
   a command may unset our variables.)
3. A report also removes everything that could disturb our own lines: the options of `NEUTRAL`, aliases, the traps that
   bash runs for every command, and a function `builtin`. It enables the builtins that we call. The next command begins
   with text that restores all of this.
4. Our lines are in a function, `__prorl_f`, which a user can see (`declare -f`) and delete. The trigger and
   `PROMPT_COMMAND` then evaluate the long report, which is in the hook file and defines the function again. A command
   that deletes the function and makes `builtin` useless is reported when it times out. A command that deletes it and
   disables a builtin that the report calls finds the builtin enabled again.

The shell is ended by `exit`, `exec`, a failing command under `set -e`, end of file on its input, and `TMOUT`. The same
holds for `set -o vi`, `set +o vi` and the same with `emacs`. In bash 5.2 these replace the input of the surrounding
`eval` (a sourced file may contain them). It also exits, with the command's exit code, if the report's means are
removed, for example by a limit below our descriptors' numbers (`ulimit -n 4`) or a restricted shell. A `DEBUG` trap
that refuses every command under `extdebug` also refuses our lines; such a shell is replaced when the command times out.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, ClassVar, Final

from prorl_daemon.shell_protocol import Dialect, replace_content

if TYPE_CHECKING:
    from prorl_daemon.shell_protocol import CommandEnd, ShellFiles


COMMAND_FD, RECORD_FD, TERMINAL_FD, NONCE_FD, GATE_FD, HOOK_FD = 50, 51, 52, 53, 54, 55
"""Above the descriptors that people use and that bash saves into, and below any usual limit."""
NEUTRAL: Final = "aeEkTtuvx"
"""Options, as letters of `$-`, that are off in our own lines. All but `-v` are restored."""
NONCE_CHARS = 33
MAX_TYPED_CHARS = 500
"""A longer command is read from its file, because a terminal holds 4,095 characters of a line, and is slow."""

# Our variables are the elements of one array, because `set -a` exports no array: 1 the exit code and 2 the options
# after the command, 3 whether it is reported ("1"; "2" after the next prompt), 4 whether `builtin` works, 5 text
# that restores it, 6 unimportant, 7 the nonce, 8 the command, 9 `_LONG_REPORT`, 10 `PROMPT_COMMAND`.
# Backslashes prevent aliases. Output of `set -x`, traps, and complaints about our own lines is discarded. SIGINT makes
# bash stop and show another prompt: parts that it cuts off here are repeated. Bash parses the trigger and
# `PROMPT_COMMAND` for every command, some 60 ns a character, so their code is in a function that it parses once.
_RECORD = r"""\builtin printf "%s\0%s\0%s\0%s\0" "${__prorl[7]}" "${__prorl[1]}" "${PWD-}" "${__prorl[2]}" """
_SHORT_RECORD = r"""\builtin printf "%s\0%s\0%s\0%s\0\0\0\0" "${__prorl[7]}" "${__prorl[1]}" "${PWD-}" "$-" """
_TRAPS = r"""\builtin trap -p DEBUG ERR RETURN"""
_UNTRAP = r"""\builtin trap - DEBUG ERR RETURN"""
# A `read` may have left unread data in a buffer of bash, which the next `read` would mistake for its input.
# A read from /dev/null, our standard input, only empties it. Other ways to read depend on `IFS`.
_EMPTY_BUFFER = r"""\builtin read -r -d "" "__prorl[6]" """
_FINISH = (
    r"""\builtin printf %s "${__prorl[7]}" >&52 && \builtin read -r -u 54 "__prorl[6]" && """
    r"""\builtin printf "\n" >&54 && __prorl[1]= __prorl[2]= __prorl[3]=1"""
)
_EXIT = r"""\builtin exit "${__prorl[1]:-1}"; \builtin exit "${__prorl[1]:-1}" """
# Works in any state that the command left. Until `set` runs, a failing line may end the shell, and so may an
# unset variable. In POSIX mode functions do not take precedence over `unset`.
_REPAIR = (
    r"""__prorl[2]=${__prorl[2]:-$-:$SHELLOPTS:$BASHOPTS} __prorl[4]=; """
    r"""\builtin printf -v "__prorl[4]" x && \builtin eval "" || __prorl[4]=; case ${__prorl[4]-} in x) ;; *) """
    r"""__prorl[5]=$(POSIXLY_CORRECT=1; \unset -f declare enable; \declare -f builtin; \enable -n) || __prorl[6]=; """
    r"""\command enable unset || \enable unset || __prorl[6]=; POSIXLY_CORRECT=1; \unset -f builtin enable; """
    r"""\enable builtin eval printf || __prorl[6]=;; esac; """
    r"""case ${__prorl[9]-} in "") \builtin enable read || __prorl[6]=; """
    rf"""{_EMPTY_BUFFER}; \builtin read -r -N 99999 -u 55 "__prorl[9]" || __prorl[6]=;; esac"""
)
# If the function is gone, the builtins called here were not repaired; that they were disabled is forgotten then.
_EVAL_LONG_REPORT = (
    r"""\builtin enable builtin eval printf read; """
    r"""case ${__prorl[9]-} in "") \builtin read -r -N 99999 -u 55 "__prorl[9]";; esac; """
    r"""\builtin eval "${__prorl[9]-}" """
)
# Most commands leave nothing that disturbs our lines; then the report is short, and the builtins that it calls are
# enabled. A sourced file may have switched line editing on, which bash only switches off at the top level.
_FUNCTION = (
    r"""__prorl_f() { case ${1-} in """
    r"""s) \builtin return "$2";; """
    rf"""x) {_EXIT};; """
    r"""t) __prorl[4]=x;; """
    r"""v) case :$SHELLOPTS: in *:vi:*|*:emacs:*) \builtin set +o vi; \builtin set +o emacs;; esac;; """
    r"""*) case $1${__prorl[3]-} in p2) __prorl[1]=; """
    r"""\builtin printf "\6" >&51; \builtin printf %s "${__prorl[7]-}" >&52; \builtin return 0;; """
    rf"""e) case $- in *[{NEUTRAL}]*) ;; *) case """
    r"""${__prorl[7]:+y}${#BASH_ALIASES[@]}${#PROMPT_COMMAND[@]}${PS0+x}${PS1-}${PS2-}:$SHELLOPTS: in """
    r"""*:history:*|*:vi:*|*:emacs:*) ;; y01:*) case ${PROMPT_COMMAND-} in "${__prorl[10]:-.}") """
    rf"""__prorl[4]=; \builtin eval "__prorl[4]=x"; case ${{__prorl[4]-}} in x) {_EMPTY_BUFFER}; """
    rf"""{_SHORT_RECORD} >&51 && {_FINISH} && \builtin return 0;; esac;; esac;; esac;; esac;; esac; """
    rf"""{_REPAIR}; \builtin return 1;; """
    r"""esac; }"""
)
# Whether it is reported is checked again, because a command may have replaced the function.
_PROMPT_COMMAND = (
    r"""case ${__prorl[3]-} in 1) __prorl[3]=2;; *) { __prorl[1]=${__prorl[1]:-$?}; \__prorl_f p; """
    rf"""case ${{__prorl[3]-}} in 2) ;; *) {_EVAL_LONG_REPORT} && __prorl[3]=2;; esac; }} """
    r"""</dev/null >/dev/null 2>&1 || \__prorl_f x;; esac"""
)
# Bash parses it line by line: the first line contains no reserved word, since the command may have aliased it. The
# end of POSIX mode enables aliases, and its beginning `inherit_errexit`. A command may have made `PROMPT_COMMAND` a
# list, which an assignment does not replace, or read-only.
_LONG_REPORT = (
    r"""__prorl[2]=${__prorl[2]:-$-:$SHELLOPTS:$BASHOPTS}; \builtin shopt -u expand_aliases || __prorl[6]="""
    "\n"
    r"""case ${__prorl[4]-}:${__prorl[2]}: in x:*|*:posix:*) ;; *) \builtin unset POSIXLY_CORRECT; """
    r"""case ${__prorl[2]}: in *:inherit_errexit:*) ;; *) \builtin shopt -u inherit_errexit;; esac;; esac; """
    r"""\builtin shopt -u expand_aliases || __prorl[6]=; case ${BASH_ALIASES[@]+1}${__prorl[2]}: in """
    r"""1*:expand_aliases:*) __prorl[2]+=:aliases;; *:expand_aliases:*) \builtin shopt -s expand_aliases;; esac; """
    rf"""\builtin set +{NEUTRAL} || __prorl[6]=; \builtin set +o history; """
    rf"""\builtin enable read; {_EMPTY_BUFFER}; """
    r"""case ${__prorl[7]-} in "") \builtin read -r -N 33 -u 53 "__prorl[7]";; esac; """
    rf"""{{ {_RECORD} >&51 && {_TRAPS} >&51; \builtin printf "\0" >&51; \builtin enable -n >&51; """
    rf"""\builtin printf "\0%s\0" "${{__prorl[5]-}}" >&51; }} || \__prorl_f x; """
    r"""\builtin enable builtin enable eval exit printf read return set shopt trap unset; """
    rf"""\builtin set +{NEUTRAL}; {_UNTRAP}; """
    r"""case ${PS0+x} in x) \builtin unset PS0;; esac; \builtin printf -v PS1 %s ""; \builtin printf -v PS2 %s ""; """
    r"""case ${PROMPT_COMMAND[@]+${#PROMPT_COMMAND[@]}} in ""|1) ;; *) \builtin unset PROMPT_COMMAND;; esac; """
    rf"""__prorl[10]='{_PROMPT_COMMAND}'; \builtin printf -v PROMPT_COMMAND %s "${{__prorl[10]}}"; """
    rf"""__prorl[4]=; \__prorl_f t; case ${{__prorl[4]}} in x) ;; *) \builtin eval '{_FUNCTION}';; esac; """
    rf"""\builtin unset -f __prorl_r; __prorl[5]=; {_FINISH}"""
)
_READ_COMMAND = r"""\builtin read -r -N 999999999 -u 50 "__prorl[8]"; """
_TRIGGER_BEGIN = r"""__prorl[3]= __prorl[7]="""
_TRIGGER_MARK = r"""\builtin printf "\2" "" >&51; """
_TRIGGER_END = (
    rf"""{{ __prorl[1]=$?; {_TRAPS} >&51; {_UNTRAP}; \__prorl_f e; case ${{__prorl[3]-}} in 1) ;; """
    rf"""*) {_EVAL_LONG_REPORT} && \__prorl_f v;; esac; }} </dev/null >/dev/null 2>&1 || \__prorl_f x"""
)


# A copy of a descriptor that bash saved during a redirection is closed in programs, like the saved one.
_CLOSE_ON_EXEC = "".join(
    f"{{ exec 60<&10; }} {fd}<&-; exec {fd}<&60 60<&-; "
    for fd in (COMMAND_FD, RECORD_FD, TERMINAL_FD, NONCE_FD, GATE_FD, HOOK_FD)
)


# A POSIX shell (dash, busybox) as a dialect of `shell_protocol`.
#
# It lacks `PROMPT_COMMAND`, and reads no descriptor above 9 by number: it opens inherited ones by their paths in
# /proc/self. (The daemon's own descriptors cannot be opened from another process: see `limits.hide_self`.)
#
# 1. The trigger writes `BEGUN_MARK`, sets `PS1` and sources the command's file.
# 2. `PS1` has a command substitution that sources the hook: at each prompt it sends `PROMPT_MARK` and the record,
#    writes the nonce to the terminal, and passes the gate. It runs in a subshell, so it cannot store its state:
#    later prompts repeat it. If a command has made `PS1` read-only, the end of the trigger sources the hook. After a
#    command that changes `PS1` and never reaches that end (C-c), the daemon types a line that does. busybox shows our
#    next trigger after a command that left the terminal's echo on.
#
# Our lines in the shell itself are special builtins and syntax, which no function can hide, and backslashes prevent
# aliases; the hook's subshell drops functions of its names. `set -v` is off between commands. `set -n`, which
# dash obeys, ends the shell when the command times out.

_HOOK = r"""__prorl_status=${{__prorl_status:-$?}} __prorl_flags=$-
\trap "" INT
\set +euxv
\unset -f printf read
\printf '\6%s\0%s\0%s\0%s\0\0\0\0\0' {nonce} "$__prorl_status" "${{PWD-}}" "$__prorl_flags" >{record}
\printf %s {nonce} >/dev/tty
\read -r __prorl_gate <{gate}
\printf '\n' >{gate}
"""
# An assignment to a read-only variable would skip the rest of the line, so a subshell tests it.
_SET_PROMPT = r"""case ${{PS1-}} in '{prompt}') ;; *) (PS1= PS2=) && PS1='{prompt}' PS2=;; esac"""
_TRIGGER = (
    rf"""{{{{ \unset __prorl_status; \:; {_SET_PROMPT}; (\unset -f printf; \printf '\2') >{{record}}; }}}} """
    r"""2>/dev/null; {status}\. {command}; {{ __prorl_status=${{__prorl_status-$?}}; \set +v; """
    rf"""{_SET_PROMPT} || (\. {{hook}}) || \:; }}}} 2>/dev/null"""
)
_RESTORE_STATUS = "(exit {}) || "
# With `set -e`, a file with a non-zero final status ends the shell, even if no command failed (`! true`).
_KEEP_STATUS = "\n\n{ __prorl_status=$?; } 2>/dev/null\n"
_SETS_E = re.compile(r"\bset\b[^\n;|&]*(?:-\w*e|errexit)")
_FIRST_FD = 60
_PROMPT = r"$({{ \. {hook}; }} 2>/dev/null)"


class PosixShell(Dialect):
    """An interactive `sh`. It needs no line editing, because its terminal does not echo."""

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
        # Only if necessary: an unfinished construct in the command, such as a here-document, would swallow the line.
        end = _KEEP_STATUS if "e" in last.flags or _SETS_E.search(command) else "\n"
        replace_content(self.files.command, f"{command}{end}")
        replace_content(self.files.hook, _HOOK.format(nonce=nonce, **self._paths))
        status = _RESTORE_STATUS.format(last.exit_code) if last.exit_code else ""
        prompt = _PROMPT.format(**self._paths)
        return _TRIGGER.format(prompt=prompt, status=status, **self._paths).encode() + b"\n"

    def report_line(self) -> bytes:
        return b"(\\. " + self._paths["hook"].encode() + b") 2>/dev/null\n"


class Bash(Dialect):
    """bash, interactive, without history, `!` expansion and mail check."""

    options: ClassVar[tuple[str, ...]] = ("--norc", "--noprofile", "--noediting", "-i")
    terminal_fd = TERMINAL_FD
    init_command = _CLOSE_ON_EXEC + "set +o history +H; history -c; unset HISTFILE MAILCHECK; PS4='+ '"

    def __init__(self, files: ShellFiles) -> None:
        super().__init__(files)
        replace_content(files.hook, _LONG_REPORT)

    def inherited(self) -> dict[int, int]:
        files = self.files
        return {
            COMMAND_FD: files.command,
            RECORD_FD: files.record_write,
            NONCE_FD: files.nonce,
            GATE_FD: files.gate,
            HOOK_FD: files.hook,
        }

    def trigger(self, command: str, nonce: str, last: CommandEnd) -> bytes:
        assert len(nonce) == NONCE_CHARS
        files = self.files
        os.pwrite(files.nonce, (nonce + nonce).encode(), 0)
        os.lseek(files.nonce, 0, os.SEEK_SET)
        os.lseek(files.hook, 0, os.SEEK_SET)
        restore = _restore(last)
        if restore:
            command = f"{restore}\n{command}"
        if len(command) <= MAX_TYPED_CHARS and command.isascii() and command.isprintable() and "!" not in command:
            read, word = "", "'" + command.replace("'", r"'\''") + "'"
        else:
            replace_content(files.command, command)
            read, word = _READ_COMMAND, '"${__prorl[8]-}"'
        status = rf'\__prorl_f s {last.exit_code} "" || ' if last.exit_code and not restore else ""
        return (
            f"{_TRIGGER_BEGIN}{nonce}; {read}{_TRIGGER_MARK}{status}\\builtin eval -- {word}; {_TRIGGER_END}\n".encode()
        )

    def report_line(self) -> bytes:
        return f"{_FUNCTION}; {_PROMPT_COMMAND}\n".encode()


def _restore(last: CommandEnd) -> str:
    """Return lines that restore the state removed by the last report; empty if it removed nothing."""
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
    # `enable -n` of builtins that our lines need, then the hiding function: none of our lines can follow.
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
        # With `set -e`, a non-zero status would end the shell.
        lines.append(f"\\builtin return {0 if 'e' in options else last.exit_code}\n")
    enable = "\\builtin enable unset; " if disabled else ""
    return f"__prorl_r() {{ {enable}\\builtin unset -f __prorl_r\n{''.join(lines)}}}; __prorl_r >/dev/null 2>&1"
