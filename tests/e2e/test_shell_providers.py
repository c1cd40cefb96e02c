"""Harbor folders through a whole node, by command, with each provider, on the host's userland and a stored image."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from prorl_trio.cli import main
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.images.compose import record_image
from prorl_trio.sandbox.images.layers import store_layer
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.runtime.host_python import require_host_python
from support.code_policy import call
from support.programs import find_busybox

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_node.py"
TIMEOUT_S = 400
CHECK = 'cd /logs/verifier; if [ "$(cat /app/{0})" = {0} ]; then echo 1 > reward.txt; else echo 0 > reward.txt; fi'
SOLVE = "[ -e ready ] && echo {0} > {0}"
SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
TASK = {
    "environment/Dockerfile": "FROM published:1\nWORKDIR /app\nRUN touch ready\n",
    "instruction.md": "Write one into one.",
    "tests/test.sh": CHECK.format("one"),
    "solution/solve.sh": SOLVE.format("one"),
}
STEPS = {
    "environment/Dockerfile": "FROM published:1\nWORKDIR /app\n",
    "task.toml": '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\nmin_reward = 1.0\n',
    **{f"steps/{name}/instruction.md": f"Write {name} into {name}." for name in ("one", "two")},
    **{f"steps/{name}/tests/test.sh": CHECK.format(name) for name in ("one", "two")},
    **{f"steps/{name}/solution/solve.sh": SOLVE.format(name) for name in ("one", "two")},
    **{f"steps/{name}/workdir/ready": "" for name in ("one", "two")},
}


def policy(prompt):
    """Do what was asked for last, and finish when that is done."""
    last = prompt.rsplit("<|im_start|>user\n", 1)[-1]
    if "<tool_response>" in last:
        return call("finish", answer="done")
    return call("bash", command=SOLVE.format("two" if "into two" in last else "one"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, with the real runtimes in it."""
    for kind, real in (("runtimes", cache_dir() / "runtimes"), ("host-pythons", require_host_python().parent)):
        (tmp_path / "cache" / kind).parent.mkdir(exist_ok=True)
        (tmp_path / "cache" / kind).symlink_to(real)
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))


def store_busybox(program, folder):
    """Have an image of a busybox and nothing else in the store: neither bash nor Python."""
    for name in ("bin", "dev", "etc", "proc", "tmp", "usr", "var", "home", "app"):
        (folder / name).mkdir(parents=True)
    shutil.copy2(program, folder / "bin/busybox")
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout
    for applet in set(listed.split()) - {"busybox"}:
        (folder / "bin" / applet).symlink_to("busybox")
    record_image("small", "", [store_layer(folder, "/").record.digest])
    return "small"


def write_tasks(folder, image):
    folder.mkdir()
    (folder / "images.toml").write_text(f'[images]\n"published:1" = "{image}"\n')
    for task, files in (("own", TASK | {"task.toml": f'artifacts = ["one"]\n{SEPARATE}'}), ("steps", STEPS)):
        for name, text in files.items():
            (folder / task / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / task / name).write_text(text)
    return str(folder)


def open_node(provider):
    spec = importlib.util.spec_from_file_location("local_node_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.open_local_node(policy, provider=provider)


@pytest.mark.parametrize("kind", ["host", "stored"])
@pytest.mark.parametrize("name", ["apptainer", "bubblewrap"])
async def test_solutions_and_a_policy_of_several_turns_earn_their_rewards(name, kind, tmp_path, request):
    busybox = kind == "stored" and find_busybox()  # with the cache that all tests have
    report = await PROVIDERS[name](tmp_path).probe()
    if not report.usable:
        pytest.skip(f"{name} cannot run here: {report.problem}. What to do: {report.remedy}")
    request.getfixturevalue("cache")
    image = store_busybox(busybox, tmp_path / "root") if busybox else "host"
    tasks = write_tasks(tmp_path / "tasks", image)
    with trio.fail_after(TIMEOUT_S):
        async with open_node(name) as node:
            env = {"PRORL_TOKEN": node.token, "PRORL_URL": node.url}
            run = partial(CliRunner().invoke, main, env=env)
            for arguments in (("--oracle",), ()):
                argv = ["eval", "--tasks", tasks, "--json", "--out", str(tmp_path / "runs"), *arguments]
                result = await trio.to_thread.run_sync(run, argv)
                assert result.exit_code == 0, result.output
                found = json.loads(result.stdout)
                assert (found["graded"], found["reward_mean"], found["pass@1"]) == (2, 1.0, 1.0), result.output
            (tmp_path / "tasks/own/solution/solve.sh").write_text("echo hm; false")
            result = await trio.to_thread.run_sync(run, [*argv, "--oracle"])
            assert (result.exit_code, "own: its solution earned 0" in result.stderr) == (3, True), result.output
