"""Run by verl's Python, with this project on the path: its own workers, whose rollouts a node does.

    python -m support.verl_program workers|cluster PLAN_JSON RESULT_JSON

`workers` runs verl's V1 and V0 agent loop workers in this process, `cluster` its V1 manager and replay buffer over Ray
and the TransferQueue. The plan says the model, the agent loops' file and the data rows; the result has what came out.

Shims for a machine without GPUs, and for speed: the workers get no client of LLM servers, as the node calls the engine;
`workers` puts a dictionary (`Queue`) in place of the TransferQueue, which needs Ray, and `Servers` in place of rollout
servers and of what moves weights into them, which need GPUs.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import verl
import verl.trainer.ppo.v1.agent_loop_tq as v1
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils

from prorl_trio.integrations.rollouts import close_all
from prorl_trio.integrations.verl.main_ppo import NodeTaskRunner
from prorl_trio.integrations.verl.trainers import check_tokenizer, install, node_of
from prorl_trio.types.errors import ConfigError

DEFAULTS = Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml"
ARRAYS = ("prompts", "responses", "response_mask", "loss_mask", "rollout_log_probs", "rm_scores")
STEP = 5


class Queue:
    """In place of the TransferQueue: the last status of each prompt, and the rows in their order."""

    def __init__(self):
        self.statuses, self.rows = {}, {}

    def init(self):
        pass

    async def async_kv_put(self, key, partition_id, tag):
        self.statuses[key] = tag["status"]

    async def async_kv_batch_put(self, keys, fields, tags, partition_id):
        for number, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            assert key not in self.rows, f"{key} comes twice"
            self.rows[key] = row_of(fields, number) | {"tag": tag}


def config_of(plan, **changes):
    """verl's own defaults, the settings that the guide shows, and the plan's model, agent loop and lengths."""
    defaults = OmegaConf.load(DEFAULTS)
    OmegaConf.set_struct(defaults, True)  # a setting that verl does not know is an error
    rollout = {
        "n": plan["n"],
        "prompt_length": plan["prompt_length"],
        "response_length": plan["response_length"],
        "agent": {"num_workers": 1, "agent_loop_config_path": plan["agent_loops"]},
        **changes,
    }
    storage = {"total_storage_size": 1000, "num_data_storage_units": 1}
    config = OmegaConf.merge(
        defaults,
        OmegaConf.from_dotlist(plan["settings"]),
        {
            "actor_rollout_ref": {"rollout": rollout, "model": {"path": plan["model"]}},
            "transfer_queue": {"enable": True, "backend": {"SimpleStorage": storage}},
        },
    )
    OmegaConf.resolve(config)
    return config


def columns(plan):
    """The data rows as verl's data set has them: `uid`, `raw_prompt`, `extra_info`, `index`."""
    tasks = plan["tasks"]
    found: dict[str, list[object]] = {
        "uid": [f"prompt{n}" for n in range(len(tasks))],
        "raw_prompt": [[{"role": "user", "content": task["question"]}] for task in tasks],
        "extra_info": [{"index": n, "payload": task} for n, task in enumerate(tasks)],
    }
    arrays: dict[str, np.ndarray] = {}
    for name, values in found.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return arrays | {"index": np.arange(len(tasks))}


def row_of(fields, number):
    found = {name: fields[name][number].tolist() for name in ARRAYS}
    return found | {"extra": fields["extra_fields"][number], "num_turns": fields["num_turns"][number]}


def v1_batch(plan):
    batch = tensordict_utils.get_tensordict({**columns(plan), "dummy": torch.zeros(len(plan["tasks"]), 1)})
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", STEP)
    return batch


async def run_v1(plan):
    """The rows that V1's worker puts into the queue, and what became of each prompt."""
    v1.tq = queue = Queue()
    worker = v1.AgentLoopWorkerTQ.__ray_metadata__.modified_class(config_of(plan), None, None, None)
    await worker.generate_sequences(v1_batch(plan))
    await asyncio.gather(*worker.background_tasks)
    return {"rows": queue.rows, "statuses": queue.statuses}


async def run_v0(plan):
    """The padded batch that V0's worker returns."""
    worker = AgentLoopWorker(config_of(plan), None, None, None)
    batch = DataProto(batch=None, non_tensor_batch=columns(plan), meta_info={"global_steps": STEP})
    out = await worker.generate_sequences(batch)
    tensors = {name: tensor.tolist() for name, tensor in out.batch.items()}
    said = {name: out.non_tensor_batch[name].tolist() for name in ("job_id", "acc", "has_reward", "min_global_steps")}
    return {"tensors": tensors, "said": said, "metrics": out.meta_info["metrics"]}


async def refusals(plan):
    """The errors of one rollout each, under configurations that cannot be trained with."""
    wrong = {"truncated": {"top_p": 0.9}, "hot": {"temperature": 0.5}, "penalty": {}}
    said = {}
    for name, changes in wrong.items():
        config = config_of(plan, **changes)
        worker = AgentLoopWorker(config, None, None, None)
        rollout = config.actor_rollout_ref.rollout
        params = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k, "logprobs": True}
        if name == "penalty":
            params["repetition_penalty"] = 1.5
        row = {key: values[0] for key, values in columns(plan).items()}
        trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
        try:
            await worker._run_agent_loop(params, trajectory, agent_name="node", trace=False, session_id=0, **row)
        except Exception as exc:
            said[name] = f"{type(exc).__name__}: {exc}"
    return said


class Servers:
    """In place of verl's rollout servers and their weights, which need GPUs: it notes what the node knows meanwhile."""

    def __init__(self, plan, node):
        self._addresses, self._node, self.calls = [plan["engine"]], node, []

    def get_addresses(self):
        return self._addresses

    def __getattr__(self, name):
        def call(*args):
            paused = self._node.status()["backends"]["admission"]["paused"]
            self.calls.append([name, *args, "held back" if paused else "open"])

        return call


def hooks(plan):
    """verl's own hooks in the order of its `fit`, for two steps of each trainer; what they did, and when.

    And what is said to a tokenizer of another model.
    """
    install()
    config = config_of(plan)
    done = {}
    with node_of(config).connect_blocking() as node:
        for mode in ("sync", "colocate_async", "separate_async"):
            servers = Servers(plan, node)
            trainer = object.__new__(get_trainer_cls(mode))  # without the workers that its constructor starts
            trainer.config, trainer.global_steps, trainer.timing_raw = config, 0, {}
            trainer.tokenizer = AutoTokenizer.from_pretrained(plan["model"])
            trainer.llm_server_manager = trainer.checkpoint_manager = servers
            trainer.curr_step_profile = trainer.prev_step_profile = False
            if mode == "separate_async":
                trainer.standalone_server_manager = trainer.standalone_checkpoint_manager = servers
                trainer.llm_server_manager = None
                trainer._enable_hybrid_replicas, trainer._step_sample_wait_seconds = False, 0.0
                trainer._sample_start, trainer.hybrid_rollout_config = 0.0, OmegaConf.create({"enable_switch": False})
            trainer.on_init_end()
            for trainer.global_steps in (1, 2):
                trainer.on_sample_end()
                servers.calls.append(
                    ["train", "held back" if node.status()["backends"]["admission"]["paused"] else "open"]
                )
                trainer.on_step_end()
                servers.calls.append(["version", versions(node), "open"])
            trainer._engines.close()
            done[mode] = servers.calls
        trainer.tokenizer.add_tokens(["<of another model>"])
        try:
            check_tokenizer(trainer.tokenizer, node)
        except ConfigError as exc:
            return done, str(exc)
    raise AssertionError("another tokenizer was taken")


def versions(node):
    """The version under which each engine samples."""
    return sorted({each.policy_version for each in node.resume().backends})


def trainers_of_task_runner():
    """The trainers that verl's own task runner finds when it runs as ours, by mode."""
    ours = NodeTaskRunner.__ray_metadata__.modified_class.__ray_actor_class__
    theirs, found = ours.__mro__[1], {}
    theirs.run = lambda _self, config: found.update({mode: get_trainer_cls(mode).__name__ for mode in config})
    ours.run(object.__new__(ours), ("sync", "colocate_async", "separate_async"))
    return found


async def workers(plan):
    runner = trainers_of_task_runner()
    found = {"v1": await run_v1(plan), "v0": await run_v0(plan), "refused": await refusals(plan)}
    done, found["refused"]["tokenizer"] = hooks(plan)
    return found | {"hooks": done, "task_runner": runner}


def cluster(plan):
    """The rows that come out of V1's replay buffer, as its trainer takes them."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short, for its sockets
        return in_cluster(plan, folder)


def in_cluster(plan, folder):
    import ray
    import transfer_queue
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    config = config_of(plan)
    # Ray waits 30 s for its agent, which is not long where that is compiled only then.
    subprocess.run([sys.executable, "-c", "import ray.dashboard.agent"], check=True)
    # More processors than there are: verl's actors ask for one each.
    ray.init(num_cpus=16, include_dashboard=False, _temp_dir=folder)
    transfer_queue.init(config.transfer_queue)
    create = {"config": config, "llm_client": None, "teacher_client": None, "reward_loop_worker_handles": None}
    manager = v1.AgentLoopManagerTQ.create(**create)
    batch = v1_batch(plan)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": STEP} for _ in range(len(batch))]
    transfer_queue.kv_batch_put(keys=list(batch["uid"]), partition_id="train", tags=tags)
    manager.generate_sequences(batch)
    buffer = ReplayBuffer("sync", config.trainer, None, "drop", {}, poll_interval=0.2)
    sampled, _metrics = buffer.sample(STEP, "train", len(batch))
    fields = transfer_queue.kv_batch_get(keys=sampled.keys, partition_id="train")
    rows = {key: row_of(fields, n) | {"tag": sampled.tags[n]} for n, key in enumerate(sampled.keys)}
    failed = sorted(buffer.failure_keys["train"])
    transfer_queue.close()
    ray.shutdown()
    return {"rows": rows, "failed": failed}


def main():
    what, plan, result = sys.argv[1:]
    plan = json.loads(Path(plan).read_bytes())
    print("BEGIN", flush=True)  # noqa: T201
    try:
        found = asyncio.run(workers(plan)) if what == "workers" else cluster(plan)
    finally:
        close_all()
    Path(result).write_text(json.dumps(found, default=lambda value: value.item()))


if __name__ == "__main__":
    main()
