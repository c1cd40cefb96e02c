"""The contract of the shell in every sandbox, as a table of sessions: commands, keys, and expected results.

Run all sessions with `check_sessions`, or one with `check_session`, against any sandbox. Sessions marked `any_shell`
also apply to an image's `sh`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from prorl_ipc.nursery import single_exception

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prorl_ipc.sandbox_calls import BashResult
    from prorl_trio.sandbox.sandbox import Sandbox

STEP_TIMEOUT_S: Final = 20.0
QUIET_TIMEOUT_S: Final = 0.4
C_C, C_D, C_Z = b"\x03", b"\x04", b"\x1a"
_PRESENT: Final = "test -c {0} || command -v {0}"
UTF8_IN_PIECES: Final = r"for b in '\303' '\251' '\342' '\202' '\254'; do printf $b; sleep 0.02; done; echo"


class Step(NamedTuple):
    """A call and its expected result.

    Attributes:
        send: a command, or, as bytes, keys for the running command.
        output: the complete output; None for any.
        exit_code: None if the command was stopped.
        until: the command must keep running after it has written this; `output` and `exit_code` are not checked.
        has: must occur somewhere in the output since the beginning of the step.
        timeout_s: the command must be stopped after this time.
        restarted: the stop also ends the shell.
    """

    send: str | bytes
    output: str | None = None
    exit_code: int | None = 0
    until: str | None = None
    has: str = ""
    timeout_s: float = STEP_TIMEOUT_S
    restarted: bool = False


class Session(NamedTuple):
    """Steps in one shell, one after another.

    `needs`: a required program or device; the session is skipped without it.
    """

    name: str
    steps: tuple[Step, ...]
    any_shell: bool = True
    needs: str = ""


class ProgramMissing(Exception):
    """A session cannot be run because a required program or device is missing."""


async def check_sessions(sandboxes: Sequence[Sandbox], sessions: Iterable[Session]) -> list[str]:
    """Run all `sessions`, distributed over `sandboxes`, because they mostly wait.

    Returns:
        The names of the skipped sessions, in order. Compare them with the known gaps of the image.

    Raises:
        AssertionError: some sessions failed; the message contains the step and the result of each.
    """
    waiting = list(sessions)[::-1]
    failures: list[str] = []
    left_out: list[str] = []

    async def work(sandbox: Sandbox) -> None:
        while waiting:
            session = waiting.pop()
            try:
                await check_session(sandbox, session)
            except ProgramMissing:
                left_out.append(session.name)
            except (AssertionError, trio.TooSlowError) as exc:
                failures.append(f"{session.name}: {exc!r}")

    with single_exception():
        async with trio.open_nursery() as nursery:
            for sandbox in sandboxes:
                nursery.start_soon(work, sandbox)
    assert not failures, "\n".join(failures)
    return sorted(left_out)


async def check_session(sandbox: Sandbox, session: Session) -> None:
    """Run `session` in a fresh shell.

    Raises:
        AssertionError: with the step and its result.
        ProgramMissing: nothing was done.
    """
    with trio.fail_after(2 * STEP_TIMEOUT_S):
        await sandbox.restart_bash()
        if session.needs and (await _call(sandbox, _PRESENT.format(session.needs))).exit_code != 0:
            raise ProgramMissing(f"{session.name}: {session.needs} is not there")
        for step in session.steps:
            await _check_step(sandbox, session, step)


async def _check_step(sandbox: Sandbox, session: Session, step: Step) -> None:
    result = await _call(sandbox, step.send, step.timeout_s)
    output = result.output
    what = f"{session.name}: {step.send!r} came to {result}"
    while result.running and (step.until is None or step.until not in output):
        result = await _call(sandbox, b"", step.timeout_s)
        output += result.output
        what = f"{session.name}: {step.send!r} came to {result}, with the output {output!r}"
    assert result.running == (step.until is not None), what
    assert step.has in output, what
    assert "prorl" not in output, what
    assert result.restarted == step.restarted, what
    if step.until is None:
        assert result.exit_code == step.exit_code, what
        assert result.timed_out == (step.timeout_s < STEP_TIMEOUT_S), what
        assert step.output is None or output == step.output, what


async def _call(sandbox: Sandbox, send: str | bytes, timeout_s: float = STEP_TIMEOUT_S) -> BashResult:
    if isinstance(send, str):
        return await sandbox.bash(send, timeout_s=timeout_s, quiet_timeout_s=min(timeout_s, QUIET_TIMEOUT_S))
    return await sandbox.bash_input(send, timeout_s=timeout_s, quiet_timeout_s=QUIET_TIMEOUT_S)


_FINE: Final = Step("echo fine", has="fine\n")

SESSIONS: Final[tuple[Session, ...]] = (
    Session("variables", (Step("x=5; export y=6"), Step("echo $x; env | grep ^y=", "5\ny=6\n"))),
    Session("functions", (Step("greet() { echo hi $1; return 4; }"), Step("greet you", "hi you\n", 4))),
    Session("directory", (Step("cd /tmp; false", "", 1), Step("pwd", "/tmp\n"))),
    Session("previous exit code", (Step("(exit 7)", "", 7), Step("echo $?", "7\n"), Step("echo $?", "0\n"))),
    Session("exit", (Step("x=1"), Step("exit 3", exit_code=3, restarted=True), Step("echo ${x-lost}", "lost\n"))),
    Session("exec", (Step("exec false", exit_code=1, restarted=True), _FINE)),
    Session("set -e", (Step("set -e; false", exit_code=1, restarted=True), _FINE), any_shell=False),
    Session("set -u in bash", (Step("set -u; echo $no; echo not reached", exit_code=1), _FINE), any_shell=False),
    Session("set -u", (Step("set -u"), Step("(echo $no; echo not reached) || echo refused", has="refused\n"), _FINE)),
    Session("open quote", (Step("echo 'abc", exit_code=2), _FINE)),
    Session("open bracket", (Step("if true; then (", exit_code=2), _FINE)),
    Session("heredoc", (Step("cat <<EOF\n$((1+1))\n'quoted'\nEOF", "2\n'quoted'\n"),)),
    Session("stdout and stderr in order", (Step("echo a; echo b >&2; echo c", "a\nb\nc\n"),)),
    Session("no newline at the end", (Step("printf abc", "abc"), Step("echo next", "next\n"))),
    Session("read with later input", (Step("read line; echo got $line", until=""), Step(b"you\n", "got you\n"))),
    Session(
        "input in pieces",
        (
            Step("cat; echo end", until=""),
            Step(b"one\n", until="one\n"),
            Step(b"two", until=""),
            Step(C_D + C_D, "twoend\n"),
        ),
    ),
    Session(
        "C-c",
        (
            Step("echo on; sleep 1000; echo not reached", until="on\n"),
            Step(C_C, exit_code=130),
            Step("echo fine", "fine\n"),
        ),
    ),
    Session(
        "C-c that is caught",
        (
            Step("sh -c 'trap \"echo caught; exit 4\" INT; echo on; while :; do sleep 0.1; done'", until="on\n"),
            Step(C_C, has="caught\n", exit_code=4),
            _FINE,
        ),
    ),
    Session(
        "C-z and fg",
        (
            Step("sleep 1000", until=""),
            Step(C_Z, has="Stopped", exit_code=148),
            Step("jobs", has="sleep 1000"),
            Step("fg", until="sleep 1000"),
            Step(C_C, exit_code=130),
            _FINE,
        ),
    ),
    Session("C-d at the end of input", (Step("cat", until=""), Step(C_D, ""), _FINE)),
    Session(
        "input that nobody reads is never a command",
        (Step("sleep 1", until=""), Step(b"echo typed\nexit 9\necho", ""), Step("echo fine", "fine\n")),
    ),
    Session("background job", (Step("sleep 1000 &"), Step("kill $!; echo still here", has="still here\n"))),
    Session(
        "late output of a background job",
        (Step("(sleep 0.3; echo late) & echo at once", has="at once\n"), Step("wait; echo end", has="late\n"), _FINE),
    ),
    Session(
        "forged marks",
        (
            Step(r"printf '\036%032d' 0; printf '\002\006\0360\0000\000/\000'; (exit 9)", exit_code=9),
            Step("PS1='$ '; PS2='> '; PROMPT_COMMAND='echo no'", ""),
            Step("echo fine", "fine\n"),
        ),
    ),
    Session("colours", (Step(r"printf '\033[1;31mred\033[0m \033]0;title\007plain\n'", "red plain\n"),)),
    Session("progress bar", (Step(r"printf '\r 10%%\r 50%%\r\033[K100%%\ndone\n'", "100%\ndone\n"),)),
    Session("invalid UTF-8", (Step(r"printf 'a\377\376b\n'", "a\ufffd\ufffdb\n"), Step("echo é€", "é€\n"))),
    Session("UTF-8 in pieces", (Step(UTF8_IN_PIECES, "é€\n"),)),
    Session("disk full", (Step("echo lost > /dev/full", exit_code=1), _FINE), any_shell=False, needs="/dev/full"),
    Session(
        "disk full in sh",
        (Step("sh -c 'echo lost' > /dev/full || echo failed", has="failed\n"), _FINE),
        needs="/dev/full",
    ),
    Session(
        "terminal spoilt", (Step("stty raw echo; echo a", "a\n"), Step("echo b", "b\n")), any_shell=False, needs="stty"
    ),
    Session(
        "a program that reads keys",
        (
            Step("python3 -q", until=">>> "),
            Step(b"6*7\n", until="42\n"),
            Step(C_D, exit_code=0),
            _FINE,
        ),
        needs="python3",
    ),
    Session(
        "a pager",
        (
            Step("seq 1 500 | less", until=""),
            Step(b"\n\n", until="5"),
            Step(b"q", exit_code=0),
            _FINE,
        ),
        any_shell=False,
        needs="less",
    ),
    Session(
        "out of time",
        (
            Step("x=kept"),
            Step("echo on; sleep 1000", has="on\n", exit_code=None, timeout_s=0.3),
            Step("echo $x", "kept\n"),
        ),
    ),
    Session(
        "out of time, deaf to signals",
        (
            Step(
                "trap '' INT TERM HUP; echo on; while :; do sleep 1000; done",
                has="on\n",
                exit_code=None,
                timeout_s=0.3,
                restarted=True,
            ),
            _FINE,
        ),
    ),
    Session("killed from outside", (Step("kill -9 $$", exit_code=137, restarted=True), _FINE)),
    Session(
        "killed from outside while it waits",
        (Step("(sleep 1; kill -9 $$) & read line", exit_code=137, restarted=True), _FINE),
    ),
)

PORTABLE: Final = tuple(session for session in SESSIONS if session.any_shell)
