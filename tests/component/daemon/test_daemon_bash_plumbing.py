"""The daemon's own lines in the shell: they are neither seen by what a user sets in it, nor disturbed by it."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from prorl_daemon.bash_protocol import Bash
from prorl_daemon.children import ChildReaper
from prorl_daemon.plain_text import CommandOutput
from prorl_daemon.shell import RunningCommand, open_shell
from prorl_ipc.limits import SandboxLimits
from prorl_ipc.sandbox_calls import BashResult, BashRun

CALL_TIMEOUT_S = 30
SETTLED_S = 0.05
DEBUG = "trap 'echo \"DBG $BASH_COMMAND\"' DEBUG"

# (name, [(command, exit code, output), ...]): one session, command after command.
SESSIONS = [
    (
        "a DEBUG trap",
        [
            (f"{DEBUG}; echo a", 0, "DBG echo a\na\n"),
            ("echo b", 0, "DBG echo b\nb\n"),
            ("false", 1, "DBG false\n"),
            ("echo $?", 0, "DBG echo $?\n1\n"),
            ("if (", 2, None),
            ("echo c", 0, "DBG echo c\nc\n"),
            ("trap -p DEBUG", 0, f"DBG trap -p DEBUG\n{DEBUG.replace('trap', 'trap --')}\n"),
            ("trap - DEBUG; echo d", 0, "DBG trap - DEBUG\nd\n"),
            ("echo e", 0, "e\n"),
        ],
    ),
    (
        "a DEBUG trap for functions too, that spans lines and counts",
        [
            ("set -T; seen=''; trap '\nseen=$seen.\n' DEBUG", 0, ""),
            ("f() { :; }; seen=''; f; echo $seen", 0, "....\n"),
            ("(exit 3)", 3, ""),
            ("echo $?", 0, "3\n"),
        ],
    ),
    (
        "an ERR trap",
        [
            ("trap 'echo ERR $?' ERR", 0, ""),
            ("false", 1, "ERR 1\n"),
            ("echo $?", 0, "1\n"),
            ("set -E; f() { false; true; }; f", 0, "ERR 1\n"),
            ("(exit 4) || true", 0, ""),
        ],
    ),
    (
        "a RETURN trap",
        [
            ("trap 'echo RET' RETURN; set -T", 0, ""),
            ("f() { :; }; f", 0, "RET\n"),
            ("(exit 4)", 4, ""),
            ("echo $?", 0, "4\n"),
        ],
    ),
    (
        "all at once, with set -x",
        [
            ("trap ': E' ERR; trap ': R' RETURN; trap ': D' DEBUG; set -x; echo a", 0, "+++ : D\n++ echo a\na\n"),
            ("false", 1, "+++ : D\n++ false\n++++ : D\n+++ : E\n"),
            ("set +x; trap - DEBUG ERR RETURN; echo $?", 0, None),
            ("echo b", 0, "b\n"),
        ],
    ),
    ("set -x and the exit code", [("set -x", 0, ""), ("(exit 3)", 3, "++ exit 3\n"), ("echo $?", 0, "++ echo 3\n3\n")]),
    ("set -x and set -e", [("set -xe; false || true", 0, "++ false\n++ true\n"), ("echo a", 0, "++ echo a\na\n")]),
    ("set -u and traps", [(f"set -u; {DEBUG}; echo a", 0, "DBG echo a\na\n"), ("echo b", 0, "DBG echo b\nb\n")]),
    (
        "a PS4 with commands",
        [("PS4='$(echo P) '; set -x; echo a", 0, "PP echo a\na\n"), ("echo b", 0, "PP echo b\nb\n")],
    ),
    ("prompt commands as a list", [("PROMPT_COMMAND=(one two)", 0, ""), ("echo a", 0, "a\n"), ("echo b", 0, "b\n")]),
    ("one prompt command more", [("PROMPT_COMMAND+=('echo no')", 0, ""), ("echo a", 0, "a\n")]),
    (
        "a prompt command that is read-only",
        [("readonly PROMPT_COMMAND", 0, ""), ("echo a", 0, "a\n"), ("false", 1, "")],
    ),
    (
        "a DEBUG trap whose output is a command",
        [
            ("trap 'echo \"x=$((x + 1)) #\"' DEBUG", 0, ""),
            (":", 0, None),
            ("trap - DEBUG; echo ${x-none}", 0, None),
            ("echo ${x-none}", 0, "none\n"),
        ],
    ),
    (
        "descriptors of the user's",
        [("exec 10<<<ten 11<<<eleven 200<<<more", 0, ""), ("cat <&10; cat <&11; cat <&200", 0, "ten\neleven\nmore\n")],
    ),
    (
        "programs in the background and by exec have none of our descriptors",
        [
            ("(exec ls /proc/self/fd) | wc -l; ls /proc/self/fd | wc -l & wait", 0, None),
            ("(exec ls /proc/self/fd) | wc -l", 0, "4\n"),
        ],
    ),
    (
        "a function of ours is not exported",
        [
            ("set -a; unset -f __prorl_f; f() { :; }", 0, ""),
            ("set +a; export -f | grep -c prorl_; env | grep -c __pro", 1, "0\n0\n"),
        ],
    ),
    (
        "each kind of quote",
        [
            ("""echo 'a'"b\\'"`echo c`\\'""", 0, "ab\\'c'\n"),
            ("echo '!x' \"!y\"", 0, "!x !y\n"),
            ("set -H; echo '!x'", 0, "!x\n"),
        ],
    ),
    ("an option in place of a command", [("--help", 127, None), ("-x", 127, None), ("echo $-", 0, None)]),
    (
        "as long as can be typed, and longer",
        [(f"echo {'x' * n} | wc -c", 0, f"{n + 1}\n") for n in (480, 485, 486, 487, 488, 500, 4096, 70000)],
    ),
    (
        "what a `read` has not looked at is not read by us",
        [("read -d x a <<<'1x2'; read b <<<3; echo $a$b", 0, "13\n"), ("echo fine", 0, "fine\n")],
    ),
    ("the last word of the command before", [("true x", 0, ""), ('echo "<$_>"', 0, "<>\n")]),
    (
        "functions named as what we call",
        [
            ("trap() { echo T; }; declare() { echo D; }; unset() { echo U; }; return() { echo R; }", 0, ""),
            ("set -x; (exit 3)", 3, "++ exit 3\n"),
            ("echo $?", 0, "++ echo 3\n3\n"),
        ],
    ),
    (
        "subshells and what runs in the background answer nothing",
        [
            ("{ sleep 0.05; echo late; } & (exit 7)", 7, None),
            ("(trap 'echo end' EXIT; exit 3)", 3, None),
            ("coproc cat; echo a", 0, None),
            ("exec 3>&1; (exec 3>&-; exit 5)", 5, None),
            ("wait %1; echo fine", 0, None),
            ("(exit 9)", 9, None),
        ],
    ),
]


@pytest.mark.parametrize("session", [steps for _, steps in SESSIONS], ids=[name for name, _ in SESSIONS])
async def test_session(sandbox, session):
    for command, exit_code, output in session:
        with trio.fail_after(CALL_TIMEOUT_S + 10):
            result = await sandbox.call(BashRun(command=command, timeout_s=20), BashResult, timeout_s=CALL_TIMEOUT_S)
        assert (result.exit_code, result.timed_out, result.restarted) == (exit_code, False, False), (command, result)
        assert output is None or result.output == output, command
        assert "prorl" not in result.output, command


async def test_a_signal_for_a_command_that_has_just_ended_adds_nothing_to_the_next_output(tmp_path):
    """The interrupt of a command whose time is up may come when the shell is ready again. It says so with a newline."""
    async with _open_bash(tmp_path) as shell:
        for _ in range(3):
            assert await _output_of(shell, "echo a") == "a\n"
            os.killpg(shell.child.pid, signal.SIGINT)
            await shell.settle()
        await shell.interrupt(set())  # when it has ended, nothing is sent
        assert await _output_of(shell, "echo b") == "b\n"


async def test_keys_wait_for_a_shell_that_has_not_read_the_command_yet(tmp_path):
    """A shell that the machine has stopped before the gate would stay there, were the token taken from it."""
    async with _open_bash(tmp_path) as shell:
        await shell.settle()  # it is past the gate
        assert shell._files.take_gate()  # so that the shell is still before it when the next command comes
        assert await _output_of(shell, "echo a") == "a\n"
        running = await _begin(shell, "read line; echo got $line")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shell.type_keys, b"typed\n", running)
            await trio.testing.wait_all_tasks_blocked(SETTLED_S)
            shell._files.open_gate()
            await running.ended.wait()
        assert running.output().text == "got typed\n"


async def test_keys_are_not_typed_for_a_command_that_ends_before_the_shell_has_said_that_it_reads_it(tmp_path):
    async with _open_bash(tmp_path) as shell:
        await shell.settle()
        assert shell._files.take_gate()
        assert await _output_of(shell, "echo a") == "a\n"
        running = await _begin(shell, "echo b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shell.type_keys, b"echo typed\n", running)
            await trio.testing.wait_all_tasks_blocked(SETTLED_S)
            await shell.kill()
        assert (running.end, running.output().text) == (None, "")


@asynccontextmanager
async def _open_bash(cwd):
    reaper, limiter = ChildReaper(SandboxLimits(), isolated=False), trio.CapacityLimiter(1)
    with trio.fail_after(CALL_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(reaper.serve)
            opened = open_shell(reaper, Bash, executable="/bin/bash", env={}, cwd=str(cwd), limiter=limiter)
            async with opened as shell:
                yield shell
            await shell.child.wait()
            nursery.cancel_scope.cancel()


async def _begin(shell, command):
    running = RunningCommand()
    running.attend(CommandOutput(1000))
    await shell.begin(command, running)
    return running


async def _output_of(shell, command):
    running = await _begin(shell, command)
    await running.ended.wait()
    return running.output().text
