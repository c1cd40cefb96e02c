"""How a bash is told commands and heard out, over descriptors of its own. The text that it reads is all here.

The protocol, for each command:

1. The daemon puts the command and a nonce into two unnamed files, each with a NUL at its end (memfds whose offsets both
   sides share: bash reads them in blocks, where it would read a pipe byte by byte), and types one line, the trigger.
2. The trigger, at the shell's top level, reads both, writes `BEGUN_MARK` to the record pipe (from here on SIGINT
   reaches the command, not the prompt before it), and evaluates the command with our descriptors closed, so that
   nothing it starts has them.
3. `PROMPT_COMMAND`, which bash runs whenever it is ready again, however the command ended, writes the record
   `nonce NUL exit code NUL directory NUL` to that pipe, and then the nonce to the terminal. (The nonce lies ready
   twice: a command may unset our variables.) Where no command came before, it writes `PROMPT_MARK` instead.

The nonce on the terminal marks where the output ends, for the kernel may deliver the record before the last output. The
record makes it true: the nonce alone, printed by a program, is output like any other.
"""

from __future__ import annotations

__all__ = [
    "BEGUN_MARK",
    "COMMAND_FD",
    "INIT_COMMAND",
    "NONCE_FD",
    "NONCE_MARK",
    "PROMPT_MARK",
    "RECORD_FD",
    "TERMINAL_FD",
    "trigger_line",
]

COMMAND_FD, RECORD_FD, TERMINAL_FD, NONCE_FD = 250, 251, 252, 253
BEGUN_MARK = b"\x02"
"""In the record pipe: the trigger has read the command."""
PROMPT_MARK = b"\x06"
"""In the record pipe: a prompt that no command came before."""
NONCE_MARK = "\x1e"
"""First character of a nonce, so that the terminal's bytes need no look at unless it occurs."""

# Backslashes keep aliases out. Output of `set -x` and complaints about our own lines go nowhere. SIGINT makes bash drop
# what it does and show another prompt: what it cuts off here is done anew.
_PROMPT_COMMAND = (
    r"""{ __prorl_status=${__prorl_status:-$?} PS1= PS2=; """
    r"""case $- in *x*) __prorl_xtrace="set -x; ";; *) __prorl_xtrace=;; esac; \builtin set +x; """
    r"""case ${__prorl_idle-} in 1) \builtin printf "\6" >&251;; *) """
    r"""case ${__prorl_nonce-} in "") IFS= \builtin read -r -d "" -u 253 __prorl_nonce;; esac; """
    r"""\builtin printf "%s\0%s\0%s\0" "$__prorl_nonce" "$__prorl_status" "${PWD-}" >&251; """
    r"""\builtin printf "%s" "$__prorl_nonce" >&252; __prorl_idle=1;; esac; """
    r"""__prorl_nonce= __prorl_status= __prorl_command=; \builtin unset -f __prorl_restore; } 2>/dev/null"""
)
# Begins with no reserved word: after a syntax error in `eval`, bash does not recognise one there. A command may have
# switched line editing or the echo of input on.
_TRIGGER = (
    r"""__prorl_idle=; IFS= \builtin read -r -d "" -u 253 __prorl_nonce; """
    r"""IFS= \builtin read -r -d "" -u 250 __prorl_command; \builtin printf "\2" >&251; """
    r"""PROMPT_COMMAND='{prompt}'; {status}"""
    r"""\builtin eval "${{__prorl_xtrace-}}${{__prorl_command}}" 250<&- 251>&- 252>&- 253<&-; """
    r"""{{ __prorl_status=$? PROMPT_COMMAND='{prompt}'; \builtin set +v +o vi +o emacs; }} 2>/dev/null"""
)
# The command finds the last one's exit code in `$?`. A subshell could say `exit 3`, but an interrupt could catch it.
_RESTORE_STATUS = r"""__prorl_restore() {{ \builtin return {0}; }}; __prorl_restore || """
# No history, no `!` expansion, no mail check; the trigger's own descriptors are all that differs from a user's shell.
INIT_COMMAND = "set +o history +H; history -c; unset HISTFILE MAILCHECK; PS4='+ '"


def trigger_line(last_exit_code: int) -> bytes:
    """What is typed to run the command that lies ready. `last_exit_code` is what it finds in `$?`."""
    status = _RESTORE_STATUS.format(last_exit_code) if last_exit_code else ""
    return _TRIGGER.format(prompt=_PROMPT_COMMAND, status=status).encode() + b"\n"
