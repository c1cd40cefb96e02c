"""Training runs of TRL's, in the trainers' environment: what `test_trl` starts, with a folder of its own.

`run.json` there says which; `rows.npz` gets the rows as they reach TRL's own loss, `log.json` the trainer's log.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

from prorl_trio import BlockingClient, TaskInstance
from prorl_trio.client.sampling import JobTemplate
from prorl_trio.integrations.trl import RolloutFunction, RolloutWorker, TaskLookup, WeightTransfer, node_reward
from prorl_trio.types.models import SamplingParams
from support import trl_on_cpu

ON_CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [], "save_strategy": "no"}


def make_weights(folder):
    """Add random weights to a folder that has a model's configuration."""
    set_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)


def tasks(count):
    return [
        TaskInstance(instance_id=f"q{n}", handler="math", payload={"question": f"{n} * 7?", "answer": str(n * 7)})
        for n in range(count)
    ]


def messages(task):
    return [{"role": "user", "content": task.payload["question"]}]


class Trained:
    """Rows as they reach the trainer's own code, in their order."""

    def __init__(self):
        self.arrays = {}
        self.advantages = []

    def add(self, token_ids, mask, logprobs, advantage):
        number = len(self.advantages)
        self.arrays |= {
            f"ids-{number}": np.asarray(token_ids, np.int64),
            f"mask-{number}": np.asarray(mask, np.int64),
            f"logprobs-{number}": np.asarray(logprobs, np.float32),
        }
        self.advantages.append(float(advantage))


def grpo(run, folder, client, trained):
    """`GRPOTrainer`; watched are the tensors of each batch that it computes a loss of."""
    rows = [{"prompt": messages(task), "n": n} for n, task in enumerate(tasks(4))]
    lookup = TaskLookup(rows, lambda row: tasks(4)[row["n"]])

    class Watched(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            for prompt, prompt_mask, completion, mask, tool_mask, logprobs, advantage in zip(
                *(inputs[name].numpy() for name in ("prompt_ids", "prompt_mask", "completion_ids")),
                *(inputs[name].numpy() for name in ("completion_mask", "tool_mask", "sampling_per_token_logps")),
                inputs["advantages"],
                strict=True,
            ):
                prompt, length = prompt[prompt_mask.astype(bool)], mask.sum()
                nothing = np.zeros(len(prompt))
                trained.add(
                    np.concatenate([prompt, completion[:length]]),
                    np.concatenate([nothing, tool_mask[:length]]),
                    np.concatenate([nothing, logprobs[:length]]),
                    advantage,
                )
            return super()._compute_loss(model, inputs)

    args = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_steps=run["steps"],
        learning_rate=1e-3,
        **ON_CPU,
    )
    return Watched(
        model=run["model"],
        args=args,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=node_reward,
        rollout_func=RolloutFunction(client, lookup),
    )


def async_arguments(run, folder, **others):
    settings = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "token_budget": 0,
        "max_steps": run.get("steps", 1),
        "learning_rate": 1e-3,
        "max_staleness": 2,
    }
    return AsyncGRPOConfig(**{**settings, **ON_CPU, **others})


def async_grpo(run, folder, client, trained):
    """`AsyncGRPOTrainer`; watched is what its collator gets, and what that makes of it."""
    collate = DataCollatorForRollout.torch_call

    def watch(collator, examples):
        batch = collate(collator, examples)
        (rows,) = examples
        samples = [sample for row in rows for sample in row.samples]
        for sample in samples:
            trained.add(sample["input_ids"], sample["completion_mask"], sample["old_log_probs"], sample["advantage"])
        terms = np.concatenate([sample["old_log_probs"][sample["completion_mask"] == 1] for sample in samples])
        assert np.array_equal(terms, batch["old_log_probs"][batch["token_index"] >= 0].numpy())
        return batch

    DataCollatorForRollout.torch_call = watch
    tokenizer = AutoTokenizer.from_pretrained(run["model"])
    args = async_arguments(run, folder)
    return AsyncGRPOTrainer(
        model=run["model"],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": messages(task)} for task in tasks(12)]),
        processing_class=tokenizer,
        rollout_worker=RolloutWorker(client, tasks(12), args, tokenizer=tokenizer),
        weight_transfer=WeightTransfer(client),
    )


def refusals(run, folder, client):
    """Return how each wrong set-up is answered."""
    tokenizer = AutoTokenizer.from_pretrained(run["model"])
    larger, endless = (AutoTokenizer.from_pretrained(run["model"]) for _ in range(2))
    larger.add_tokens(["<one more>"])
    endless.eos_token = "<|im_start|>"
    args = async_arguments(run, folder)
    hot = JobTemplate(sampling=SamplingParams(temperature=0.7))
    nucleus = JobTemplate(sampling=SamplingParams(top_p=0.9))

    def worker(args=args, tokenizer=tokenizer, **options):
        return lambda: RolloutWorker(client, tasks(4), args, tokenizer=tokenizer, **options)

    def transfer(rows):
        moving = WeightTransfer(client)
        moving.init_weight_transfer()
        moving.pause()
        try:
            moving.send_weights(iter([("model.embed_tokens.weight", np.zeros((rows, 32), np.float32))]))
        finally:
            moving.destroy()

    return {
        "larger": said(worker(tokenizer=larger)),
        "other": said(worker(tokenizer=AutoTokenizer.from_pretrained(run["other"]))),
        "endless": said(worker(tokenizer=endless)),
        "temperature": said(worker(async_arguments(run, folder, temperature=0.7))),
        "top_p": said(worker(async_arguments(run, folder, top_p=0.9))),
        "job_temperature": said(worker(job=hot)),
        "job_top_p": said(lambda: RolloutFunction(client, lambda _: tasks(1)[0], job=nucleus)),
        "alone": said(worker(async_arguments(run, folder, num_generations=1))),
        "uneven": said(worker(async_arguments(run, folder, num_generations=3))),
        "budget": said(worker(async_arguments(run, folder, token_budget=4096))),
        "on_policy": said(worker(async_arguments(run, folder, max_staleness=0))),
        "segments": said(worker(async_arguments(run, folder, max_staleness=3), rows_per_rollout=2)),
        "vocabulary": said(lambda: transfer(300)),
        "missing": said(lambda: transfer(259)),
    }


def said(make):
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder):
    run = json.loads((folder / "run.json").read_text())
    make_weights(run["model"])
    trl_on_cpu.install()
    with BlockingClient(run["url"], run["token"]) as client:
        if run["trainer"] == "refusals":
            (folder / "log.json").write_text(json.dumps(refusals(run, folder, client)))
            return
        trained = Trained()
        trainer = {"grpo": grpo, "async": async_grpo}[run["trainer"]](run, folder, client, trained)
        trainer.train()
        np.savez(folder / "rows.npz", advantages=trained.advantages, **trained.arrays)
        log = {"history": trainer.state.log_history, "steps": trainer.state.global_step}
        (folder / "log.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
