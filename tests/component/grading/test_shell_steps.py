"""Tasks of several steps in real sandboxes, solutions in place of an agent, and recorded work that is graded again."""

from __future__ import annotations

import textwrap

import msgspec
import pytest
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.handlers.shell import artifacts
from prorl_trio.tasks.handlers.shell import handler as module
from prorl_trio.tasks.handlers.shell.handler import ShellHandler
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.types.errors import NotRestorable, SandboxUnavailable
from prorl_trio.types.models import JobSpec, Recorded, TaskInstance
from support.own_cache import use_own_cache

pytestmark = pytest.mark.xdist_group("sandboxes")
RESOURCES = Resources(config=NodeConfig(model=ModelConfig(path="none")), chat_format=None, backends=None, scorers=None)
SEPARATE = 'environment_mode = "separate"'
WANTS = 'echo "$([ "$(cat /app/{name} 2>/dev/null)" = {name} ] && echo 1 || echo 0)" > /logs/verifier/reward.txt'


@pytest.fixture
def task(tmp_path):
    def make(*, verifier="", top="", steps=("", ""), files=None, solutions=False):
        toml = f'artifacts = ["one", "two"]\n{top}\n[verifier]\n{verifier}\n[environment]\nworkdir = "/app"\n'
        written = {"environment/Dockerfile": "FROM host\n"}
        for name, fields in zip(("one", "two"), steps, strict=True):
            toml += f'[[steps]]\nname = "{name}"\n{fields}\n'
            written |= {
                f"steps/{name}/instruction.md": f"Write {name} into {name}.",
                f"steps/{name}/tests/test.sh": WANTS.format(name=name),
                f"steps/{name}/solution/solve.sh": f'echo "$WORD"{name} > {name}',
            }
        for name, content in ({"task.toml": toml} | written | (files or {})).items():
            (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "t" / name).write_text(textwrap.dedent(content))
        [instance] = load_task_set(str(tmp_path), solutions=solutions)
        return msgspec.json.decode(msgspec.json.encode(instance), type=TaskInstance)

    return make


class Played:
    """A rollout of an agent that runs one command a step, and finishes each but the last if `stops` is set."""

    def __init__(self, host, monkeypatch):
        self.told, self.seen = [], []
        self._host = host
        self._monkeypatch = monkeypatch
        self.handler = ShellHandler()

    def context(self, instance):
        return RolloutContext(spec=JobSpec(job_id="j", instance=instance), resources=RESOURCES, sandboxes=self._host)

    async def play(self, instance, *commands, stops=False):
        async def scripted(context, messages, tools, style, *, after_answer):
            for number, command in enumerate(commands, start=1):
                self.told.append(messages[-1].content)
                self.seen.append((await context.sandbox.bash(command, timeout_s=20)).output)
                context.answer = None
                if number == len(commands) and stops:
                    return
                context.answer = "done"
                messages = await after_answer("done")
                if messages is None:
                    return

        self._monkeypatch.setattr(module, "run_agent", scripted)
        self.handler.validate(instance.payload)
        context = self.context(instance)
        with trio.fail_after(240):
            async with context.open_sandbox(self.handler.sandbox_spec(context)) as context.sandbox:
                await self.handler.init(context)
                await self.handler.run(context)
                return await self.handler.eval(context)

    async def again(self, instance, found):
        """Grade what was recorded, without the agent's sandbox."""
        context = self.context(instance)
        details = msgspec.json.decode(msgspec.json.encode(found.details))
        self.handler.restore(context, Recorded(details=details, stop_reason="finished"))
        with trio.fail_after(240):
            return await self.handler.eval(context)


@pytest.fixture
async def rollout(monkeypatch, tmp_path):
    use_own_cache(tmp_path, monkeypatch)
    async with open_sandbox_host(await choose_provider(RESOURCES.config.sandbox)) as host:
        played = Played(host, monkeypatch)
        await played.handler.prepare(RESOURCES)
        yield played


async def test_each_step_has_its_instruction_its_files_and_its_reward(task, rollout):
    """The verifier works where the agent does, and the next step finds nothing of it there."""
    files = {"steps/two/workdir/setup.sh": "cat one > from-setup\n", "steps/two/workdir/given": "given\n"}
    instance = task(files=files)
    found = await rollout.play(instance, "echo one > one", "pwd; ls; ls -A /tests /logs/verifier; echo wrong > two")
    assert rollout.told == ["Write one into one.", "Write two into two."]
    assert rollout.seen[1].split() == ["/app", "from-setup", "given", "one", "setup.sh", "/logs/verifier:", "/tests:"]
    assert (found.reward, found.details["rewards"], found.details["resolved"]) == (0.5, {"reward": 0.5}, False)
    assert [(step["name"], step["rewards"], step["answer"]) for step in found.details["steps"]] == [
        ("one", {"reward": 1.0}, "done"),
        ("two", {"reward": 0.0}, "done"),
    ]
    with pytest.raises(NotRestorable, match="step one: its verifier works in the agent's own sandbox"):
        await rollout.again(instance, found)


async def test_a_step_that_lacks_its_min_reward_ends_the_task_and_one_not_reached_is_worth_nothing(task, rollout):
    instance = task(verifier=SEPARATE, steps=("min_reward = 1.0", ""))
    assert (await rollout.play(instance, "true", "echo two > two")).reward == 0.0
    assert rollout.told == ["Write one into one."]
    assert (await rollout.play(instance, "echo one > one", stops=True)).reward == 0.5
    last = task(verifier=SEPARATE, top='multi_step_reward_strategy = "final"')
    assert (await rollout.play(last, "true", "echo two > two")).reward == 1.0
    assert (await rollout.play(last, "echo one > one", stops=True)).reward == 0.0


async def test_an_agent_that_keeps_a_step_from_its_verdict_or_its_beginning_earns_nothing_for_it(task, rollout):
    hangs = {"steps/one/tests/test.sh": f"[ ! -e /app/pipe ] || cat /app/pipe\n{WANTS.format(name='one')}"}
    found = await rollout.play(task(verifier="timeout_sec = 2", files=hangs), "echo one > one; mkfifo pipe", "true")
    assert (found.reward, "has no end" in found.details["spoilt"], len(rollout.told)) == (0.0, True, 1)
    setup = {"steps/two/workdir/setup.sh": "[ ! -e spoilt ]"}
    found = await rollout.play(task(files=setup), "echo one > one; touch spoilt", "true")
    assert (found.reward, "could not begin" in found.details["spoilt"], len(rollout.told)) == (0.5, True, 2)


async def test_a_step_whose_beginning_is_killed_by_nobody_knows_whom_begins_once_more(task, rollout):
    setup = {"steps/two/workdir/setup.sh": "[ -e again ] || { touch again; kill -9 $PPID $$; }"}
    found = await rollout.play(task(files=setup), "echo one > one; touch of-the-agent", "echo two > two")
    assert (found.reward, len(rollout.told)) == (1.0, 2)


async def test_a_step_that_cannot_begin_by_itself_is_nobodys_doing(task, rollout):
    broken = {"steps/two/workdir/setup.sh": "echo no such thing >&2; exit 4"}
    with pytest.raises(SandboxUnavailable, match=r"step two.*exit code 4: no such thing"):
        await rollout.play(task(files=broken), "echo one > one")


async def test_recorded_work_is_graded_again_by_verifiers_in_sandboxes_of_their_own(task, rollout, monkeypatch):
    instance = task(verifier=SEPARATE, steps=("min_reward = 1.0", ""))
    found = await rollout.play(instance, "echo one > one", "mkdir two; echo two > two/two")
    assert found.reward == 0.5
    assert await rollout.again(instance, found) == found
    mended = task(
        verifier=SEPARATE, files={"steps/two/tests/test.sh": WANTS.format(name="two").replace("/two ", "/two/two ")}
    )
    assert (await rollout.again(mended, found)).reward == 1.0
    stricter = task(verifier=SEPARATE, steps=("min_reward = 2.0", ""))
    assert [step["name"] for step in (await rollout.again(stricter, found)).details["steps"]] == ["one"]
    monkeypatch.setattr(artifacts, "MAX_KEPT_BYTES", 5)
    large = await rollout.play(instance, "echo one > one", "echo two > two")
    assert large.reward == 1.0
    with pytest.raises(NotRestorable, match="step two: its artefacts were not recorded"):
        await rollout.again(instance, large)


async def test_solutions_run_in_place_of_an_agent(task, rollout):
    assert (await rollout.play(task(solutions=True))).reward == 1.0
    assert rollout.told == []
    wrong = task(solutions=True, top="[solution]\nenv = {WORD = 'x'}")
    assert (await rollout.play(wrong)).reward == 0.0
