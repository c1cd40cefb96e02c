"""The programs of `docs/train-with-trl.md`, as it prints them, on a node that is killed meanwhile.

The real trainers make real steps, of a small model, on rows that are equal bit for bit to what the engine sampled. Two
shims let them do it without a GPU: `support.trl_on_cpu`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from prorl_launch.paths import checkout_dir, import_path, trainer_python
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from support.killable import TOKEN, Killable
from support.skips import because
from support.talk_node import ANSWER, LOST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

MIB = 1024 * 1024
AGENTS = (Path(__file__).parents[2] / "docs/agents.md").read_text()
CALL = '<tool_call>\n{"name": "ipython", "arguments": {"code": "%s * 7"}}\n</tool_call>'
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_000,
    "eos_token_id": 258,
    "bos_token_id": 257,
    "pad_token_id": 256,
}


class Policy:
    """A made-up policy: it calls a tool, and then is right half of the time. Remembers each completion.

    Args:
        goes_on: what is in a prompt that has the first turn.
        first: that turn, with a number in it.

    Attributes:
        rollouts: the tokens of each rollout that has ended, with a mask and log-probabilities as the engine said them.
    """

    def __init__(self, tiny, goes_on="<tool_response>", first=CALL):
        self._tiny = tiny
        self._goes_on = goes_on
        self._turn = first
        self._random = random.Random(3)
        self._first = {}
        self.rollouts = []
        self.answered = trio.Event()

    def __call__(self, prompt):
        text = self._tiny.decode(prompt)
        number = re.findall(r"(\d+) \* 7\?", text)[-1] if "* 7?" in text else "0"
        if self._goes_on not in text:
            ids, logprobs = self._say(self._turn % f"{self._random.randrange(10**9)} * 0 + {number}")
            self._first[tuple(prompt + ids)] = (len(prompt), logprobs)
            return ids, logprobs, "stop"
        ids, logprobs = self._say(rf"\boxed{{{int(number) * 7 + self._random.randrange(2)}}}")
        opening = next(known for known in self._first if tuple(prompt[: len(known)]) == known)
        start, first_logprobs = self._first[opening]
        token_ids = np.array([*prompt, *ids])
        mask, recorded = np.zeros(len(token_ids), int), np.zeros(len(token_ids), np.float32)
        for place, said in ((start, first_logprobs), (len(prompt), logprobs)):
            mask[place : place + len(said)] = 1
            recorded[place : place + len(said)] = said
        self.rollouts.append((token_ids, mask, recorded))
        if len(self.rollouts) == 3:
            self.answered.set()
        return ids, logprobs, "stop"

    def _say(self, text):
        ids = self._tiny.turn(text)
        return ids, [-self._random.random() for _ in ids]


class TalkPolicy:
    """A made-up policy of the node of talks: it thinks, and then is right, wrong, lost, and right again, in turn.

    Attributes:
        completions: what was sampled, with what came before it.
    """

    def __init__(self, tiny):
        self._tiny = tiny
        self._random = random.Random(3)
        self._ends = itertools.cycle(["right", "wrong", LOST, "right"])
        self.completions = set()

    def __call__(self, prompt):
        text = self._tiny.decode(prompt)
        text = self._answer(text) if "Go on" in text or "In short" in text else f"Hm, {self._random.randrange(10**9)}."
        ids = self._tiny.turn(text)
        logprobs = [-self._random.random() for _ in ids]
        self.completions.add(key((np.array(prompt), np.array(ids), np.array(logprobs))))
        return ids, logprobs, "stop"

    def _answer(self, text):
        end = next(self._ends)
        product = 7 * int(re.findall(r"(\d+) \* 7\?", text)[-1])
        return ANSWER + {"right": str(product), "wrong": str(product + 1)}.get(end, end)

    def has_sampled(self, row):
        """Tell if all that a row is trained on was sampled, after what is before it there."""
        ids, mask, logprobs = row
        bounds = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
        return all(key((ids[:a], ids[a:b], logprobs[a:b])) in self.completions for a, b in bounds.tolist())


class Rig:
    """A node, its engine, and the programs of a trainer, in a folder."""

    def __init__(self, folder, node, policy, engine, tiny):
        self._folder, self.node, self.policy, self.engine, self._tiny = folder, node, policy, engine, tiny
        self._url = ""

    async def serve(self):
        self._url = await self.node.start()

    async def train(self, trainer, changes=(), **run):
        """Run the program; return what it wrote to `log.json`."""
        run |= {
            "trainer": trainer,
            "changes": dict(changes),
            "model": str(self._folder / "model"),
            "url": self._url,
            "token": TOKEN,
        }
        (self._folder / "run.json").write_text(json.dumps(run))
        paths = os.pathsep.join([import_path(), str(checkout_dir() / "tests")])
        done = await trio.run_process(
            [str(trainer_python("train", "cpu")), Path(__file__).with_name("trl_program.py"), self._folder],
            cwd=self._folder,
            env={
                **os.environ,
                "PYTHONPATH": paths,
                "PRORL_URL": self._url,
                "PRORL_TOKEN": TOKEN,
                "OMP_NUM_THREADS": "1",
                "TRL_EXPERIMENTAL_SILENCE": "1",
            },
            check=False,
            capture_stdout=True,
            capture_stderr=True,
        )
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        found = self._folder / "log.json"
        return json.loads(found.read_text()) if found.exists() else None

    def rows(self):
        """The rows that were trained on: token ids, mask, log-probabilities; and their advantages."""
        with np.load(self._folder / "rows.npz") as saved:
            advantages = saved["advantages"]
            names = ("ids", "mask", "logprobs")
            return [tuple(saved[f"{name}-{n}"] for name in names) for n in range(len(advantages))], advantages

    def decode(self, ids):
        return self._tiny.decode(ids.tolist())

    def is_right(self, text):
        """Tell if a row of a talk ends with the answer to its question."""
        number, said = re.findall(r"(\d+) \* 7\?", text), re.findall(rf"{ANSWER}(\d+)", text)
        return bool(said) and int(said[-1]) == 7 * int(number[-1])

    async def kill_in_the_middle(self):
        await self.policy.answered.wait()
        await self.node.kill()
        await self.node.start()


@asynccontextmanager
async def open_rig(folder, make_policy=Policy, module=("prorl_trio.cli", "serve", "--config")):
    if not trainer_python("train", "cpu").exists():
        pytest.skip(because("the trainers' environment is not set up", "make trainers"))
    tiny = make_tiny_model(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    policy = make_policy(tiny)
    engine_config = FakeEngineConfig(
        model=str(folder / "model"),
        vocab_size=259,
        end_of_turn_id=tiny.end_of_turn_id,
        max_model_len=8000,
        first_token_s=0.05,
        development=True,
    )
    async with (
        open_fake_engine(script=policy, config=engine_config) as engine,
        trio.open_nursery() as nursery,
    ):
        config = {
            "model": {"path": str(folder / "model")},
            "listen": {
                "port": 0,
                "endpoint_file": str(folder / "endpoint.json"),
                "token": TOKEN,
                "unix_socket": "",
            },
            "ledger": {"dir": str(folder / "ledger"), "log_bytes": MIB, "reserve_bytes": MIB, "max_bytes": 64 * MIB},
            "backends": {"urls": [engine.url], "required": True},
            "sandbox": {"provider": "process"},
            "arena": {"enabled": False},
        }
        with (folder / "node.log").open("ab") as log:
            try:
                rig = Rig(folder, Killable(folder, config, nursery, log, module), policy, engine, tiny)
                await rig.serve()
                yield rig
            finally:
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_talk(folder):
    """Open a rig whose node has no sandboxes: its tasks say what befalls their rollouts (`support.talk_node`)."""
    async with open_rig(folder, TalkPolicy, ("support.talk_node",)) as rig:
        yield rig


def key(row):
    ids, mask, logprobs = row
    return ids.astype(np.int64).tobytes(), mask.astype(np.int64).tobytes(), logprobs.astype(np.float32).tobytes()


@pytest.mark.parametrize("trainer", ["grpo", "async"])
async def test_steps_on_exactly_what_was_sampled_over_a_kill_of_the_node(tmp_path, trainer):
    async with open_rig(tmp_path) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(rig.kill_in_the_middle)
        log = await rig.train(trainer, steps=3)
        assert log["steps"] == 3
        rows, advantages = rig.rows()
        sampled = {key(row) for row in rig.policy.rollouts}
        used = [key(row) for row in rows]
        assert set(used) <= sampled
        assert len(set(used)) == len(used), "a rollout was trained on twice"
        assert len(used) >= 24
        for _, mask, logprobs in rows:
            assert 0 < mask.sum() < len(mask)
            assert not logprobs[mask == 0].any()
        assert np.allclose(advantages[:24].reshape(3, 8).sum(axis=1), 0, atol=1e-5), "groups are whole in each step"
        assert not any("sample/dropped_stale_total" in entry for entry in log["history"])
        # every step's weights went to the engine, before the rollouts that were sampled by them
        assert int(rig.engine.weight_version) >= 3


async def test_turns_of_a_program_are_trained_on_as_they_were_sampled(tmp_path):
    """The lines of docs/agents.md, with the program that it prints."""
    program, _, lines = re.findall(r"```python\n(.*?)```", AGENTS.partition("## Train through it")[2], re.DOTALL)[:3]
    (tmp_path / "agent.py").write_text(program)
    job, worker = re.fullmatch(r"(job = .*)\nworker = (.*)\n", lines).groups()
    changes = {
        "import BlockingClient, JobTemplate": "import AgentProgram, BlockingClient, JobTemplate",
        "with BlockingClient(os.environ": f"os.environ['AGENT'] = {str(tmp_path / 'agent.py')!r}\n{job}\n"
        "with BlockingClient(os.environ",
        "RolloutWorker(client, tasks, args, tokenizer=tokenizer, job=job)": worker,
    }
    async with open_rig(tmp_path, partial(Policy, goes_on="Check each step", first="Hm, %s.")) as rig:
        log = await rig.train("async", steps=1, changes=changes)
        assert log["steps"] == 1
        rows, advantages = rig.rows()
        used = [key(row) for row in rows]
        assert set(used) <= {key(row) for row in rig.policy.rollouts}
        assert len(set(used)) == len(used) >= 8
        assert np.allclose(advantages[:8].sum(), 0, atol=1e-5)


async def test_rollouts_without_a_reward_are_left_out_of_their_groups_baseline(tmp_path):
    """Lose every fourth after its last token; of each third task, no rollout has a token either."""
    async with open_talk(tmp_path) as rig:
        changes = {
            'handler="math"': 'handler="talk"',
            '"answer": row["answer"]}': '"answer": row["answer"], "silent": int(row["answer"]) % 3 == 0}',
            "TaskLookup(dataset, instance_of)": "TaskLookup(dataset, instance_of), max_tries=1",
        }
        log = await rig.train("grpo", steps=4, changes=changes)
        assert log["steps"] == 4
        rows, advantages = rig.rows()
        texts = [rig.decode(ids) for ids, _, _ in rows]
        silent = np.array([ANSWER not in text for text in texts])
        lost = np.array([ANSWER + LOST in text for text in texts])
        right = np.array([rig.is_right(text) for text in texts])
        assert silent.sum() % 4 == 0, "groups of four"
        assert min(silent.sum(), lost.sum(), (right & ~lost).sum()) > 0
        assert [not mask.any() for _, mask, _ in rows] == silent.tolist()
        assert not advantages[silent | lost].any(), "what has no reward teaches nothing"
        groups = {(n // 8, *re.findall(r"\d+ \* 7\?", texts[n])) for n in np.flatnonzero(~silent)}
        for step, question in groups:
            group = [n for n in range(8 * step, 8 * step + 8) if question in texts[n]]
            scored = [n for n in group if not lost[n]]
            rewards = right[scored].astype(float)
            expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            assert len(group) == 4
            assert np.allclose(advantages[scored], expected, atol=1e-4), "others' baseline is of the scored alone"
        assert all(rig.policy.has_sampled(row) for row in rows)
        assert all(np.isfinite(entry["loss"]) for entry in log["history"] if "loss" in entry)


async def test_all_segments_of_a_rollout_are_trained_on_with_its_advantage(tmp_path):
    async with open_talk(tmp_path) as rig:
        changes = {
            'handler="math"': 'handler="talk"',
            '"answer": answer}': '"answer": answer, "compact": True}',
            "tokenizer=tokenizer, job=job)": "tokenizer=tokenizer, job=job, rows_per_rollout=2)",
        }
        log = await rig.train("async", steps=3, changes=changes)
        assert log["steps"] == 3
        rows, advantages = rig.rows()
        assert len({key(row) for row in rows}) == len(rows) >= 24
        assert all(rig.policy.has_sampled(row) for row in rows)
        for step in range(0, 24, 8):
            texts = [rig.decode(ids) for ids, _, _ in rows[step : step + 8]]
            of_step = {"Hm, ": [], ANSWER: []}
            for text, advantage in zip(texts, advantages[step:], strict=False):
                (said,) = (said for said in of_step if said in text)
                assert rig.is_right(text) == (advantage > 0) or said != ANSWER
                assert LOST not in text, "it was sampled again"
                of_step[said].append(round(advantage, 5))
            before, after = map(Counter, of_step.values())
            assert before == after, "the segments of a rollout share its advantage"
            assert before.total() == 4
            assert len(before) == 2, "a group without information was trained on"
        assert not any("sample/dropped_stale_total" in entry for entry in log["history"])


async def test_what_cannot_be_trained_with_is_refused_before_a_rollout(tmp_path):
    other = make_tiny_model(tmp_path / "other")
    assert other.end_of_turn_id == 258
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    async with open_rig(tmp_path) as rig:
        said = await rig.train("refusals", other=str(tmp_path / "other"))
        assert rig.engine.weight_version in ("", "0")
        assert not rig.policy.rollouts
    for name, expected in {
        "larger": r"ConfigError: .*knows ids below 260, the node's ids below 259",
        "other": r"ConfigError: .*have 259 ids each and give them to different tokens",
        "endless": r"ConfigError: .*ends a sequence with id 257 .* the node's turns end with \[.*258",
        "temperature": r"LogprobsRefused: AsyncGRPOConfig.temperature is 0.7",
        "top_p": r"LogprobsRefused: AsyncGRPOConfig.top_p is 0.9",
        "job_temperature": r"LogprobsRefused: .*have temperature 0.7",
        "job_top_p": r"LogprobsRefused: .*have top_p 0.9",
        "alone": r"ConfigError: .*size must be >= 2, got 1",
        "budget": r"ConfigError: token_budget is 4096",
        "on_policy": r"ConfigError: max_staleness is 0, and must be at least 1",
        "segments": r"ConfigError: max_staleness is 1, and must be at least 2",
        "config": r"ConfigError: the trainer's model has num_attention_heads 2 .* the node's 4",
        "vocabulary": r"ConfigError: the trainer's model has a vocabulary of 300, the node's of 259",
        "missing": r"WeightsRefused: ",
    }.items():
        assert re.match(expected, said[name]), (name, said[name])
