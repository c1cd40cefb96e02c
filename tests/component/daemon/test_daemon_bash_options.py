"""The daemon's own lines in bash work whatever a command did to the shell, and put back what they had to take away."""

from __future__ import annotations

import itertools
import random
import subprocess

import pytest
import trio

from prorl_ipc.sandbox_calls import BashRestart, BashRestarted, BashResult, BashRun

CALL_TIMEOUT_S = 30
LETTERS = "abefhkmnptuvxBCEHPT"
NAMES = ("pipefail", "posix", "history", "ignoreeof", "nolog", "interactive-comments")
NOT_KEPT = "nv"
"""An interactive shell ignores `-n`; the daemon puts all back but `-v`."""

# A command that changes the shell; what may follow it in the output of the next commands is checked below.
CHANGES = {
    "strict mode": "set -euo pipefail",
    "strict mode, traced": "set -Eeuxo pipefail",
    "prompt command": "PROMPT_COMMAND='echo no'",
    "prompt command, unset under -u": "set -u; unset PROMPT_COMMAND",
    "prompt command under -u": "set -u; PROMPT_COMMAND='echo no'",
    "prompt command under -eu": "set -eu; PROMPT_COMMAND='false; exit 7'",
    "prompt commands under -eu": "set -eu; PROMPT_COMMAND=('exit 7' false)",
    "prompt command, exported": "export PROMPT_COMMAND PS1",
    "prompts": "PS0='zero '; PS1='one '; PS2='two '; PS4='$(echo four) '",
    "prompts with commands": "PS0='$(exit 3)'; PS1='$(exit 4)'; PS1+='$nope'; set -u",
    "prompts, unset": "unset PS0 PS1 PS2 PS4; set -eu",
    "prompts, read-only": "PS0= PS1= PS2=; readonly PS0 PS1 PS2 PS4; set -eu",
    "prompt command, read-only": "readonly PROMPT_COMMAND; set -eu",
    "IFS": "IFS=abcdef0123456789",
    "IFS, read-only and empty": "readonly IFS=; set -eu",
    "IFS, unset": "unset IFS; set -u",
    "PATH, unset": "set -eu; unset PATH",
    "PWD and others, unset": "set -eu; unset PWD OLDPWD REPLY _ HOME TERM",
    "locale": "LC_ALL=C; LANG=xx; set -e",
    "BASH_XTRACEFD": "exec 9>/dev/null; BASH_XTRACEFD=9; set -x",
    "traps": "trap 'false' DEBUG; trap 'echo E >&2' ERR; trap 'false' RETURN; trap 'true' EXIT; set -TE",
    "traps under -eu": "set -eu; trap ': $BASH_COMMAND' DEBUG; trap ':' ERR RETURN",
    "traps and extdebug": "shopt -s extdebug; trap '[[ $BASH_COMMAND != rm* ]]' DEBUG",
    "signals": "trap '' INT TERM QUIT TSTP; trap : CHLD USR1",
    "functions": "; ".join(
        f"{name}() {{ command echo FUNCTION {name}; }}"
        for name in ("printf", "read", "trap", "set", "unset", "eval", "return", "enable", "declare", "exit", "cd", "[")
    ),
    "a function builtin that does nothing": "builtin() { true; }",
    "a function builtin that fails, under -e": "builtin() { false; }; set -eu",
    "a function builtin that reads": "builtin() { cat; }",
    "functions builtin, unset and enable": "unset() { true; }; enable() { true; }; builtin() { true; }; set -u",
    "functions command and builtin": "command() { true; }; builtin() { true; }; set -x",
    "a function builtin in POSIX mode": "builtin() { true; }; set -o posix",
    "aliases": "shopt -s expand_aliases; "
    + "; ".join(f"alias {name}='echo ALIAS {name};'" for name in ("printf", "builtin", "command", "trap", ":")),
    "aliases of reserved words": "alias case='echo no;' {='echo no;' in='no' esac=no; set -u",
    "a function builtin that passes on": 'builtin() { command builtin "$@"; }; set -eu',
    "our variables and the aliases, unset": "unset __prorl BASH_ALIASES PROMPT_COMMAND; set -eu",
    "aliases of reserved words, and a function builtin": "builtin() { false; }; alias case='no;' {='no;' in=no esac=no",
    "line editing, in a sourced file": ". <(echo set -o vi); set -u",
    "each builtin that is called, disabled": "enable -n eval exit printf read return set shopt trap unset",
    "disabled": "enable -n printf echo read trap set true; builtin echo >/dev/null",
    "disabled, with builtin": "enable -n printf eval unset builtin",
    "disabled under -eu": "set -eu; enable -n printf read return",
    "limits": "ulimit -n 64; ulimit -s 1024; set -eu",
    "umask and terminal": "umask 777; stty raw echo; set -e",
    "redirections": "exec 3>&1 4</dev/null 9>&2",
    "standard error closed": "exec 2>&-",
    "output elsewhere": "exec 5>&1 >/dev/null 2>&1",
    "positional parameters": "set -- a 'b c'; set -eu; shift",
    "exports everything": "set -a; . /dev/null",
    "POSIXLY_CORRECT": "POSIXLY_CORRECT=1; set -eu",
    "our function, deleted": "unset -f $(compgen -A function)",
    "our function and variables, deleted": "unset -f $(compgen -A function); unset ${!__prorl*} PROMPT_COMMAND; set -u",
    "our function, deleted, and another prompt": "unset -f __prorl_f; PROMPT_COMMAND=(no no); set -T",
    "our function, deleted, and builtins disabled": "unset -f __prorl_f; enable -n printf eval read trap; set -u",
    "our function, replaced": "__prorl_f() { true; }; set -eu",
    "our function, replaced by one that fails": "__prorl_f() { false; }",
    "our function, read-only": "readonly -f __prorl_f; set -eu",
    "our function, traced": "declare -ft __prorl_f; trap 'false' DEBUG RETURN ERR",
    "functions do not nest": "FUNCNEST=1; readonly FUNCNEST; set -eu",
    "our function, not found": "command_not_found_handle() { echo NOT FOUND; }; unset -f __prorl_f",
}


async def _run(sandbox, command):
    with trio.fail_after(CALL_TIMEOUT_S + 10):
        result = await sandbox.call(BashRun(command=command, timeout_s=20), BashResult, timeout_s=CALL_TIMEOUT_S)
    assert (result.timed_out, result.restarted) == (False, False), (command, result)
    return result


def _turned(sign, options):
    return "; ".join(f"set {sign}o {name}" if len(name) > 1 else f"set {sign}{name}" for name in options)


async def _keeps_shell(sandbox, options, label):
    """Turn `options` on in one command, look at the shell in others, and turn them off."""
    first = await _run(sandbox, f"x={label}; cd /usr; {_turned('-', options)}; ls /usr >/dev/null; echo good")
    assert (first.exit_code, first.output.splitlines()[-1]) == (0, "good"), (options, first)
    second = await _run(sandbox, 'echo "$x $PWD $- $SHELLOPTS"')
    kept, folder, letters, names = second.output.splitlines()[-1].split(" ")
    assert (second.exit_code, kept, folder) == (0, label, "/usr"), (options, second)
    for option in options:
        assert option in NOT_KEPT or option in (letters if len(option) == 1 else names.split(":")), (options, second)
    assert "prorl" not in first.output + second.output, options
    third = await _run(sandbox, f"{_turned('+', reversed(options))}; ls nope 2>/dev/null || cd /; echo ended")
    assert (third.exit_code, third.cwd, third.output.splitlines()[-1]) == (0, "/", "ended"), (options, third)


async def test_each_option_and_each_pair(sandbox):
    options = [*LETTERS, *NAMES]
    for number, chosen in enumerate(
        itertools.chain(((option,) for option in options), itertools.combinations(options, 2))
    ):
        await _keeps_shell(sandbox, chosen, f"k{number}")


async def test_each_shopt(sandbox):
    known = subprocess.run(["bash", "-c", "shopt"], capture_output=True, text=True, check=True).stdout
    for name in (line.split()[0] for line in known.splitlines()):
        if name in ("login_shell", "restricted_shell"):  # cannot be set
            continue
        before = (await _run(sandbox, f"shopt {name}")).output
        for verb in ("-s", "-u"):
            for strict in ("set +eu", "set -eu"):
                await _run(sandbox, f"{strict}; shopt {verb} {name}; x={verb}")
                result = await _run(sandbox, f'echo "$x"; shopt {name} || true')
                assert result.output.split() == [verb, name, "on" if verb == "-s" else "off"], (name, verb, result)
        await _run(sandbox, f"set +eu; shopt {'-s' if before.split()[-1] == 'on' else '-u'} {name}")


async def test_each_change(sandbox):
    for label, change in CHANGES.items():
        await sandbox.call(BashRestart(), BashRestarted, timeout_s=CALL_TIMEOUT_S)
        await _run(sandbox, "x=1; y=2")
        await _run(sandbox, f"cd /usr; {change}")
        for number in range(3):
            result = await _run(sandbox, f"x=$((x + 1)); test {number} = {number}")
            assert (result.exit_code, result.cwd) == (0, "/usr"), (label, result)
        result = await _run(sandbox, "command test $x$y = 42")
        assert "prorl" not in result.output, label


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        ("exit 3", 3),
        ("exec true", 0),
        ("set -e; false", 1),
        ("set -eu; echo $nope", 1),
        ("ulimit -n 4; true", 1),
        ("kill -9 $$", 137),
        ("set -r; true", 1),
    ],
)
async def test_what_ends_the_shell_is_reported_at_once(sandbox, command, exit_code):
    with trio.fail_after(CALL_TIMEOUT_S):
        result = await sandbox.call(BashRun(command=command, timeout_s=20), BashResult, timeout_s=CALL_TIMEOUT_S)
    assert (result.exit_code, result.timed_out, result.restarted) == (exit_code, False, True), result
    assert (await _run(sandbox, "echo $x; pwd")).exit_code == 0


async def test_an_interrupted_command_that_changed_the_prompt_command_reports(sandbox):
    for change in ("set -u; unset PROMPT_COMMAND", "PROMPT_COMMAND=(: :); PS1=x"):
        command = BashRun(command=f"x=kept; {change}; sleep 100", timeout_s=0.2)
        result = await sandbox.call(command, BashResult, timeout_s=CALL_TIMEOUT_S)
        assert (result.timed_out, result.restarted) == (True, False), (change, result)
        assert (await _run(sandbox, "echo $x; unset x")).output.endswith("kept\n")


async def test_changes_one_after_the_other(sandbox):
    """Any three changes with any options between them leave a shell that answers."""
    dice = random.Random(28)
    left_out = {"umask and terminal", "limits", "strict mode, traced", "a function builtin that reads"}
    left_out.update(name for name in CHANGES if name.startswith("our "))  # `set -x` shows the command itself
    left_out.add("BASH_XTRACEFD")  # a trace that is sent to the terminal by number has our lines in it
    for _ in range(60):
        await sandbox.call(BashRestart(), BashRestarted, timeout_s=CALL_TIMEOUT_S)
        log = []
        names = dice.sample(sorted(set(CHANGES) - left_out), 3)
        if {"traps", "traps and extdebug"} <= {*names}:
            continue  # together they refuse every command, which ends the shell
        for name in names:
            # Not `-e`: one of them that fails would end the shell, as it should.
            for command in (f"set -{dice.choice(LETTERS.replace('e', ''))}", CHANGES[name].replace("-e", "-x")):
                log.append(command)
                with trio.fail_after(CALL_TIMEOUT_S):
                    result = await sandbox.call(
                        BashRun(command=command, timeout_s=5), BashResult, timeout_s=CALL_TIMEOUT_S
                    )
                assert (result.timed_out, result.restarted) == (False, False), (log, result)
                assert "prorl" not in result.output, (log, result)


POSIX_CHANGES = [
    *(f"set -{letter}" for letter in "abefmuvxCI"),
    *(f"set -{letter}u" for letter in "abefmvxCI"),
    *(f"set -{letter}e" for letter in "abfmuvxCI"),
    "set -euC; set -o ignoreeof; ! true",
    "readonly PS1=; set -u",
    "readonly PS2; set -u",
    "PS1= PS2= PS4=; set -u",
    "readonly IFS=abcdef0123456789; unset PATH; set -u",
    "unset PWD OLDPWD HOME PS4; set -u",
    "printf() { true; }; command() { true; }; read() { true; }; echo() { true; }",
    "alias printf=false command=false read=false set=false trap=false unset=false .=false",
    "trap '' INT TERM; trap true EXIT; umask 777",
]


async def test_each_change_of_a_posix_shell(start_daemon, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sh").symlink_to("/bin/dash")
    daemon = start_daemon(env={"PATH": str(folder)})
    daemon.wait_ready()
    async with daemon.connect() as sandbox:
        for change in POSIX_CHANGES:
            await sandbox.call(BashRestart(), BashRestarted, timeout_s=CALL_TIMEOUT_S)
            await _run(sandbox, "x=1; y=2")
            await _run(sandbox, f"cd /usr; {change}")
            for number in range(3):
                result = await _run(sandbox, f"x=$((x + 1)); test {number} = {number}")
                assert (result.exit_code, result.cwd) == (0, "/usr"), (change, result)
            result = await _run(sandbox, "test $x$y = 42")
            assert "prorl" not in result.output, change
