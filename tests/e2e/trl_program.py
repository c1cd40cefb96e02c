"""Training runs of TRL's, in the trainers' environment: what `test_trl` starts, with a folder of its own.

`run.json` there says which. The trainers are the programs of the guide, as it prints them. `rows.npz` gets the rows as
they reach TRL's own loss, and `log.json` the trainer's log.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

from prorl_trio import BlockingClient, SamplingParams, TaskInstance
from prorl_trio.integrations.trl import RolloutFunction, RolloutWorker, WeightTransfer
from prorl_trio.sampling import JobTemplate
from support import trl_on_cpu

GUIDE = Path(__file__).parents[2] / "docs" / "train-with-trl.md"
PROGRAMS = {"async": 0, "grpo": 1}
"""The place of each program in the guide."""


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


def watch_grpo(trained):
    """Keep the tensors of each batch that `GRPOTrainer` computes a loss of."""
    compute = GRPOTrainer._compute_loss

    def watch(trainer, model, inputs):
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
        return compute(trainer, model, inputs)

    GRPOTrainer._compute_loss = watch


def watch_async(trained):
    """Keep what the collator of `AsyncGRPOTrainer` is given, and look at what it makes of it."""
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


def train(run, folder):
    """Run a program of the guide with another model, fewer steps, what `run` changes, and without a GPU."""
    trained = Trained()
    {"grpo": watch_grpo, "async": watch_async}[run["trainer"]](trained)
    program = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[PROGRAMS[run["trainer"]]]
    changes = {
        "/models/Qwen3-0.6B": run["model"],
        "max_steps=200": f"max_steps={run['steps']}",
        'report_to="none"': 'report_to="none", use_cpu=True',
        **run["changes"],
    }
    for said, meant in changes.items():
        assert program.count(said) == 1
        program = program.replace(said, meant)
    names = {}
    exec(compile(program, str(GUIDE), "exec"), names)
    trainer = names["trainer"]
    np.savez(folder / "rows.npz", advantages=trained.advantages, **trained.arrays)
    return {"history": trainer.state.log_history, "steps": trainer.state.global_step}


def refusals(run, folder):
    """Return how each wrong set-up is answered."""
    tokenizer, larger, endless = (AutoTokenizer.from_pretrained(run["model"]) for _ in range(3))
    larger.add_tokens(["<one more>"])
    endless.eos_token = "<|im_start|>"
    tasks = [TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})]
    hot = JobTemplate(sampling=SamplingParams(temperature=0.7))
    nucleus = JobTemplate(sampling=SamplingParams(top_p=0.9))
    heads = AutoConfig.from_pretrained(run["model"], num_attention_heads=2)

    def worker(tokenizer=tokenizer, job=None, rows_per_rollout=1, **settings):
        rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
        steps = {"output_dir": str(folder / "out"), "token_budget": 0, "max_staleness": 2, "report_to": "none"}
        args = AsyncGRPOConfig(**{**rows, **steps, "bf16": False, **settings})
        options = {"job": job or JobTemplate(), "rows_per_rollout": rows_per_rollout}
        return said(lambda: RolloutWorker(client, tasks, args, tokenizer=tokenizer, **options))

    def transfer(rows):
        moving = WeightTransfer(client)
        moving.init_weight_transfer()
        moving.pause()
        try:
            moving.send_weights(iter([("model.embed_tokens.weight", np.zeros((rows, 32), np.float32))]))
        finally:
            moving.destroy()

    with BlockingClient(run["url"], run["token"]) as client:
        return {
            "larger": worker(larger),
            "other": worker(AutoTokenizer.from_pretrained(run["other"])),
            "endless": worker(endless),
            "temperature": worker(temperature=0.7),
            "top_p": worker(top_p=0.9),
            "job_temperature": worker(job=hot),
            "job_top_p": said(lambda: RolloutFunction(client, lambda _: tasks[0], job=nucleus)),
            "alone": worker(num_generations=1),
            "budget": worker(token_budget=4096),
            "on_policy": worker(max_staleness=0),
            "segments": worker(max_staleness=1, rows_per_rollout=2),
            "config": said(WeightTransfer(client, config=heads).init_weight_transfer),
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
    set_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(run["model"])).save_pretrained(run["model"])
    trl_on_cpu.install()
    found = (refusals if run["trainer"] == "refusals" else train)(run, folder)
    (folder / "log.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
