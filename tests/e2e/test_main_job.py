"""The main job with everything real: vLLM, the model, the sandboxes, the questions, the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import trio

from prorl_launch.paths import engine_python, import_path, model_dir
from prorl_trio.chat.format import ChatFormat
from prorl_trio.config import SandboxConfig
from prorl_trio.runs.recording import read_outcomes
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.types.errors import ConfigError
from support.skips import because
from support.soak import adopted_orphans

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]
KILL_DEADLINE_S = 5.0
ENGINE_DEADLINE_S = 15.0
"""For an engine it is 3 s to end by itself and 2 s to be killed, on a machine with nothing else to do."""

SHARED_MEMORY = Path("/dev/shm")
DAEMON = re.compile(r"\d+: \S*python\S* (-\w )*-m prorl_daemon *$")
"""A daemon's own process, not its launcher's, which names it too."""

ENGINE_LAUNCHER = """
import pathlib, sys, trio
from prorl_launch.paths import engine_python, model_dir
from prorl_launch.vllm import open_vllm
async def main():
    async with open_vllm(engine_python(), model_dir(), log_file=pathlib.Path(sys.argv[1])):
        print("UP", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@pytest.fixture(params=["apptainer", "bubblewrap"])
def provider(request):
    try:
        trio.run(choose_provider, SandboxConfig(provider=request.param))
    except ConfigError as exc:
        pytest.skip(because(f"{request.param} does not work on this machine: {exc}", "prorl-trio doctor"))
    return request.param


def demo_command(vllm_url, out, *options):
    command = [sys.executable, "-m", "prorl_trio.cli", "demo", "--out", str(out), *options]
    return [*command, "--backend", vllm_url, "--model", str(model_dir())] if vllm_url else command


@pytest.fixture(autouse=True)
def subreaper():
    """None escapes `leftovers` by losing its parent; those that have ended are reaped after each test."""
    with adopted_orphans():
        yield


@pytest.fixture
def machine(vllm_url, monkeypatch):
    """What is on the machine because of the test: processes, mounts, temporary files, shared memory."""
    with tempfile.TemporaryDirectory(prefix="e2e-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Machine(Path(folder))


class Machine:
    def __init__(self, folder):
        self.folder = folder
        self.before = descendants()
        self.shared_before = set(os.listdir(SHARED_MEMORY))

    def leftovers(self):
        """Processes (zombies left out) as `pid: command line`, mounts, and files: temporary ones, shared memory."""
        found = {f"{pid}: {line}" for pid, line in descendants().items() if pid not in self.before}
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        found |= {f"mount {line}" for line in mounts if str(self.folder) in line}
        return found | {f"file {path}" for path in self.folder.iterdir()} | self.shared_memory()

    def shared_memory(self):
        """New files there, those left out that a stranger uses, whoever that is on a shared machine."""
        new = [SHARED_MEMORY / name for name in set(os.listdir(SHARED_MEMORY)) - self.shared_before]
        ours = descendants().keys() - self.before.keys()
        maps = [f"/proc/{pid}/maps" for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in ours]
        text = "".join(map(read, maps)) if new else ""
        return {f"file {path}" for path in new if f"{path}\n" not in text}

    def wait_until_gone(self, deadline_s, part=""):
        """What is left, of what mentions `part`, after at most `deadline_s`."""
        end = time.monotonic() + deadline_s
        while (left := {line for line in self.leftovers() if part in line}) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def wait_for_sandboxes(self, demo, count):
        """Until so many sandboxes are live."""
        deadline = time.monotonic() + 120
        while sum(bool(DAEMON.match(line)) for line in self.leftovers()) < count:
            assert demo.poll() is None, demo.stdout.read()
            assert time.monotonic() < deadline, "no sandboxes within 120 s"
            time.sleep(0.05)

    def node_pid(self):
        """The process of the node: the one that runs `prorl_trio.cli serve`, and not its supervisor."""
        lines = [line for line in self.leftovers() if " serve --config" in line and "supervisor" not in line]
        return min(map(pid_of, lines))  # a child about to execute has its line too


def pid_of(line):
    return int(line.split(":")[0])


def read(path):
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def descendants():
    """Every process below this one: pid -> command line. Zombies are left out."""
    parents, lines = {}, {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if state != "Z":
            parents[pid], lines[pid] = int(parent), line.replace(b"\0", b" ").decode(errors="replace")[:300]
    found, queue = {}, [os.getpid()]
    while queue:
        below = [pid for pid, parent in parents.items() if parent == queue[0]]
        found |= {pid: lines[pid] for pid in below}
        queue = queue[1:] + below
    return found


def summary_of(out):
    (run,) = out.iterdir()
    return json.loads((run / "summary.json").read_text()), run / "trajectories.msgpack"


def check_tokens(path):
    """The loss mask is 1 exactly on the sampled tokens, and prompts, turns and end-of-turn tokens fit together."""
    chat_format = ChatFormat.load(model_dir())
    for outcome in read_outcomes(path):
        trajectory = outcome.trajectory
        assert trajectory is not None
        (segment,) = trajectory.segments
        mask = np.zeros(len(segment), dtype=np.uint8)
        for turn in trajectory.turns:
            mask[turn.completion_start : turn.completion_end] = 1
            sampled = segment.token_ids[turn.completion_start : turn.completion_end].tolist()
            assert chat_format.decode(sampled) == turn.text
            assert (sampled[-1] in chat_format.end_of_turn_ids) == (turn.finish_reason == "stop")
        assert np.array_equal(mask, segment.loss_mask)
        assert (segment.logprobs[mask == 0] == 0).all()
        assert (segment.logprobs[mask == 1] <= 0).all()
        covered = sum(span.end - span.start for span in segment.spans)
        assert covered == int(mask.sum())


def check_logprobs(path):
    run = subprocess.run(
        [engine_python(), Path(__file__).with_name("forward_pass.py"), model_dir(), path, "6"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": import_path(), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["tokens"] > 200
    assert result["mean_abs"] < 0.05, result


def test_the_main_job(provider, vllm_url, machine, tmp_path):
    out = tmp_path / "runs"
    options = ("--questions", "8", "--rollouts", "4", "--provider", provider)
    run = subprocess.run(
        demo_command(vllm_url, out, *options), capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    summary, trajectories = summary_of(out)
    assert summary["jobs"] == 32
    assert summary["completed"] >= 25
    assert summary["completed"] + summary["failed"] + summary["cancelled"] + summary["timed_out"] == 32
    assert summary["prefix_breaks"] == 0
    assert summary["tool_calls"] > 0
    assert 0 < summary["reward_mean"] < 1, "the questions are such that the untrained model answers some"
    assert "8 groups; in " in run.stdout
    check_tokens(trajectories)
    check_logprobs(trajectories)
    assert machine.wait_until_gone(1.0) == set()
    shown = subprocess.run(
        [sys.executable, "-m", "prorl_trio.cli", "show", str(trajectories), read_outcomes(trajectories)[0].job_id],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "stopped:" in shown.stdout


@pytest.mark.parametrize("end", ["ctrl-c", "kill -9 of the node", "kill -9 of the demo"])
def test_nothing_is_left_after(end, provider, vllm_url, machine, tmp_path):
    out = tmp_path / "runs"
    options = ("--tasks", "gsm8k", "--questions", "8", "--rollouts", "4", "--provider", provider)  # long ones
    demo = subprocess.Popen(
        demo_command(vllm_url, out, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        machine.wait_for_sandboxes(demo, 3)
        if end == "ctrl-c":
            demo.send_signal(signal.SIGINT)
            assert demo.wait(timeout=30) == 130
        elif end == "kill -9 of the demo":
            demo.kill()
            demo.wait(timeout=5)
        else:
            os.kill(machine.node_pid(), signal.SIGKILL)
            killed = time.monotonic()
            assert machine.wait_until_gone(KILL_DEADLINE_S, "prorl_daemon") == set()
            assert demo.wait(timeout=30) == 1, "the demo must notice that its node is gone"
            assert time.monotonic() - killed < 15
        assert machine.wait_until_gone(KILL_DEADLINE_S) == set()
    finally:
        demo.kill()
        demo.communicate()


@pytest.mark.parametrize("victims", [["engine core", "launcher"], ["guard"]], ids=" and ".join)
def test_nothing_is_left_of_a_killed_engine(victims, machine, tmp_path):
    launcher = subprocess.Popen(
        [sys.executable, "-c", ENGINE_LAUNCHER, str(tmp_path / "log")], cwd=CHECKOUT, stdout=subprocess.PIPE
    )
    try:
        assert launcher.stdout.readline() == b"UP\n", (tmp_path / "log").read_text()[-3000:]
        assert any(f"file {SHARED_MEMORY}" in line for line in machine.leftovers()), "a real engine shares memory"
        found = machine.leftovers()
        pids = {
            "launcher": launcher.pid,
            "guard": max(pid_of(line) for line in found if "supervisor.py" in line),
            "engine core": max((pid_of(line) for line in found if "EngineCore" in line), default=0),
        }
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        assert machine.wait_until_gone(ENGINE_DEADLINE_S, "supervisor.py") == set()
        assert machine.wait_until_gone(KILL_DEADLINE_S, str(SHARED_MEMORY)) == set()
    finally:
        launcher.kill()
        launcher.communicate()
    assert machine.wait_until_gone(KILL_DEADLINE_S) == set()
