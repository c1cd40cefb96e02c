"""A node with its engine for verl's tests, the trainer's hold on that engine, and what the node recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from prorl_launch.paths import import_path, trainer_python
from prorl_trio.client import BlockingClient, connect
from prorl_trio.integrations.engines import NodeEngines
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from support.skips import because

TOKEN = "a-token-for-tests-0123456789"
TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/train-with-verl.md").read_text()
"""The guide: what is run here is what it shows."""
STEP = 4
"""The step whose weights the engine has: those that training step 5 begins with."""

PLAN = {
    "n": 2,
    "prompt_length": 640,
    "response_length": 96,
    "tasks": [
        {"question": "What now?", "answer": "42"},
        {"question": "What?", "answer": "42"},  # a second turn, after a reminder
        {"question": "What?", "answer": "42", "compact": True},  # a second segment
        {"question": "What now?", "answer": "42", "fails": True},  # no reward
        {"question": "What? " + "?" * 80, "answer": "41"},  # longer than a prompt may be, and wrong
    ],
}


def shown(language):
    """The first block of the guide in that language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0]


def verl_python():
    """Skips where verl has no environment."""
    found = trainer_python("verl")
    if not found.exists():
        pytest.skip(because("verl has no environment here", "make trainers, with Python 3.13 or older"))
    return found


class Rig:
    """The node's process, its engine, and the trainer's hold on it.

    Attributes:
        recorded: outcomes by job id, as an observer of the node has seen them.
    """

    def __init__(self, folder, tiny, engine, nursery):
        self.folder, self.tiny, self.engine, self._nursery = folder, tiny, engine, nursery
        self.recorded: dict[str, Any] = {}
        self.doubled: list[str] = []
        self.process: Any = None
        self.engines: Any = None
        self._observer: Any = None

    async def start(self):
        run = partial(
            trio.run_process,
            [sys.executable, "-m", "support.talk_node", str(self.folder / "node.toml")],
            env=os.environ | {"PYTHONPATH": f"{import_path()}:{TESTS}"},
            stdout=subprocess.PIPE,
            check=False,
            deliver_cancel=_kill,
        )
        self.process = await self._nursery.start(run)
        ready = b""
        while b"READY" not in ready:
            ready += await self.process.stdout.receive_some() or pytest.fail("the node ended")

    async def restart(self):
        """Kill it, and start it again with what is on its disk; return when it is observed again."""
        self.process.kill()
        await self.process.wait()
        await self.start()
        await self._observer.status()
        self.engine.release()  # not before: what ends unobserved is told to no observer

    async def observe(self, *, task_status):
        file = self.folder / "endpoint.json"
        async with connect(endpoint_file=file, token=TOKEN, observe_all=True) as self._observer:
            task_status.started()
            async for seen in self._observer.observed():
                if seen.outcome is not None:
                    if seen.job_id in self.recorded:
                        self.doubled.append(seen.job_id)
                    self.recorded[seen.job_id] = seen.outcome.detached()

    def hold_engine(self):
        """Register the engine, as verl's trainer does."""
        client = BlockingClient(endpoint_file=self.folder / "endpoint.json", token=TOKEN)
        self.engines = NodeEngines(client, check_interval_s=0.05)
        self.engines.register([self.engine.url.removeprefix("http://")], STEP)

    async def run_verl(self, what, *, task_status=trio.TASK_STATUS_IGNORED):
        """Run the program in verl's environment; return what it found. It has begun when it says so."""
        folder = self.folder
        plan = PLAN | {"model": str(folder / "model"), "agent_loops": self.loops}
        plan["settings"] = re.findall(r"^    (\S+=\S+)", shown("sh"), re.MULTILINE)
        plan["engine"] = self.engine.url.removeprefix("http://")
        (folder / "plan.json").write_text(json.dumps(plan))
        env = os.environ | {
            "PYTHONPATH": f"{import_path()}:{TESTS}:{folder}",
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "RAY_raylet_start_wait_time_s": "300",
            "HF_HUB_OFFLINE": "1",
        }
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # each of Ray's processes imports the same modules
        argv = [str(verl_python()), "-m", "support.verl_program", what, "plan.json", "result.json"]
        with (folder / "verl.log").open("wb") as log:
            run = partial(
                trio.run_process, argv, cwd=folder, env=env, stdout=log, stderr=log, check=False, deliver_cancel=_kill
            )
            async with trio.open_nursery() as nursery:
                process = await nursery.start(run)
                task_status.started()
        said = (folder / "verl.log").read_text(errors="replace")
        assert process.returncode == 0, said[-4000:]
        return json.loads((folder / "result.json").read_text())

    @property
    def loops(self):
        """The file of verl's `agent_loop_config_path`, and the module of tasks that it names, as the guide has them."""
        said = shown("yaml").replace("/shared", str(self.folder))
        # Beyond what fits a row, so that there is something to cut.
        said = said.replace("max_turns: 8\n", "max_turns: 8\n    max_trajectory_tokens: 2000\n")
        (self.folder / "my_tasks.py").write_text(shown("python").replace('"shell"', '"talk"'))
        (self.folder / "agent_loops.yaml").write_text(said)
        return str(self.folder / "agent_loops.yaml")


async def _kill(process):
    process.kill()


@asynccontextmanager
async def open_rig(folder):
    tiny = make_tiny_model(folder / "model")
    llama = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    (folder / "model" / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 259, **llama})
    )

    def script(prompt):
        said = tiny.decode(prompt)
        ids = tiny.turn("ANSWER 42" if any(word in said for word in ("now", "Go on", "In short")) else "Let me think.")
        return ids, [float(np.float32(-0.1 * (len(prompt) + n) / 7)) for n in range(len(ids))], "stop"

    config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000, per_token_s=0.03)
    async with open_fake_engine(script=script, config=config) as engine, trio.open_nursery() as nursery:
        node = tomllib.loads(shown("toml"))
        node["model"]["path"] = str(folder / "model")
        node["listen"] |= {"host": "127.0.0.1", "port": 0, "endpoint_file": str(folder / "endpoint.json")}
        node["listen"]["token_file"] = str(folder / "prorl-token")
        node["ledger"]["dir"] = str(folder / "ledger")
        node |= {"sandbox": {"provider": "process", "max_warm": 0}, "arena": {"enabled": False}}
        (folder / "prorl-token").write_text(f"{TOKEN}\n")
        (folder / "prorl-token").chmod(0o600)
        (folder / "node.toml").write_bytes(msgspec.toml.encode(node))
        rig = Rig(folder, tiny, engine, nursery)
        await rig.start()
        await nursery.start(rig.observe)
        await trio.to_thread.run_sync(rig.hold_engine)
        try:
            yield rig
        finally:
            with trio.move_on_after(10, shield=True):
                await trio.to_thread.run_sync(rig.engines.close)
            nursery.cancel_scope.cancel()


def check_row(row, outcome, plan):
    """Assert that a row has the ids, the mask and the log-probabilities that the node recorded, bit for bit."""
    segment = outcome.trajectory.segments[row["extra"]["segment"]]
    start = min(int(np.flatnonzero(segment.loss_mask)[0]), plan["prompt_length"])
    end = min(len(segment), start + plan["response_length"])
    assert row["prompts"] == segment.token_ids[:start].tolist()
    assert row["responses"] == segment.token_ids[start:end].tolist()
    assert row["response_mask"] == row["loss_mask"] == segment.loss_mask[start:end].tolist()
    assert row["rollout_log_probs"] == segment.logprobs[start:end].tolist()
    assert np.count_nonzero(row["rollout_log_probs"]) == sum(row["response_mask"]) > 0
    assert row["rm_scores"] == [0.0] * (end - start - 1) + [outcome.reward]
    steps = {int(span.policy_version) for span in segment.spans if span.start < end}
    assert (row["tag"]["min_global_steps"], row["tag"]["max_global_steps"]) == (min(steps), max(steps))
    assert row["extra"]["reward_extra_info"]["acc"] == float(outcome.reward >= 1.0)
    return steps
