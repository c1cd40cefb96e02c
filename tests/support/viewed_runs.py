"""Recorded runs for the viewer: dialogues with tools and sub-agents, failures, a learning curve, hostile words."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from tokenizers import Tokenizer

from prorl_trio.runs.recording import RUN_INFO, TRAJECTORIES, OutcomeFile, RunInfo, write_json
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import (
    AttemptRecord,
    ChatMessage,
    Outcome,
    PolicySpan,
    Segment,
    Timing,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HOSTILE: Final = (
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"> "
    "\x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07link\x1b]8;;\x07 \u202egnp.exe\u202c \u2066x\u2069 \x00 \u200b"
    "</script><!-- ]]> javascript:alert(1) \r\n&lt;b&gt;"
)
SYSTEM: Final = "You solve tasks in a sandbox. Think, call tools, and finish with the answer."
PROBLEMS: Final = ("What is 17 * 23?", "Sort the lines of data.txt by length.", "Why does test_parse fail?")


class Writer:
    """Writes dialogues in a tiny model's tokens, as ChatML."""

    def __init__(self, model: Path, seed: int = 0) -> None:
        make_tiny_model(model)
        self.model = model
        self.rng = random.Random(seed)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def dialogue(
        self,
        opening: Sequence[ChatMessage],
        turns: Sequence[tuple[str, str | None]],
        *,
        index: int = 0,
        versions: Sequence[str] = ("7",),
        **facts: Any,
    ) -> tuple[Segment, list[Turn]]:
        """A segment and its turns; each is what the policy said, and what its tool answered, if it called one."""
        ids = self.ids("".join(f"<|im_start|>{each.role}\n{each.content}<|im_end|>\n" for each in opening))
        mask, made, spans = [0] * len(ids), list[Turn](), list[PolicySpan]()
        for number, (said, answered) in enumerate(turns):
            opener = self.ids("<|im_start|>assistant\n")
            sampled = self.ids(f"{said}<|im_end|>")
            start = len(ids) + len(opener)
            ids += opener + sampled
            mask += [0] * len(opener) + [1] * len(sampled)
            version = versions[number * len(versions) // len(turns)]
            spans.append(PolicySpan(start=start, end=len(ids), policy_version=version, engine="vllm 0.32.0"))
            calls, results, observations = list[ToolCall](), list[ToolResult](), list[str]()
            if answered is not None:
                calls = [ToolCall(name="bash", arguments={"command": said[-200:]}, raw=said)]
                bad = "error" in answered
                results = [ToolResult(outcome="error" if bad else "ok", exit_code=int(bad))]
                observations = [answered]
                told = self.ids(f"\n<|im_start|>tool\n{answered}<|im_end|>\n")
                ids, mask = ids + told, mask + [0] * len(told)
            made.append(
                Turn(
                    segment=index,
                    completion_start=start,
                    completion_end=start + len(sampled),
                    text=said,
                    finish_reason="stop",
                    tool_calls=calls,
                    observations=observations,
                    inference_s=0.4 + self.rng.random(),
                    tools_s=0.1 if answered is None else self.rng.random(),
                    messages=list(opening) if number == 0 else [],
                    tool_results=results,
                )
            )
        logprobs = [-(self.rng.expovariate(2.0)) if each else 0.0 for each in mask]
        segment = Segment.from_arrays(ids, logprobs, mask, spans)
        return msgspec.structs.replace(segment, **facts), made

    def outcome(
        self, name: str, group: str, reward: float | None, trajectory: Trajectory | None, **facts: Any
    ) -> Outcome:
        """An outcome; without a reward it has failed."""
        ended: dict[str, Any] = {"status": "completed", "cause": None, "error": "", "error_code": None}
        if reward is None:
            ended = {
                "status": "failed",
                "cause": "sandbox",
                "error": "the sandbox was lost",
                "error_code": "sandbox_lost",
            }
        return Outcome(
            **{
                "job_id": name,
                "instance_id": f"task of {group}",
                "group_id": group,
                **ended,
                "reward": reward,
                "trajectory": trajectory,
                "details": {"answer": "391", "checks": [{"name": "equal", "passed": bool(reward)}]},
                "timing": Timing(
                    queued_init_s=0.4,
                    init_s=0.6,
                    queued_run_s=1.1,
                    run_s=4 + 3 * self.rng.random(),
                    queued_eval_s=0.1,
                    eval_s=0.7,
                ),
                "evaluation_log": f"graded {name}: {'right' if reward else 'wrong'}\n",
                **facts,
            }
        )

    def rollout(self, name: str, group: str, reward: float | None, *, problem: str = PROBLEMS[0]) -> Outcome:
        """A rollout of three turns with two calls of tools, and one that asked a sub-agent."""
        opening = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=problem)]
        answer = "391" if reward else "381"
        said = [
            (f"Let me look first.\npython3 -c 'print({self.rng.randrange(10, 99)} * 23)'", "391\n" * 12),
            ("Is that right? I ask somebody who checks.", "error: no such file: data.txt"),
            (f"The answer is {answer}.", None),
        ]
        own, turns = self.dialogue(opening, said, versions=("7", "8"))
        asked, others = self.dialogue(
            [ChatMessage(role="user", content="Check 17 * 23.")], [("10 * 23 + 7 * 23 = 391.", None)],
            index=1, parent=0, reason="sub_agent", agent="checker", agent_type="explore",
        )  # fmt: skip
        turns[1] = msgspec.structs.replace(turns[1], dropped_tokens=3)
        trajectory = Trajectory(
            segments=[own, asked], turns=[*turns, *others], stop_reason="finished", echoes={"exact": 2}
        )
        return self.outcome(name, group, reward, trajectory)

    def hostile(self, name: str = HOSTILE, *, output: str = HOSTILE) -> Outcome:
        """A rollout all of whose words are hostile."""
        opening = [ChatMessage(role=role, content=HOSTILE) for role in ("system", "user")]
        own, turns = self.dialogue(
            opening, [(HOSTILE, HOSTILE), ("The answer.", None)], agent=HOSTILE, agent_type=HOSTILE
        )
        turns[0] = msgspec.structs.replace(turns[0], observations=[output])
        return self.outcome(
            name, HOSTILE, 0.0, Trajectory(segments=[own], turns=turns, stop_reason="max_turns"),
            details={HOSTILE: {1: HOSTILE, (2, b"3"): HOSTILE}}, evaluation_log=HOSTILE, instance_id=HOSTILE,
            tags={HOSTILE: HOSTILE},
        )  # fmt: skip

    def long(self, name: str, tokens: int) -> Outcome:
        """A rollout with one completion of so many tokens."""
        ids = np.resize(np.asarray(self.ids("a long line of thought, and another one\n"), dtype="<i4"), tokens)
        logprobs = -np.random.default_rng(0).exponential(0.5, tokens).astype("<f4")
        spans = [PolicySpan(start=100, end=tokens, policy_version="1", engine="vllm 0.32.0")]
        segment = Segment.from_arrays(ids, logprobs, (np.arange(tokens) >= 100).astype("u1"), spans)
        turn = Turn(
            segment=0, completion_start=100, completion_end=tokens, text="a long line", finish_reason="length",
            tool_calls=[], observations=[], inference_s=9.0, tools_s=0.0,
        )  # fmt: skip
        return self.outcome(name, name, 1.0, Trajectory(segments=[segment], turns=[turn], stop_reason="context_budget"))


def write_run(folder: Path, outcomes: Sequence[Outcome], model: Path | None = None) -> Path:
    """Record a run in `folder`, and return that."""
    folder.mkdir(parents=True, exist_ok=True)
    with OutcomeFile(folder / TRAJECTORIES) as file:
        for outcome in outcomes:
            file.append(outcome)
    write_json(folder / RUN_INFO, RunInfo(model=str(model or ""), tasks="gsm8k", started=folder.name))
    return folder


def write_learning(folder: Path, steps: int = 12) -> Path:
    """Record the curve of a learning run in `folder`, and return that."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    made = [
        {
            "step": step, "reward": 0.2 + 0.05 * step + 0.1 * rng.random(), "reward_sampled": 0.15 + 0.055 * step,
            "informative_share": 0.7 - 0.03 * step, "length": 90 - 2 * step, "loss": 0.1 - rng.random() * 0.2,
            "wait_s": 20, "update_s": 9.5, "sync_s": 1.5, "evaluate_s": 0, "checkpoint_s": 2, "rollouts": 96 * step,
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    held = [
        {"step": step, "greedy": 0.1 + 0.06 * step, "sampled": 0.08 + 0.055 * step, "length": 88 - 2 * step,
         "gap": 0.01 + 0.001 * step, "by_family": {"sums": 0.1 + 0.07 * step, "products": 0.05 * step}}
        for step in range(0, steps + 1, 4)
    ]  # fmt: skip
    (folder / "curve.json").write_bytes(msgspec.json.encode({"steps": made, "evaluations": held, "wall_s": 400.0}))
    (folder / "settings.json").write_bytes(msgspec.json.encode({"model": "tiny", "steps": steps}))
    return folder


def sample_runs(root: Path) -> Path:
    """Record a run of several groups, an evaluation and a learning run below `root`, and return it."""
    writer = Writer(root / "model")
    rewards: list[list[float | None]]
    rewards = [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, None, 0.5], [1.0, 1.0, 1.0, 1.0], [0.25, 0.75, 0.0, 1.0]]
    outcomes = [
        writer.rollout(f"run-{group}-{number}", f"group-{group}", reward, problem=PROBLEMS[group % len(PROBLEMS)])
        for group, line in enumerate(rewards)
        for number, reward in enumerate(line)
    ]
    again = AttemptRecord(
        attempt=1, status="failed", cause="sandbox", error_code="sandbox_lost", error="lost", timing=Timing(run_s=2.0)
    )  # fmt: skip
    outcomes[0] = msgspec.structs.replace(outcomes[0], attempt=2, attempts=[again], tags={"family": "products"})
    outcomes.append(writer.outcome("run-lost", "group-9", None, None))
    write_run(root / "main", outcomes, writer.model)
    write_run(root / "hostile", [writer.hostile(), writer.hostile("second")], writer.model)
    tasks = [{"instance_id": "task of evaluated", "handler": "math", "family": "gsm8k", "payload": {}}]
    evaluation = write_run(
        root / "evaluation", [writer.rollout(f"e-{n}", "evaluated", float(n % 2)) for n in range(4)], writer.model
    )
    (evaluation / "tasks.jsonl").write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))
    (evaluation / "evaluation.json").write_bytes(b'{"agent": "codex"}')
    (evaluation / "report.json").write_bytes(b'{"reward_mean": 0.5}')
    write_learning(root / "learning")
    return root
