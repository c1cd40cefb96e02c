"""Run by a Python with SkyRL, with this project on the path: SkyRL's validator, advantages and trainer simulator.

    python -m support.skyrl_program PLAN_JSON RESULT_JSON

The plan names the node and its engine, and has the guide's entry point and settings. The simulator
(`FullyAsyncTrainerSim`) trains no model: its steps sleep. Here they compute SkyRL's advantages of each batch as well,
which need no model either.

Shims: no vLLM (`Engines` stands for SkyRL's client of it), and before Python 3.12, which SkyRL requires, pydantic needs
another `TypedDict`. The simulator of 0.4.0 lacks `get_timing_metrics` and `finalize_pending_saves`, which its trainer
calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from pathlib import Path

if sys.version_info < (3, 12):
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict

import numpy as np
import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.evaluate import evaluate
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import build_dataloader, validate_generator_output

from prorl_trio.integrations.rollouts import close_all
from prorl_trio.integrations.skyrl.generator import NodeGenerator
from prorl_trio.integrations.skyrl.output import output_of
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import Outcome, Segment, Timing, Trajectory

SIZE = 4
"""Rollouts of a group."""
BATCH = 2
"""Groups of a step."""


class Prompts:
    """A data set, as SkyRL's `PromptDataset` is one."""

    def __init__(self, tasks):
        self.tasks = tasks

    def __len__(self):
        return len(self.tasks)

    def __getitem__(self, number):
        return self.tasks[number]["question"], None, {"task": task_of(number, self.tasks[number])}, str(number)

    def collate_fn(self, items):
        names = ("prompt", "env_class", "env_extras", "uid")
        return [dict(zip(names, item, strict=True)) for item in items]


def task_of(number, payload):
    return {"instance_id": f"t{number}", "handler": "talk", "payload": payload}


class Engines:
    """SkyRL's client of its vLLM servers: it notes what is done to them."""

    def __init__(self, url):
        self.server_urls, self.weight_version, self.done = [url], 0, []

    async def pause_generation(self, clear_cache=False):
        self.done.append("pause")

    async def resume_generation(self):
        self.done.append("resume")

    def increment_weight_version(self):
        self.weight_version += 1


class Tracker:
    def log(self, data, step, commit=False):
        pass

    def finish(self):
        pass


class Tokenizer:
    pad_token_id = 0

    def decode(self, ids):
        return f"{len(ids)} tokens"


class Sim(FullyAsyncTrainerSim):  # type: ignore[misc] # SkyRL has no types
    """The simulator, which keeps what it would train on."""

    def init_weight_sync_state(self):
        super().init_weight_sync_state()
        self.dispatch.get_timing_metrics = dict
        self.dispatch.finalize_pending_saves = lambda model: None
        self.batches = []

    async def _run_training(self, training_input):
        training_input["values"] = None
        groups, last = training_input.metadata["uids"], training_input.metadata["is_last_step"]
        scored = self.compute_advantages_and_returns(training_input)
        mask = scored["loss_mask"].numpy()
        self.batches.append(
            {
                "groups": list(groups),
                "last": list(last),
                "rewards": scored["rewards"].sum(-1).tolist(),
                "advantages": row_values(scored["advantages"], scored["response_mask"]),
                "trained": mask.sum(-1).tolist(),
                "metrics": {name: self.all_metrics.get(name) for name in METRICS},
            }
        )
        return await super()._run_training(training_input)


METRICS = (
    "generate/failed_rollouts",
    "policy/min_version",
    "policy/max_version",
    "reward/avg_raw_reward",
    "loss/avg_final_rewards",
)


def row_values(values, mask):
    """The one value that all response tokens of each row have."""
    found = [set(row[keep.bool()].tolist()) for row, keep in zip(values, mask, strict=True)]
    assert all(len(row) == 1 for row in found), "an advantage differs within a row"
    return [row.pop() for row in found]


def config_of(plan):
    """The settings that the guide shows, and those of a small run without models."""
    cfg = SkyRLTrainConfig.from_cli_overrides(plan["settings"])
    cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = BATCH
    cfg.trainer.eval_batch_size = 8
    cfg.trainer.epochs, cfg.trainer.max_training_steps = 1, plan["steps"]
    cfg.trainer.eval_interval = cfg.trainer.ckpt_interval = cfg.trainer.hf_save_interval = 0
    cfg.trainer.resume_mode, cfg.trainer.update_ref_every_epoch = "none", False
    cfg.trainer.export_path = cfg.trainer.ckpt_path = str(Path.cwd())
    cfg.trainer.algorithm.grpo_norm_by_std = False
    cfg.trainer.fully_async.simulate_training = True
    cfg.trainer.fully_async.max_staleness_steps = 1
    cfg.trainer.fully_async.num_parallel_generation_workers = BATCH
    cfg.trainer.fully_async.simulate_training_step_seconds = 0.0
    cfg.generator.n_samples_per_prompt = SIZE
    cfg.generator.sampling_params.max_generate_length = 100
    cfg.generator.max_input_length = 1000
    cfg.generator.eval_sampling_params.max_generate_length = 100
    cfg.generator.inference_engine.enable_ray_prometheus_stats = cfg.trainer.enable_ray_gpu_monitor = False
    cfg.environment.env_class = "talk"
    cfg.data.dataloader.num_workers, cfg.data.dataloader.persistent_workers = 0, False
    return cfg


def made(number, reward, count):
    """An outcome of `count` segments, all of whose tokens differ from others'."""
    segments = [
        Segment.from_arrays(
            range(1000 * number + 10 * at, 1000 * number + 10 * at + 5),
            [0.0, 0.0, -0.5, -0.25, -0.125],
            [0, 0, 1, 1, 1],
            [],
            parent=0 if at else None,
            reason="compaction" if at else None,
        )
        for at in range(count)
    ]
    trajectory = Trajectory(segments=segments, turns=[], stop_reason="finished")
    return Outcome(
        job_id=str(number),
        instance_id="i",
        group_id="g",
        status="failed" if reward is None else "completed",
        reward=reward,
        cause="sandbox" if reward is None else None,
        error="",
        trajectory=trajectory,
        details={},
        timing=Timing(),
    )


def validated(plan, cfg):
    """SkyRL's validator on made outcomes of many segments, and its own advantages of their rows."""
    names: list[TrajectoryID] = []
    outcomes: list[Outcome] = []
    for group, members in enumerate(plan["made"]):
        for member, (reward, count) in enumerate(members):
            names.append(TrajectoryID(str(group), member))
            outcomes.append(made(len(outcomes), reward, count))
    output = output_of(names, outcomes, pad_token_id=0, trains=True)
    output.pop("rollout_metrics")
    validate_generator_output(len(names), output, step_wise=True)
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg, trainer.all_metrics, trainer.tokenizer = cfg, {}, Tokenizer()
    trainer.dispatch = type("Dispatch", (), {"get_lcm_dp_size": lambda self: 1})()
    cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = len(plan["made"])
    uids = [each.instance_id for each in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    batch = trainer.convert_to_training_input(output, uids)
    batch["values"] = None
    batch = trainer.compute_advantages_and_returns(batch)
    return {
        "groups": uids,
        "members": [each.repetition_id for each in output["trajectory_ids"]],
        "advantages": row_values(batch["advantages"], batch["response_mask"]),
        "trained": batch["loss_mask"].sum(-1).tolist(),
        "logprobs": [np.float64(row).tolist() for row in output["rollout_logprobs"]],
    }


async def simulated(plan, cfg):
    page: dict[str, typing.Any] = {"__name__": "main_node"}
    exec(plan["entry_point"], page)
    job = {**page["JOB"], "retry": {"max_attempts": 1}}
    page |= {"NODE": {"url": plan["node"]}, "JOB": job, "FullyAsyncRayPPOTrainer": Sim}
    entry = object.__new__(page["NodeExp"])
    generator = entry.get_generator(cfg, Tokenizer(), None)
    trainer = entry.get_trainer(
        cfg=cfg,
        tracker=Tracker(),
        tokenizer=Tokenizer(),
        train_dataset=Prompts(plan["tasks"]),
        inference_engine_client=Engines(plan["engine"]),
        generator=generator,
        eval_dataset=None,
        colocate_pg=None,
    )
    await trainer.train()
    evaluation = Prompts(plan["evaluated"])
    metrics = await evaluate(build_dataloader(cfg, evaluation, is_train=False), generator, cfg, 2, Tokenizer())
    lost = Prompts([{"question": "What now?", "answer": "42", "fails": True}])
    refused = {
        "no rewards": await error_of(
            evaluate(build_dataloader(cfg, lost, is_train=False), generator, cfg, 2, Tokenizer())
        ),
    }
    return {"batches": trainer.batches, "engines": trainer.inference_engine_client.done, "eval": metrics} | refused


async def error_of(work):
    try:
        await work
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def main(plan_file, result_file):
    plan = json.loads(Path(plan_file).read_text())
    torch.set_num_threads(1)
    result = {"python": list(sys.version_info[:2]), "validated": validated(plan, config_of(plan))}
    whole = config_of(plan)
    whole.generator.step_wise_trajectories = False
    try:
        NodeGenerator(whole, Tokenizer(), node={"url": plan["node"]})
    except ConfigError as exc:
        result["whole"] = str(exc)
    result |= asyncio.run(simulated(plan, config_of(plan)))
    close_all()
    Path(result_file).write_text(json.dumps(result, default=float))


if __name__ == "__main__":
    main(*sys.argv[1:])
