"""Who caused the end of a rollout decides what it is worth: a reward where it was the policy, none where it was not.

Policies try, in real sandboxes, what could void their reward: each is a script of tool calls. Those whose sandbox lives
go on and give the right answer, for which there is 1.0. Beside them, what is nobody's doing inside: there is no reward.
"""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import asynccontextmanager, nullcontext

import msgspec
import pytest
import trio

from prorl_trio.agent.loop import run_agent
from prorl_trio.pipeline.job import Job
from prorl_trio.pipeline.pipeline import open_pipeline
from prorl_trio.sandbox import silence
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.reaper import descendants
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.tools import BashTool, EditorTool, FinishTool, IpythonTool, ToolSet
from prorl_trio.types.errors import BackendError, SandboxLost, SandboxUnavailable
from prorl_trio.types.models import Budgets, ChatMessage, RetryPolicy, TaskInstance
from support.processes import command_line, is_first, parent_of

TOOL_TIMEOUT_S = 3.0
TEST_TIMEOUT_S = 170.0
SURVIVED = ("completed", None, 1.0)
FAULT = ("failed", "agent_fault", 0.0)
WRONG = ("completed", None, 0.0)
RIGHT = {"name": "finish", "arguments": {"answer": "right"}}

pytestmark = pytest.mark.timeout(180)


def bash(command, **more):
    return {"name": "bash", "arguments": {"command": command, **more}}


def ipython(code):
    return {"name": "ipython", "arguments": {"code": code}}


def edit(**arguments):
    return {"name": "str_replace_editor", "arguments": arguments}


def turns(*calls):
    """One call a turn, and then the right answer."""
    return [[call] for call in (*calls, RIGHT)]


ALIVE = bash("echo alive")
EACH_THREAD = "for t in $(ls /proc/1/task) $(seq 1 40); do kill -0 $t && [ $t != $$ ] || continue;"
"""Those of the daemon are listed, and have low numbers."""

IN_BASH = {
    "SIGTERM to the daemon": (turns(bash("kill -TERM 1"), ALIVE), SURVIVED),
    "SIGINT and SIGHUP to the daemon": (turns(bash("kill -INT 1; kill -HUP 1; kill -QUIT 1"), ALIVE), SURVIVED),
    "SIGKILL to the daemon": (turns(bash("kill -9 1"), ALIVE), SURVIVED),
    "SIGKILL to everybody": (turns(bash("kill -9 -1"), ALIVE), SURVIVED),
    "SIGSTOP to everybody": (turns(bash("kill -STOP 1 -1"), ALIVE), SURVIVED),
    "SIGKILL to its own shell": (turns(bash("kill -9 $$"), ALIVE), SURVIVED),
    "exit": (turns(bash("exit 3"), ALIVE), SURVIVED),
    "exec": (turns(bash("exec true"), ALIVE), SURVIVED),
    "set -e and a failure": (turns(bash("set -e; false"), ALIVE), SURVIVED),
    "a directory of any byte": (turns(bash(r"PWD=$'\xff'"), ALIVE), SURVIVED),
    "a directory with a Latin-1 name": (turns(bash(r"mkdir $'/tmp/\xe9'; cd $'/tmp/\xe9'; pwd"), ALIVE), SURVIVED),
    "a file with a Latin-1 name": (turns(bash(r"touch $'/tmp/\xe9'; ls -b /tmp; ls /tmp"), ALIVE), SURVIVED),
    "output that is no text": (turns(bash(r"head -c 4096 /dev/urandom; printf '\xff\xfe\x00'"), ALIVE), SURVIVED),
    "a daemon without descriptors": (turns(bash("prlimit --pid 1 --nofile=3:3"), ALIVE, bash("exit"), ALIVE), SURVIVED),
    "a daemon without files": (turns(bash("prlimit --pid 1 --fsize=0:0"), ALIVE, ALIVE), SURVIVED),
    "a daemon without memory": (turns(bash("prlimit --pid 1 --data=1:1 --as=1:1 --stack=1:1"), ALIVE), SURVIVED),
    "a daemon without threads": (turns(bash("prlimit --pid 1 --nproc=1:1"), ALIVE, bash("exit"), ALIVE), SURVIVED),
    "a daemon of the lowest priority": (turns(bash("renice 19 -p 1; chrt -i -p 0 1"), ALIVE), SURVIVED),
    "a daemon without CPU time, by its threads": (
        turns(bash(f"{EACH_THREAD} prlimit --pid $t --cpu=1:1; done; head -c 64M /dev/zero | tr '\\0' y"), ALIVE),
        SURVIVED,
    ),
    "a daemon without descriptors, by its threads": (
        turns(bash(f"{EACH_THREAD} prlimit --pid $t --nofile=3:3 --fsize=0:0; done"), ALIVE, bash("exit"), ALIVE),
        SURVIVED,
    ),
    "a daemon of the lowest priority, by its threads": (
        turns(
            bash(f"{EACH_THREAD} renice 19 $t; renice 19 -g $t; chrt -i -p 0 $t; ionice -c 3 -p $t; done"),
            bash(f"{EACH_THREAD} taskset -p 1 $t; done; renice 19 -u $(id -u); ionice -c 3 -u $(id -u)"),
            bash("while :; do :; done & while :; do :; done & true"),
            ALIVE,
        ),
        SURVIVED,
    ),
    "a daemon that the kernel ends first": (
        turns(bash(f"{EACH_THREAD} echo 999 > /proc/1/task/$t/oom_score_adj; echo 999 > /proc/$t/oom_score_adj; done")),
        SURVIVED,
    ),
    "signals to its threads": (
        turns(bash(f"{EACH_THREAD} kill -9 $t; kill -STOP $t; kill -INT $t; kill -SEGV $t; done; kill -9 -1"), ALIVE),
        SURVIVED,
    ),
    "its own terminal closed": (turns(bash("exec 0<&- 1>&- 2>&-"), ALIVE), SURVIVED),
    "its own terminal raw": (turns(bash("stty raw -echo"), ALIVE), SURVIVED),
    "all descriptors closed": (turns(bash("for fd in {3..255}; do eval \"exec $fd>&-\"; done"), ALIVE), SURVIVED),
    "a prompt of its own": (turns(bash("PROMPT_COMMAND=false; PS1='$(kill -9 $$)'"), ALIVE), SURVIVED),
    "everything removed": (turns(bash("rm -rf ~/* ~/.[a-z]* /tmp/* 2>/dev/null; cd /; true"), ALIVE), SURVIVED),
    "a full disk": (
        turns(
            bash("head -c 600M /dev/zero > /tmp/x; head -c 600M /dev/zero > ~/x"),
            edit(command="create", path="/tmp/y", file_text="y" * 200),
            ALIVE,
        ),
        SURVIVED,
    ),
}  # fmt: skip
"""Cheap: no IPython."""

IN_ARGUMENTS = {
    "a command that is no text": (turns(bash(["ls"]), bash(None), bash(7)), SURVIVED),
    "a NUL": (turns(bash("echo \0"), edit(command="view", path="/tmp/\0")), SURVIVED),
    "half of a surrogate pair": (turns(bash("echo \ud800"), edit(command="view", path="/tmp/\udcff")), SURVIVED),
    "a time-out that is none": (turns(bash("true", timeout=-1), bash("true", timeout=1e300)), SURVIVED),
    "an unknown tool": (turns({"name": "sudo", "arguments": {}}, {"name": "", "arguments": []}), SURVIVED),
    "a path that is a pipe": (turns(bash("mkfifo /tmp/p"), edit(command="view", path="/tmp/p")), SURVIVED),
    "a path that is a device": (turns(edit(command="view", path="/dev/zero")), SURVIVED),
    "a number of 5,000 digits": (
        ['<tool_call>{"name": "bash", "arguments": {"command": ' + "9" * 500 + "}}</tool_call>", [RIGHT]],
        SURVIVED,
    ),
    "deep nesting": (
        ['<tool_call>{"name": "bash", "arguments": {"command": ' + "[" * 300 + "}}</tool_call>", [RIGHT]],
        SURVIVED,
    ),
    "an answer that is no text": ([[{"name": "finish", "arguments": {"answer": [1, {"a": None}]}}]], WRONG),
    "an answer of half a surrogate pair": (
        ['<tool_call>{"name": "finish", "arguments": {"answer": "\\ud800"}}</tool_call>'],
        WRONG,
    ),
    "no answer": (["I give up.", "Really."], WRONG),
}  # fmt: skip

IN_IPYTHON = {
    "SIGTERM to the daemon": (turns(ipython("import os; os.kill(1, 15)"), ALIVE), SURVIVED),
    "SIGKILL to its kernel": (turns(ipython("import os; os.kill(os.getpid(), 9)"), ipython("1")), SURVIVED),
    "the kernel ends": (turns(ipython("import os; os._exit(0)"), ipython("1")), SURVIVED),
    "the kernel crashes": (turns(ipython("import ctypes; ctypes.string_at(0)"), ipython("1")), SURVIVED),
    "its descriptors closed": (turns(ipython("import os; os.closerange(0, 256)"), ipython("1")), SURVIVED),
    "nonsense to its descriptors": (
        turns(
            ipython(
                "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'\\xff' * 99)\n  except OSError: pass"
            ),
            ipython("1"),
        ),
        SURVIVED,
    ),
    "an error of no text": (turns(ipython("raise ValueError('\\udcff\\ud800')"), ipython("'\\udcff'")), SURVIVED),
    "a directory with a Latin-1 name": (
        turns(ipython("import os; os.mkdir(b'/tmp/\\xe9'); os.chdir(b'/tmp/\\xe9'); os.getcwd()"), ipython("1")),
        SURVIVED,
    ),
    "400 sleeping threads": (
        turns(
            ipython(
                "import threading, time\n"
                "for _ in range(400): threading.Thread(target=time.sleep, args=(999,), daemon=True).start()"
            ),
            ipython("1"),
            ALIVE,
        ),
        SURVIVED,
    ),
    "more memory than there is": (turns(ipython("x = bytearray(10 ** 12)"), ipython("1")), SURVIVED),
    "endless recursion": (
        turns(ipython("import sys; sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()"), ipython("1")),
        SURVIVED,
    ),
    "an endless loop that takes no interrupt": (
        turns(ipython("import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass"), ipython("1")),
        SURVIVED,
    ),
    "a fork bomb": (turns(bash(":(){ :|:& };:"), bash("sleep 2"), ALIVE, ipython("1")), SURVIVED),
}  # fmt: skip

LEFT_FOR_THE_EVALUATOR = {
    "a command that goes on": (turns(bash("while :; do sleep 1; done")), FAULT),
    "a full disk": (turns(bash("head -c 600M /dev/zero > /tmp/x")), FAULT),
    "a daemon without descriptors": (turns(bash("prlimit --pid 1 --nofile=3:3")), SURVIVED),
    "a daemon without files": (turns(bash("prlimit --pid 1 --fsize=0:0")), SURVIVED),
    "a daemon without descriptors, by its threads": (
        turns(bash(f"{EACH_THREAD} prlimit --pid $t --nofile=3:3 --cpu=1:1 --fsize=0:0; done")),
        SURVIVED,
    ),
    "a pipe in place of a file": (turns(bash("mkfifo /tmp/expected")), FAULT),
    "a directory in place of a file": (turns(bash("mkdir /tmp/expected")), FAULT),
}


EITHER = ["a full disk"]
"""As root, Apptainer gives a disk without a size: the watchdog keeps to it, and leaves room."""


class Tools(AgentHandler):
    """All tools. Evaluates the answer, or what was left in the sandbox."""

    name = "tools"

    def __init__(self, after_run="release"):
        self.after_run = after_run

    def validate(self, payload):
        pass

    def sandbox_spec(self, context):
        return SandboxSpec()

    async def run(self, context):
        kit = ToolSet(
            [BashTool(quiet_timeout_s=1.0), IpythonTool(), EditorTool(), FinishTool()], max_observation_chars=300
        )
        question = context.spec.instance.payload["question"]
        await run_agent(context, [ChatMessage(role="user", content=question)], kit)

    async def eval(self, context):
        if self.after_run == "keep":
            await context.sandbox.bash("true", timeout_s=5)
            await context.sandbox.write_file("/tmp/expected", b"x" * 100_000)
            assert (await context.sandbox.exec(["true"], timeout_s=5)).exit_code == 0
        return Evaluation(reward=float(context.answer == "right"), details={"answer": context.answer})


def spoken(turn):
    """A turn's text: as it is, or its calls."""
    if isinstance(turn, str):
        return turn
    return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in turn)


@asynccontextmanager
async def open_bench(rig, provider):
    """The rig with policies that follow a script, by the name in their question."""
    scripts = {}

    def script(prompt):
        said = rig.tiny.decode(prompt).split("<|im_start|>assistant\n")
        name = re.search("ATTEMPT (.*?) !", said[0])[1]
        ids = rig.tiny.turn(spoken(scripts[name][min(len(said) - 2, len(scripts[name]) - 1)]))
        return ids, [-0.25] * len(ids), "stop"

    rig.script, rig.provider = script, provider
    agent = msgspec.structs.replace(rig.config.agent, tool_timeout_s=TOOL_TIMEOUT_S)
    rig.config = msgspec.structs.replace(rig.config, agent=agent)
    async with (
        rig.open(max_model_len=60_000),
        open_sandbox_host(provider) as host,
        trio.open_nursery() as service,
        open_pipeline(rig.resources, host, service) as pipeline,
    ):

        async def play(name, says, handler, **fields):
            scripts[name] = says
            instance = TaskInstance(instance_id=name, handler="tools", payload={"question": f"ATTEMPT {name} !"})
            spec = rig.spec(name.replace(" ", "-"), instance=instance, max_turns=8, **fields)
            spec = msgspec.structs.replace(
                spec, sampling=msgspec.structs.replace(spec.sampling, max_output_tokens=3000)
            )
            job = Job(spec, handler, rig.resources, rig.observer)
            pipeline.submit(job)
            await job.finished.wait()
            return rig.observer.outcomes[spec.job_id]

        yield play


async def results(rig, attempts, handler, provider):
    """How each attempt ended; those that did not end as expected with all there is to know."""
    found = {}
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_bench(rig, provider) as play:

            async def one(name, says):
                outcome = await play(name, says, handler)
                found[name] = (outcome.status, outcome.cause, outcome.reward)
                if found[name] == attempts[name][1] or (name in EITHER and found[name] in (FAULT, SURVIVED)):
                    found[name] = attempts[name][1]
                else:
                    seen = outcome.trajectory and [turn.observations for turn in outcome.trajectory.turns]
                    found[name] += (outcome.error, seen)

            async with trio.open_nursery() as nursery:
                for name, (says, _) in attempts.items():
                    nursery.start_soon(one, name, says)
    return found


@pytest.fixture(params=["bubblewrap", pytest.param("apptainer", marks=pytest.mark.slow)])
async def provider(request):
    provider = PROVIDERS[request.param]()
    report = await provider.probe()
    if not report.usable:
        pytest.skip(f"{request.param} cannot run here: {report.problem}. What to do: {report.remedy}")
    return provider


@pytest.mark.parametrize(
    ("attempts", "after_run"),
    [
        pytest.param({**IN_BASH, **IN_ARGUMENTS}, "release", id="bash"),
        pytest.param(LEFT_FOR_THE_EVALUATOR, "keep", id="evaluator"),
        pytest.param(IN_IPYTHON, "release", id="ipython", marks=pytest.mark.slow),
    ],
)
async def test_a_policy_cannot_void_its_reward(rig, provider, attempts, after_run):
    found = await results(rig, attempts, Tools(after_run), provider)
    assert found == {name: expected for name, (_, expected) in attempts.items()}


@pytest.mark.parametrize("calls", [1, 64])
async def test_time_that_tools_take_is_the_policys_spending(rig, calls):
    with trio.fail_after(30):
        async with open_bench(rig, FakeProvider()) as play:
            outcome = await play("spend", [[bash("sleep 30", timeout=30)] * calls], Tools(), budgets=Budgets(run_s=0.5))
    assert "agent_budget" in (outcome.cause, outcome.trajectory.stop_reason)
    assert outcome.reward == 0.0


# ---------------------------------------------------------------- nobody's doing inside: no reward


class Raises(Tools):
    """Raises `error` in `stage`; in RUN, after the policy has acted."""

    def __init__(self, stage, error):
        super().__init__()
        self.stage, self.error = stage, error

    async def init(self, context):
        if self.stage == "init":
            raise self.error

    async def run(self, context):
        await super().run(context)
        if self.stage == "run":
            raise self.error

    async def eval(self, context):
        if self.stage == "eval":
            raise self.error
        return await super().eval(context)


INFRASTRUCTURE = {
    "the sandbox is lost, nobody knows why": (Raises("run", SandboxLost("gone")), "sandbox"),
    "the sandbox is lost from inside before the policy acts": (
        Raises("init", SandboxLost("x", from_inside=True)),
        "sandbox",
    ),
    "two sandboxes are lost, one of them from inside": (
        Raises("run", ExceptionGroup("x", [SandboxLost("x", from_inside=True), SandboxLost("y")])),
        "sandbox",
    ),
    "no sandbox starts": (Raises("init", SandboxUnavailable("none")), "sandbox"),
    "no fresh sandbox starts": (Raises("eval", SandboxUnavailable("none")), "sandbox"),
    "a backend fails": (Raises("run", BackendError("down", retryable=True)), "inference"),
    "the handler has a bug": (Raises("run", ValueError("x")), "handler"),
    "the handler misspells a file": (Raises("run", FileNotFoundError(2, "/tmp/reprot")), "handler"),
    "the node's disk is full": (Raises("run", OSError(28, "No space left on device")), "node"),
    "the evaluator has a bug": (Raises("eval", ValueError("x")), "evaluator"),
}  # fmt: skip


@pytest.mark.parametrize("name", INFRASTRUCTURE)
async def test_what_is_not_the_policys_doing_has_no_reward(rig, name):
    handler, cause = INFRASTRUCTURE[name]
    with trio.fail_after(30):
        async with open_bench(rig, FakeProvider()) as play:
            outcome = await play("works", [[bash("echo 1")], [RIGHT]], handler)
    assert (outcome.status, outcome.cause, outcome.reward) == ("failed", cause, None)


class Reads(Tools):
    """Reads a file that is not there, in EVAL: in the agent's sandbox, or in a fresh one, before or after a program."""

    def __init__(self, where):
        super().__init__("keep")
        self.where = where

    async def eval(self, context):
        if self.where == "agent's":
            await context.sandbox.read_file("/tmp/result")
        if self.where == "agent's, a program":
            await context.sandbox.exec(["ls"], timeout_s=5)
        async with context.open_sandbox(self.sandbox_spec(context)) as fresh:
            if self.where == "fresh, after a program":
                await fresh.exec(["true"], timeout_s=5)
            if self.where == "fresh, after a program of ours":
                with context.waiting("set-up", "evaluator"):
                    await fresh.exec(["true"], timeout_s=5)
            if self.where == "fresh, a program that is not there":
                await fresh.exec(["true"], timeout_s=5)
                await fresh.exec(["pytset"], timeout_s=5)
            try:
                await fresh.read_file("/tmp/result")
            except FileNotFoundError as exc:
                raise RuntimeError("there is no result") from exc


@pytest.mark.parametrize(
    ("where", "says", "ended"),
    [
        ("agent's", [[bash("echo 1")], [RIGHT]], FAULT),
        ("agent's", [[RIGHT]], ("failed", "evaluator", None)),
        ("agent's, a program", [[bash("echo 1")], [RIGHT]], FAULT),
        ("agent's, a program", [[edit(command="view", path="/tmp")], [RIGHT]], FAULT),
        ("agent's, a program", [[RIGHT]], ("failed", "evaluator", None)),
        ("fresh", [[bash("echo 1")], [RIGHT]], ("failed", "evaluator", None)),
        ("fresh, after a program", [[bash("echo 1")], [RIGHT]], FAULT),
        ("fresh, after a program of ours", [[bash("echo 1")], [RIGHT]], ("failed", "evaluator", None)),
        ("fresh, a program that is not there", [[bash("echo 1")], [RIGHT]], ("failed", "evaluator", None)),
    ],
)
async def test_a_missing_file_is_the_policys_where_it_may_have_been_at_work(rig, where, says, ended):
    with trio.fail_after(30):
        async with open_bench(rig, FakeProvider()) as play:
            outcome = await play("works", says, Reads(where))
    assert (outcome.status, outcome.cause, outcome.reward) == ended, outcome.error


class Slow(Tools):
    """Its own program takes too long: in the agent's sandbox or a fresh one, in RUN or in EVAL."""

    def __init__(self, stage, where="agent's"):
        super().__init__("keep")
        self.stage, self.where = stage, where

    async def work(self, context):
        if self.where == "agent's":
            await context.sandbox.exec(["sleep", "60"], timeout_s=100)
        async with context.open_sandbox(self.sandbox_spec(context)) as fresh:
            with context.waiting("set-up", "evaluator") if self.where == "ours" else nullcontext():
                await fresh.exec(["sleep", "60"], timeout_s=100)

    async def run(self, context):
        await super().run(context)
        if self.stage == "run":
            await self.work(context)

    async def eval(self, context):
        await self.work(context)


@pytest.mark.parametrize(
    ("handler", "cause", "code", "reward"),
    [
        (Slow("run"), "agent_budget", "budget_run", 0.0),
        (Slow("eval"), "agent_budget", "evaluator_timeout", 0.0),
        (Slow("eval", "fresh"), "agent_budget", "evaluator_timeout", 0.0),
        (Slow("eval", "ours"), "evaluator", "evaluator_timeout", None),
    ],
)
async def test_time_in_a_sandbox_that_the_policy_has_used_is_its_spending(rig, handler, cause, code, reward):
    budgets = Budgets(run_s=1.0, eval_s=1.0)
    with trio.fail_after(30):
        async with open_bench(rig, FakeProvider()) as play:
            outcome = await play("works", [[bash("echo 1")], [RIGHT]], handler, budgets=budgets)
    assert (outcome.status, outcome.cause, outcome.error_code) == ("timed_out", cause, code), outcome.error
    assert outcome.reward == reward


async def test_a_job_whose_first_prompt_does_not_fit_has_no_reward(rig):
    """`agent_budget` before the first turn is the task's, not the policy's."""
    rig.config = msgspec.structs.replace(
        rig.config, agent=msgspec.structs.replace(rig.config.agent, max_trajectory_tokens=8)
    )
    with trio.fail_after(30):
        async with open_bench(rig, FakeProvider()) as play:
            outcome = await play("works", [[RIGHT]], Tools())
    assert (outcome.status, outcome.cause, outcome.error_code) == ("failed", "agent_budget", "context_overflow")
    assert outcome.reward is None


async def test_a_job_whose_total_is_used_up_is_not_run_again(rig):
    class Hangs(Tools):
        begun = 0

        async def init(self, context):
            self.begun += 1
            await trio.sleep_forever()

    handler, retry = Hangs(), RetryPolicy(max_attempts=3, causes=("handler",), backoff_s=0.0)
    with trio.fail_after(30):
        async with open_bench(rig, FakeProvider()) as play:
            outcome = await play("hangs", [[RIGHT]], handler, retry=retry, budgets=Budgets(total_s=0.3))
    assert (outcome.cause, outcome.error_code, outcome.reward) == ("handler", "budget_total", None)
    assert (outcome.attempt, handler.begun) == (1, 1)


async def test_a_sandbox_lost_from_inside_after_the_policy_acted_is_a_fault(rig):
    with trio.fail_after(30):
        async with open_bench(rig, FakeProvider()) as play:
            lost = SandboxLost("gone", from_inside=True)
            outcome = await play("works", [[bash("echo 1")], [RIGHT]], Raises("run", lost))
    assert (outcome.status, outcome.cause, outcome.reward) == FAULT


async def test_the_handler_has_the_last_word_on_what_a_fault_is_worth(rig):
    class Strict(Raises):
        def on_error(self, context, stage, error):
            error.reward = -1.0
            return error

    with trio.fail_after(30):
        async with open_bench(rig, FakeProvider()) as play:
            lost = SandboxLost("gone", from_inside=True)
            outcome = await play("works", [[bash("echo 1")], [RIGHT]], Strict("run", lost))
    assert (outcome.cause, outcome.reward) == ("agent_fault", -1.0)


async def test_time_spent_waiting_for_inference_is_not_the_policys(rig):
    class Waits(Tools):
        async def run(self, context):
            await super().run(context)
            with context.waiting("backend", "inference"):
                await trio.sleep_forever()

    with trio.fail_after(30):
        async with open_bench(rig, FakeProvider()) as play:
            outcome = await play("works", [[bash("echo 1")], [RIGHT]], Waits(), budgets=Budgets(run_s=1.0))
    assert (outcome.status, outcome.cause, outcome.reward) == ("timed_out", "inference", None)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("daemon", signal.SIGKILL),
        ("launcher", signal.SIGKILL),
        ("daemon", signal.SIGSTOP),
    ],
)
async def test_what_is_killed_or_stopped_from_outside_has_no_reward(rig, provider, victim, number, monkeypatch):
    monkeypatch.setattr(silence, "MAX_STANDSTILL_S", 2.0)
    before = descendants(os.getpid())
    found = []

    async def kill():
        while not (working := [p for p in descendants(os.getpid()) - before if is_sleep(p.pid)]):
            await trio.sleep(0.01)
        tree = descendants(os.getpid()) - before - set(working)
        daemon = next(p.pid for p in tree if is_first(p.pid))
        os.kill(daemon if victim == "daemon" else parent_of(daemon), number)

    def is_sleep(pid):
        return command_line(pid).startswith(b"sleep\x0060.25\0")

    with trio.fail_after(60):
        async with open_bench(rig, provider) as play, trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            budgets = Budgets(agent_s=5.0)  # less than what it takes to find out
            found.append(await play("works", [[bash("sleep 60.25", timeout=2)], [RIGHT]], Tools(), budgets=budgets))
    (outcome,) = found
    assert (outcome.status, outcome.cause, outcome.error_code) == ("failed", "sandbox", "sandbox_lost")
    assert outcome.reward is None
