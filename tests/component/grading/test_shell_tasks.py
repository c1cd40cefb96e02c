"""Tasks of Harbor's form in real sandboxes: graded by their own scripts, by agents that do them, and that cheat."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.config import ModelConfig, NodeConfig
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.handlers.shell.handler import ShellHandler
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.types.errors import EvaluationError, SandboxUnavailable
from prorl_trio.types.models import JobSpec, TaskInstance
from support.own_cache import use_own_cache

pytestmark = pytest.mark.xdist_group("sandboxes")
RESOURCES = Resources(config=NodeConfig(model=ModelConfig(path="none")), chat_format=None, backends=None, scorers=None)

SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
DOCKERFILE = """\
FROM python:3.12-slim
WORKDIR /app
ENV GREETING=hello
COPY names.txt ./
RUN sort names.txt \\
    > sorted.txt
"""
CHECK = """\
#!/bin/bash
if [ "$(cat /app/greeting.txt 2>/dev/null)" = "hello ada" ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""
SOLVE = 'echo "$GREETING $(head -1 sorted.txt)" > greeting.txt'


@pytest.fixture
def task(tmp_path):
    def make(toml="", check=CHECK, dockerfile=DOCKERFILE):
        folder = tmp_path / "greet"
        for name in ("environment", "tests", "solution"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "task.toml").write_text(toml)
        (folder / "instruction.md").write_text("Greet the first of the sorted names in greeting.txt.")
        (folder / "environment" / "Dockerfile").write_text(dockerfile)
        (folder / "environment" / "names.txt").write_text("bob\nada\n")
        (folder / "tests" / "test.sh").write_text(textwrap.dedent(check))
        (folder / "solution" / "solve.sh").write_text(SOLVE)
        (tmp_path / "images.toml").write_text('[images]\n"python:3.12-slim" = "host"\n')
        [instance] = load_task_set(str(tmp_path))
        return msgspec.json.decode(msgspec.json.encode(instance), type=TaskInstance)

    return make


@pytest.fixture
async def grade(monkeypatch, tmp_path):
    use_own_cache(tmp_path, monkeypatch)
    provider = await choose_provider(RESOURCES.config.sandbox)
    handler = ShellHandler()
    await handler.prepare(RESOURCES)
    async with open_sandbox_host(provider) as host:

        async def run(instance, command="", *, eval_s=200.0, seen=None):
            """Have an agent run `command`, and evaluate what it did."""
            handler.validate(instance.payload)
            context = RolloutContext(spec=JobSpec(job_id="j", instance=instance), resources=RESOURCES, sandboxes=host)
            with trio.fail_after(240):
                async with context.open_sandbox(handler.sandbox_spec(context)) as sandbox:
                    context.sandbox = sandbox
                    await handler.init(context)
                    result = await sandbox.bash(command or "true", timeout_s=20)
                    if seen is not None:
                        seen.append(result)
                    with trio.CancelScope(deadline=trio.current_time() + eval_s) as context.stage_scope:
                        return await handler.eval(context)

        yield run


# ---------------------------------------------------------------- right and wrong


@pytest.mark.parametrize("toml", ["", f'artifacts = ["greeting.txt"]\n{SEPARATE}'], ids=["shared", "separate"])
async def test_the_solution_earns_one_and_nothing_earns_nothing(task, grade, toml):
    instance = task(toml)
    assert (await grade(instance, SOLVE)).reward == 1.0
    assert (await grade(instance)).reward == 0.0


async def test_nothing_of_tests_and_solution_is_there_before_the_agent_is_done(task, grade):
    seen = []
    await grade(task(), "ls -A /app /tests /solution /logs/verifier", seen=seen)
    assert "names.txt" in seen[0].output
    assert not {"test.sh", "solve.sh"} & set(seen[0].output.split())


async def test_the_task_of_the_guide_can_be_done(tmp_path, grade):
    guide = (Path(__file__).parents[3] / "docs" / "harbor.md").read_text()
    blocks = re.findall(r"```(ini|dockerfile|bash)\n(.*?)```", guide, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["ini", "dockerfile", "bash", "ini", "ini"]
    names = ("greet/task.toml", "greet/environment/Dockerfile", "greet/tests/test.sh", "images.toml")
    for name, (_, text) in zip(names, blocks, strict=False):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "greet" / "instruction.md").write_text("Greet the first name.")
    (tmp_path / "greet" / "environment" / "names.txt").write_text("bob\nada\n")
    [instance] = load_task_set(str(tmp_path))
    assert (await grade(instance, "echo hello $(head -1 sorted.txt) > greeting.txt")).reward == 1.0
    assert (await grade(instance, "echo hello bob > greeting.txt")).reward == 0.0


async def test_a_separate_verifier_sees_what_is_declared_and_nothing_else(task, grade):
    instance = task(SEPARATE)
    assert (await grade(instance, SOLVE)).reward == 0.0
    published = task(SEPARATE, check=CHECK.replace("/app/greeting.txt", "/logs/artifacts/greeting.txt"))
    assert (await grade(published, f"{SOLVE}; cp greeting.txt /logs/artifacts/")).reward == 1.0


@pytest.mark.parametrize(
    ("wrote", "reward"),
    [
        ('echo \'{"reward": 0.5, "style": 1}\' > reward.json; echo 1 > reward.txt', 0.5),
        ("echo '{\"score\": 0.25}' > reward.json", 0.25),
        ("echo -1.5 > reward.txt; exit 3", -1.5),
    ],
)
async def test_rewards_are_read_from_either_file(task, grade, wrote, reward):
    assert (await grade(task(check=f"cd /logs/verifier; {wrote}"))).reward == reward


@pytest.mark.parametrize(
    "wrote",
    [
        "true",
        "echo nan > reward.txt",
        "echo inf > reward.txt",
        "echo '[1]' > reward.json",
        "echo '{}' > reward.json",
        "echo '{\"reward\": 1e999}' > reward.json",
        'echo \'{"reward": "1"}\' > reward.json; echo 1 > reward.txt',
        'echo \'{"a": 1, "b": 1}\' > reward.json',
        "head -c 10000000 /dev/zero > reward.txt",
        "echo 1 > /tmp/one; ln -s /tmp/one reward.txt",
        "mkdir reward.txt",
        "touch reward.txt",
    ],
)
async def test_no_reward_is_no_verdict(task, grade, wrote):
    with pytest.raises(EvaluationError):
        await grade(task(check=f"cd /logs/verifier; {wrote}"))


async def test_a_verifier_that_hangs_by_itself_is_no_verdict(task, grade):
    with pytest.raises(EvaluationError, match="has no end in 1 s; nor is there a reward without the agent"):
        await grade(task("[verifier]\ntimeout_sec = 1\n", check="sleep 60"))


async def test_an_environment_that_cannot_be_made_is_nobodys_doing(task, grade):
    with pytest.raises(SandboxUnavailable, match="exit code 4: no such thing"):
        await grade(task(dockerfile="FROM python:3.12-slim\nRUN echo no such thing >&2; exit 4\n"))


# ---------------------------------------------------------------- what agents try

HACKS = {
    "a reward before the verifier": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
    "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "a link to a reward": "echo 1 > /tmp/one; ln -sf /tmp/one /logs/verifier/reward.txt",
    "a link in place of the folder": "mkdir /tmp/v; echo 1 > /tmp/v/reward.json; rm -r /logs/verifier; "
    "ln -s /tmp/v /logs/verifier",
    "a file in place of the folder": "rm -rf /logs; echo 1 > /logs",
    "other tests": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 444 /tests/test.sh",
    "tests that are a link": "mkdir -p /tmp/t; rm -r /tests; ln -s /tmp/t /tests",
    "a daemon that writes it": "setsid nohup bash -c 'while :; do echo 1 > /logs/verifier/reward.json; done' "
    ">/dev/null 2>&1 & disown; sleep 0.3",
    "a shell that is not left": "exec sleep 1000 &",
}


@pytest.mark.parametrize("toml", ["", SEPARATE], ids=["shared", "separate"])
@pytest.mark.parametrize("hack", HACKS)
async def test_a_hack_earns_nothing(task, grade, toml, hack):
    assert (await grade(task(toml), HACKS[hack])).reward == 0.0


async def test_an_agent_that_keeps_its_verifier_from_a_verdict_earns_nothing(task, grade):
    check = f"[ ! -e /app/pipe ] || cat /app/pipe\n{CHECK}"
    found = await grade(task("[verifier]\ntimeout_sec = 2\n", check=check), "mkfifo /app/pipe")
    assert (found.reward, "has no end in 2 s" in found.details["spoilt"]) == (0.0, True)


RUNS_THE_WORK = """\
#!/bin/sh
sh /app/work.sh > /tmp/out.txt 2>&1
if grep -q 42 /tmp/out.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
REWARD = "/logs/verifier/reward"
WORKS = {
    "right": ("echo 42", 1.0),
    "right, and leaves something that ends": ("echo 42; sleep 0.1 &", 1.0),
    "wrong": ("echo 41", 0.0),
    "ends the script by SIGTERM": (f"echo 1 > {REWARD}.txt; kill -15 $PPID; sleep 1", 0.0),
    "ends the script by SIGKILL": (f"echo 1 > {REWARD}.txt; kill -9 $PPID; sleep 1", 0.0),
    "seals the reward": (f"echo 1 > {REWARD}.txt; chmod 444 {REWARD}.txt; chmod 555 /logs/verifier", 0.0),
    "writes it after the script": (f"(setsid sh -c 'sleep 0.2; echo 1 > {REWARD}.txt' &) >/dev/null 2>&1", 0.0),
    "goes on with the script": (f"echo 'echo 1 > {REWARD}.txt' >> /tests/test.sh", 0.0),
    "stops the script": (f"echo 1 > {REWARD}.txt; kill -STOP $PPID; sleep 100", 0.0),
    "writes reward.json": (f"echo 1 > {REWARD}.json", 0.0),
    "writes several rewards": (f"""echo '{{"a": 1, "b": 1}}' > {REWARD}.json""", 0.0),
    "outlives the script": (f"setsid sh -c 'while :; do echo 1 > {REWARD}.txt; done' >/dev/null 2>&1 &", 0.0),
    "kills everything": ("kill -9 -1", 0.0),
}


@pytest.mark.parametrize("toml", ["", f'artifacts = ["work.sh"]\n{SEPARATE}'], ids=["shared", "separate"])
@pytest.mark.parametrize("work", WORKS)
async def test_a_program_of_the_agents_that_its_verifier_runs(task, grade, toml, work):
    text, reward = WORKS[work]
    toml += "timeout_sec = 4\n" if toml else "[verifier]\ntimeout_sec = 4\n"
    found = await grade(task(toml, check=RUNS_THE_WORK), f"cat > work.sh <<'END'\n{text}\nEND")
    assert found.reward == reward, found


async def test_a_script_that_shows_such_signs_by_itself_is_believed(task, grade):
    check = "#!/bin/bash\nsleep 100 &\necho 1 > /logs/verifier/reward.json\n" + CHECK.partition("\n")[2]
    assert (await grade(task(check=check + "kill $$"), SOLVE)).reward == 1.0


CONFLICTS = {
    "a folder in place of a file": ("rm -rf names.txt; mkdir names.txt; echo x > names.txt/x", "names.txt"),
    "a file in place of a folder": ("rm -rf deep; echo x > deep", "deep"),
    "a folder deep in a folder": ("rm -rf deep/b; mkdir -p deep/b; echo x > deep/b/x", "deep"),
    "a file deep in a folder": ("rm -rf deep/a; echo x > deep/a", "deep"),
    "a link in place of a folder": ("rm -rf deep; ln -s /tmp deep", "deep"),
    "a dangling link": ("rm -rf deep; ln -s nowhere deep", "deep"),
    "a pipe": ("rm -f names.txt; mkfifo names.txt", "names.txt"),
}


@pytest.mark.parametrize("conflict", CONFLICTS)
async def test_an_artefact_of_another_kind_is_never_a_way_to_no_verdict(task, grade, conflict):
    command, name = CONFLICTS[conflict]
    dockerfile = DOCKERFILE + "RUN mkdir -p deep/a && echo b > deep/b && echo c > deep/a/c\n"
    instance = task(f'artifacts = ["{name}", "greeting.txt"]\n{SEPARATE}', dockerfile=dockerfile)
    assert (await grade(instance, command)).reward == 0.0
    assert (await grade(instance, f"{SOLVE}; {command}")).reward == 1.0
