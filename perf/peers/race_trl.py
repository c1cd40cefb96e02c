"""A round of `perf.race` through TRL, in its environment: `python -m perf.peers.race_trl`.

It has the protocol of `worker.py`: a command is the path of a round, the answer its record. The rollouts come from
`AsyncGRPOTrainer`'s own worker, which samples from a vLLM server and runs tools between turns, in a separate process.
This process takes the samples from it, as the trainer does.
"""

from __future__ import annotations

import os
import queue
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accelerate.state import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import async_rollout_worker

from perf.peers.race_round import Box, CpuClock, RaceRecord, RaceRollout, read_record, read_round, reward_of
from perf.peers.worker import serve

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from perf.peers.worker import Run

ROUND: Final = "PRORL_RACE_ROUND"
"""Environment variable with the path of the round, for the worker's process."""
RECORD: Final = ".record"
"""Suffix of the record's file, which is next to the round's."""
HEALTH_S: Final = 120.0
POLL_S: Final = 0.05
RESPONSE_TEMPLATE: Final = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"```(?:python|py|ipython)\s*\n",
            "close_pattern": r"```\s*",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "python", "arguments": {"code": "{content}"}}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""The policy's notation of calls, in TRL's format."""
SAID: Final = "message['content']"
CALLS: Final = (
    r"{% for call in message.tool_calls or [] %}{{ '```python\n' + (call.function.arguments.code or '') + '\n```' }}"
    r"{% endfor %}"
)


def make_tokenizer(model: str) -> Any:
    """Return the policy's tokenizer, which reads and writes calls as ```python blocks."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = RESPONSE_TEMPLATE
    before, said, after = tokenizer.chat_template.partition(f"{SAID} + ")
    if not said:
        raise ValueError(f"the chat template of {model} has no {SAID}, after which calls could be written")
    tokenizer.chat_template = f"{before}{SAID} }}}}{CALLS}{{{{ {after}"
    return tokenizer


_boxes: list[Box] = []


async def python(code: str) -> str:
    """Run a Python program and see what it prints.

    Args:
        code: The program.
    """
    if not _boxes:
        race = read_round(Path(os.environ[ROUND]))
        _boxes.append(Box(race.bubblewrap, timeout_s=race.tool_timeout_s, max_chars=race.max_observation_chars))
    return await _boxes[0].run(code)


def solved(completions: list[list[dict[str, Any]]], answer: list[str], **_: object) -> list[float]:
    """Reward a correct answer in the last turn."""
    return [reward_of(said[-1]["content"], right) for said, right in zip(completions, answer, strict=True)]


class RecordingLoop(async_rollout_worker._AsyncRolloutLoop):  # type: ignore[misc]  # trl has no types
    """TRL's loop, with an end and a record. A trainer's data has no end: rollouts after the round wait unstarted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.race = read_round(Path(os.environ[ROUND]))
        self.rollouts: list[RaceRollout] = []
        self.begun = self.scored = 0
        self.clock = CpuClock()
        self.began_s = 0.0

    async def _generate_loop(self, stop_event: asyncio.Event) -> None:
        self.began_s, self.clock = time.monotonic(), CpuClock()
        await super()._generate_loop(stop_event)

    async def _generate_one(self, prompt: Any, *args: Any, **options: Any) -> Any:
        if self.begun == self.race.total:
            await self._stop_event.wait()
            return [], [], [], 0, 0, None
        number, start_s = self.begun, time.monotonic() - self.began_s
        self.begun += 1
        done = await super()._generate_one(prompt, *args, **options)
        completion, token_ids, _, tool_calls, _, _ = done
        self.rollouts.append(
            RaceRollout(
                start_s=start_s,
                end_s=time.monotonic() - self.began_s,
                turns=sum(message["role"] == "assistant" for message in completion),
                tool_calls=tool_calls,
                tokens=len(token_ids),
                reward=reward_of(completion[-1]["content"], self.race.tasks[number // self.race.rollouts].answer),
            )
        )
        return done

    async def _score_group(self, group: Any) -> Any:
        samples = await super()._score_group(group)
        self.scored += len(group.completions)
        if self.scored == self.race.total:
            own_s, children_s, machine_s = self.clock.read()
            record = RaceRecord(
                rollouts=self.rollouts,
                wall_s=time.monotonic() - self.began_s,
                framework_cpu_s=own_s,
                sandboxes_cpu_s=children_s,
                machine_cpu_s=machine_s,
            )
            path = Path(os.environ[ROUND])
            path.with_suffix(".part").write_text(record.encoded())
            path.with_suffix(".part").rename(path.with_suffix(RECORD))
        return samples

    async def _post(self, path: str, payload: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Send no seed, because it makes vLLM's engine for CPUs exit."""
        return await super()._post(path, {key: payload[key] for key in payload if key != "seed"}, *args, **options)


class RecordingWorker(async_rollout_worker.AsyncRolloutWorker):  # type: ignore[misc]  # trl has no types
    """TRL's worker, with that loop."""

    _loop_cls = RecordingLoop


def ride(path: Path) -> str:
    """Run the round in a file; return its record."""
    race = read_round(path)
    os.environ[ROUND] = str(path)
    tokenizer = make_tokenizer(race.model)
    worker = RecordingWorker(
        model_name=race.model,
        dataset=Dataset.from_list([{"prompt": task.prompt, "answer": task.answer} for task in race.tasks]),
        reward_funcs=[solved],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        tools=[python],
        num_generations=race.rollouts,
        max_inflight_tasks=race.slots,
        vllm_server_url=race.url,
        max_tokens=race.max_output_tokens,
        temperature=race.temperature,
        max_tool_calling_iterations=race.max_turns - 1,
    )
    worker.start()
    clock, record = CpuClock(), path.with_suffix(RECORD)
    try:
        while not record.exists():
            try:
                worker.rollout_buffer.get(timeout=POLL_S)
            except queue.Empty:
                worker.check_health(HEALTH_S)
        trainer_s, _, _ = clock.read()
    finally:
        worker.stop()
    return _with_cpu(record.read_text(), trainer_s)


def _with_cpu(record: str, more_s: float) -> str:
    """Add CPU seconds to the framework's in a record."""
    read = read_record(record)
    return replace(read, framework_cpu_s=read.framework_cpu_s + more_s).encoded()


@contextmanager
def open_trl() -> Iterator[Run]:
    """Run rounds, each with a new worker."""
    async_rollout_worker.is_vllm_available = lambda: True  # it is available in the server's environment
    PartialState()  # as its trainer would; its logging asks for it
    yield lambda path: (ride(Path(path)), 0)


if __name__ == "__main__":
    serve(open_trl)
