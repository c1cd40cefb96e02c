"""The lines of docs/trainers/*.md, as printed there, against stand-ins with the trainers' own fields and checks.

What the pages say was run with real packages was run by hand: their dependencies take gigabytes.
"""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from prorl_trio.integrations import rollouts
from prorl_trio.types.models import JobSpec, Outcome, PolicySpan, Segment, TaskInstance, Timing, Trajectory

PAGES = Path(__file__).parents[2] / "docs" / "trainers"
MAX_WORDS, MAX_LINES = 250, 30
NAMES = ["areal", "miles", "nemo-rl", "openrlhf", "prime-rl", "slime"]


def code_of(name):
    return "\n".join(re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), re.DOTALL))


def segment(first, parent=None):
    """Two tokens of a prompt, two sampled, one of a tool, one sampled."""
    mask = [0, 0, 1, 1, 0, 1]
    spans = [PolicySpan(start=start, end=end, policy_version="7", engine="e") for start, end in ((2, 4), (5, 6))]
    reason = None if parent is None else "compaction"
    return Segment.from_arrays(
        range(first, first + 6), [-0.5 * bit for bit in mask], mask, spans, parent=parent, reason=reason
    )


def outcome(reward, job_id="j", count=1):
    segments = [segment(10 * (number + 1), None if not number else 0) for number in range(count)]
    return Outcome(
        job_id=job_id,
        instance_id="i",
        group_id="g",
        status="completed" if reward is not None else "failed",
        reward=reward,
        cause=None if reward is not None else "sandbox",
        error="" if reward is not None else "it broke",
        trajectory=Trajectory(segments=segments, turns=[], stop_reason="finished"),
        details={},
        timing=Timing(),
    )


class Group(SimpleNamespace):
    @property
    def rewards(self):
        return np.array([each.reward for each in self.outcomes], np.float32)


TAKEN = SimpleNamespace(groups=[Group(number=3, outcomes=[outcome(1.0, count=2), outcome(0.0)])])


class Sample(SimpleNamespace):
    class Status(Enum):
        COMPLETED = "completed"


class Tensor(np.ndarray):
    """As much of torch's as the pages use."""

    def int(self):
        return self.astype(np.int32)

    def long(self):
        return self.astype(np.int64)


def tensor(values):
    return np.asarray(values).view(Tensor)


TORCH = {
    "tensor": tensor,
    "full": lambda shape, value, dtype: np.full(shape, value, dtype).view(Tensor),
    "ones": lambda *shape, dtype: np.ones(shape, dtype).view(Tensor),
    "zeros": lambda shape, dtype: np.zeros(shape, dtype).view(Tensor),
    "int32": np.int32,
    "bool": np.bool_,
}


@contextmanager
def modules(monkeypatch, **contents):
    """Stand-ins for modules, by their names with `__` for dots."""
    for name, content in contents.items():
        whole = name.replace("__", ".")
        parts = whole.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[whole]).update(content)
        for end in range(1, len(parts)):
            setattr(sys.modules[".".join(parts[:end])], parts[end], sys.modules[".".join(parts[: end + 1])])
    yield


def lines_of(name):
    """The names that the page's lines define."""
    names = {"__name__": name}
    exec(compile(code_of(name), f"{name}.md", "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_short(name):
    text = (PAGES / f"{name}.md").read_text()
    code = [line for line in code_of(name).splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(text.split()) <= MAX_WORDS
    assert len(code) <= MAX_LINES
    assert "**What was run.**" in text


def test_there_is_a_page_for_each():
    assert sorted(path.stem for path in PAGES.glob("*.md")) == NAMES


class Answers:
    """In place of a session on a node: one outcome for each job."""

    def __init__(self, found):
        self.found, self.specs = found, []

    async def run(self, spec):
        self.specs.append(spec)
        return self.found


def test_areal(monkeypatch, tmp_path):
    workflow = {"RolloutWorkflow": object}
    with modules(monkeypatch, areal__api__workflow_api=workflow, torch=TORCH):
        page = lines_of("areal")
        node = page.NodeWorkflow(str(tmp_path / "endpoint.json"))
        data = {"question": "6 * 7?", "answer": "42"}
        for reward in (1.0, None):
            answers = Answers(outcome(reward, count=2))
            monkeypatch.setitem(
                rollouts._open, (__import__("os").getpid(), node.node), SimpleNamespace(over=False, run=answers.run)
            )
            found = asyncio.run(node.arun_episode(None, data))
            assert answers.specs[0].instance.payload == data
            if reward is None:
                assert found is None
                continue
            assert found["input_ids"].tolist() == [list(range(20, 26))], "the last own segment"
            assert found["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 1]]
            assert found["versions"].tolist() == [[-1, -1, 7, 7, -1, 7]]
            assert found["logprobs"].tolist() == [[0.0, 0.0, -0.5, -0.5, 0.0, -0.5]]
            assert {value.shape for name, value in found.items() if name != "rewards"} == {(1, 6)}
            assert found["rewards"].tolist() == [1.0]


def test_openrlhf(monkeypatch):
    monkeypatch.setenv("PRORL_URL", "ws://127.0.0.1:1")
    with modules(monkeypatch, openrlhf__utils__agent={"AgentExecutorBase": object}):
        executor = lines_of("openrlhf").AgentExecutor()
        params = SimpleNamespace(temperature=0.5, logprobs=1)
        for reward in (1.0, None):
            answers = Answers(outcome(reward, count=2))
            monkeypatch.setattr(sys.modules["prorl_trio.integrations.rollouts"], "rollouts_on", lambda _, a=answers: a)
            executor = lines_of("openrlhf").AgentExecutor()
            run = executor.execute("6 * 7?", "42", params, 512, None, None)
            if reward is None:
                with pytest.raises(RuntimeError, match="no reward after 3 attempts: sandbox: it broke"):
                    asyncio.run(run)
                continue
            found = asyncio.run(run)
            assert (answers.specs[0].sampling.temperature, answers.specs[0].max_trajectory_tokens) == (0.5, 512)
            assert found["observation_tokens"] == list(range(20, 26))
            assert found["action_ranges"] == [(2, 4), (5, 6)]
            assert len(found["rollout_log_probs"]) == len(found["observation_tokens"])


class Client:
    """In place of a node's client: it answers all jobs, in another order."""

    def __init__(self, found=()):
        self.found, self.versions = list(found), []

    def resume(self, version):
        self.versions.append(version)

    def submit(self, specs):
        self.found = [outcome(each.reward, spec.job_id) for spec, each in zip(specs, self.found, strict=True)]

    def results(self, count):
        assert count == len(self.found)
        return reversed(self.found)


def test_nemo_rl_leaves_the_mean_of_a_group_as_it_is_without_a_failure(monkeypatch):
    grpo = {}
    with modules(monkeypatch, nemo_rl__algorithms__grpo=grpo, torch=TORCH):
        page = lines_of("nemo-rl")
        rewards = [1.0, None, 0.0, None]

        def spec_of(batch, number):
            task = TaskInstance(instance_id="i", handler="math", payload={})
            return JobSpec(job_id=f"j{number}", group_id="a" if number < 3 else "b", instance=task)

        page.use_node(Client(map(outcome, rewards)), spec_of)
        count = len(rewards)
        batch = {"message_log": [[]] * count, "length": [9] * count, "loss_multiplier": [1.0] * count}
        found, _ = sys.modules["nemo_rl.algorithms.grpo"].run_async_multi_turn_rollout(
            policy_generation=None, input_batch=batch, tokenizer=None, task_to_env={}, max_seq_len=9
        )
    assert found["total_reward"].tolist() == [1.0, 0.5, 0.0, 0.0]
    assert found["loss_multiplier"] == [1.0, 0.0, 1.0, 0.0]
    assert found["length"][0] == 2
    log = found["message_log"][0]
    assert [message["token_ids"].tolist() for message in log] == [[10, 11], [12, 13], [14], [15]]
    assert [message["role"] for message in log] == ["user", "assistant", "user", "assistant"]
    assert [message["generation_logprobs"].tolist() for message in log[1::2]] == [[-0.5, -0.5], [-0.5]]


class TrainingSample(SimpleNamespace):
    """It has the fields that prime-rl requires, each of one length."""

    def __init__(self, token_ids, mask, logprobs, temperatures, env_name, advantages):
        assert len({len(each) for each in (token_ids, mask, logprobs, temperatures, advantages)}) == 1
        super().__init__(token_ids=token_ids, mask=mask, advantages=advantages)


def test_prime_rl(monkeypatch, tmp_path):
    sent, loaded = [], []

    class Sender:
        def __init__(self, output_dir, data_world_size, current_step):
            self.step = current_step

        async def send(self, grid):
            sent.append((self.step, grid))

    class Update:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def load_folder(self, folder, base):
            loaded.append((folder, base))

    batch = {"prepare_batch": lambda samples, *_: samples, "build_bin_cost": lambda _: None}
    transport = {"FileSystemMicroBatchSender": Sender, "TrainingSample": TrainingSample}
    with modules(monkeypatch, prime_rl__transports__rollouts=transport):
        monkeypatch.setitem(sys.modules, "prime_rl.trainer", ModuleType("prime_rl.trainer"))
        monkeypatch.setitem(sys.modules, "prime_rl.trainer.batch", ModuleType("prime_rl.trainer.batch"))
        vars(sys.modules["prime_rl.trainer.batch"]).update(batch)
        page = lines_of("prime-rl")
        page.send(TAKEN, 5, tmp_path)
        (tmp_path / "broadcasts" / "step_5").mkdir(parents=True)
        (tmp_path / "broadcasts" / "step_5" / "STABLE").touch()
        monkeypatch.setenv("MODEL", "/model")
        page.load(SimpleNamespace(policy_update=lambda version: Update()), 5, tmp_path)
    [(step, samples)] = sent
    assert (step, [each.token_ids[0] for each in samples]) == (5, [10, 20, 10])
    assert [each.advantages for each in samples] == [[0, 0, half, half, 0, half] for half in (0.5, 0.5, -0.5)]
    assert samples[0].mask == [False, False, True, True, False, True]
    assert loaded == [(tmp_path / "broadcasts" / "step_5", "/model")]


def test_slime_and_miles(monkeypatch):
    monkeypatch.setenv("PRORL_URL", "ws://127.0.0.1:1")
    monkeypatch.setenv("PRORL_TOKEN", "t")
    types = {"Sample": Sample}
    output = {"RolloutFnTrainOutput": SimpleNamespace}
    client = Client()
    groups = SimpleNamespace(
        version="0", take=lambda: TAKEN, advance=lambda version: vars(groups).update(version=version)
    )
    with modules(
        monkeypatch,
        slime__utils__types=types,
        miles__rollout__base_types=output,
        my_tasks={"TASKS": []},
    ):
        for name, content in (("slime.rollout", {}), ("slime.rollout.base_types", output)):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
            vars(sys.modules[name]).update(content)
        page = lines_of("slime")
        page.opened.update(client=client, groups=groups)
        found = page.generate_rollout(SimpleNamespace(n_samples_per_prompt=2, rollout_batch_size=1), 4, None)
        flat = lines_of("miles").numbered(found)
    assert (client.versions, groups.version) == (["4"], "4")
    [[first, second]] = found.samples
    assert [sample.rollout_id for sample in first + second] == [6, 6, 7], "segments of one rollout share it"
    assert [sample.reward for sample in first + second] == [1.0, 1.0, -1.0]
    assert first[0].metadata == {"raw_reward": 1.0}
    for sample in first + second:
        assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs) == 4
        assert (sample.loss_mask, len(sample.tokens), sample.weight_versions) == ([1, 1, 0, 1], 6, ["7", "7"])
    assert [[sample.group_index for sample in rows] for rows in flat.samples] == [[0, 0, 0]]
