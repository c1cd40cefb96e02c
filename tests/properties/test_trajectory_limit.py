"""No trajectory is longer than its limit, whatever tools return and in whichever family; what is cut says so."""

from __future__ import annotations

import functools
import re
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prorl_trio.agent.context import Resources, RolloutContext
from prorl_trio.agent.loop import NewDialogue, run_agent, run_sub_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.chat.format import ChatFormat
from prorl_trio.config import AgentConfig, ModelConfig, NodeConfig
from prorl_trio.inference.engines.protocol import Completion, EngineInfo
from prorl_trio.inference.pool.versions import VersionOrder
from prorl_trio.tools import Observation, Tool, ToolSet
from prorl_trio.tools.fitting import fit_texts, fitting_share
from prorl_trio.types.batch import pad_batch
from prorl_trio.types.errors import ContextLengthExceeded
from prorl_trio.types.models import ChatMessage, JobSpec, SamplingParams, TaskInstance, ToolCall
from support.chat_families import ALL_CHAT_FAMILIES, write_family_model

pytestmark = pytest.mark.timeout(120)

NOTE = re.compile(r"\[\.\.\. (\d+) tokens left out: there is no room for them \.\.\.\]")
LONGEST = 4096


@functools.cache
def chat_format(family, on_break="keep"):
    """Load one of the families, once: all of them take seconds."""
    with tempfile.TemporaryDirectory() as folder:
        return ChatFormat.load(write_family_model(Path(folder) / family, family), on_break=on_break)


class Lease:
    """A backend that says "so so so" up to its limit, or ends its turn before."""

    url = "http://stub"

    def __init__(self, chat, says):
        self.info = EngineInfo(url=self.url, model="m", max_model_len=LONGEST, engine="e", policy_version="0")
        self.chat, self.says = chat, says

    async def complete(self, partial, **_how):
        await trio.lowlevel.checkpoint()
        assert partial.begin_attempt(lambda: self.info) is None
        ids = [*self.chat.codec.encode("so " * self.says), self.chat.end_of_turn_id]
        cut = ids[: partial.room]
        return partial.add(
            Completion(
                token_ids=cut,
                logprobs=[-1.0] * len(cut),
                finish_reason="stop" if len(cut) == len(ids) else "length",
                policy_version="0",
                engine="e",
            )
        )


class Pool:
    policy_version = "0"

    def __init__(self, lease):
        self._lease, self.versions = lease, VersionOrder("0")

    @asynccontextmanager
    async def lease(self, _task_id, _priority, _waiting):
        yield self._lease


class Big(Tool):
    name = "big"
    description = "Says much."
    parameters: ClassVar = {"type": "object", "properties": {}}

    def __init__(self, outputs):
        self.outputs = list(outputs)

    async def call(self, arguments, sandbox, *, timeout_s):
        await trio.lowlevel.checkpoint()
        return Observation(text=self.outputs.pop(0) if self.outputs else "")


class Calls(AgentStyle):
    """Every turn is so many calls."""

    def __init__(self, *counts):
        self.counts = list(counts)

    def implied_calls(self, _parsed):
        count = self.counts.pop(0) if self.counts else 0
        return [ToolCall(name="big", arguments={}, raw="big()")] * count

    def nudge(self):
        return "Go on. " * 20


def rolled_out(chat, limit, counts, outputs, *, says=3, max_turns=6, before_turn=None, style=Calls, **config):
    """The context of a rollout whose turns make `counts` calls, which return `outputs`."""
    agent = AgentConfig(max_trajectory_tokens=limit, **config)
    context = RolloutContext.__new__(RolloutContext)

    async def run():
        resources = Resources(
            config=NodeConfig(model=ModelConfig(path="unused"), agent=agent),
            chat_format=chat,
            backends=Pool(Lease(chat, says)),
            scorers=None,
        )
        spec = JobSpec(
            job_id="j",
            instance=TaskInstance(instance_id="i", handler="h", payload={}),
            sampling=SamplingParams(max_output_tokens=64),
            max_turns=max_turns,
        )
        context.__init__(spec=spec, resources=resources)
        tools = ToolSet([Big(outputs)], max_observation_chars=10**7)
        try:
            await run_agent(
                context,
                [ChatMessage(role="user", content="Well?")],
                tools,
                style(*counts),
                before_turn=None if before_turn is None else before_turn(context),
            )
        except ContextLengthExceeded:
            assert context.stop_reason == "aborted"

    trio.run(run)
    return context


def check(context, limit):
    trajectory = context.trajectory()
    if trajectory is None:
        return None
    for segment in trajectory.segments:
        assert len(segment) <= limit
    assert sum(turn.completion_end - turn.completion_start for turn in trajectory.turns) == sum(
        int(segment.loss_mask.sum()) for segment in trajectory.segments
    )
    assert trajectory.drift_tokens == 0
    for max_len in (0, 7, limit):
        batch = pad_batch([trajectory], pad_token_id=0, max_len=max_len)
        assert batch.truncated.tolist() == [len(segment) > max_len for segment in trajectory.segments]
    return trajectory


def test_one_turn_of_twelve_calls_with_huge_outputs():
    chat = chat_format("qwen2.5")
    outputs = [f"<begin {n}> " + "0123456789 abc\n" * 500 + f"<end {n}>" for n in range(12)]
    context = rolled_out(chat, 3_000, [12, 0], outputs, max_turns=2)
    trajectory = check(context, 3_000)
    assert (trajectory.stop_reason, len(trajectory.turns)) == ("max_turns", 2)
    shown = trajectory.turns[0].observations
    text = chat.decode(trajectory.segments[0].token_ids.tolist())
    assert len(shown) == 12
    for number, observation in enumerate(shown):
        assert observation in text, "what is recorded is what the policy was shown"
        assert observation.startswith(f"<begin {number}>")
        assert observation.endswith(f"<end {number}>")
        whole = len(chat.codec.encode(chat.codec.mark(outputs[number])))
        left_out = int(NOTE.search(observation)[1])
        head, tail = NOTE.sub("\0", observation).split("\0")
        kept = [len(chat.codec.encode(chat.codec.mark(part))) for part in (head.rstrip("\n"), tail.lstrip("\n"))]
        assert abs(whole - left_out - sum(kept)) <= 4, "but for where it was cut"
    assert len(trajectory.segments[0]) > 2_700, "the room is used"


sizes = st.one_of(st.integers(0, 60), st.integers(0, 6_000))
alphabets = st.sampled_from(
    ["a", "0", " ", "\n", "é", "数", "😀", "<|im_end|>", "</tool_response>", "\ud800", "x y ", "\0"]
)
outputs = st.lists(st.tuples(alphabets, sizes), max_size=14)


@given(
    family=st.sampled_from(ALL_CHAT_FAMILIES),
    on_break=st.sampled_from(["keep", "segment"]),
    limit=st.integers(200, 3_000),
    counts=st.lists(st.integers(0, 14), max_size=5),
    outputs=outputs,
    says=st.sampled_from([1, 200]),
)
@example("qwen3", "segment", 900, [3, 0, 3, 0, 2], [("数", 700)] * 8, 1)
@settings(max_examples=120, deadline=None)
def test_no_trajectory_is_longer_than_its_limit(family, on_break, limit, counts, outputs, says):
    texts = [piece * (size // len(piece)) for piece, size in outputs]
    trajectory = check(rolled_out(chat_format(family, on_break), limit, counts, texts, says=says), limit)
    assert trajectory is None or trajectory.stop_reason in (
        "max_turns",
        "context_budget",
        "no_tool_call",
        "no_end_of_turn",
    )


def test_a_shorter_dialogue_that_is_too_long_is_not_recorded():
    def compact(_context):
        async def before_turn(_conversation, _room):
            await trio.lowlevel.checkpoint()
            return NewDialogue([ChatMessage(role="user", content="too long " * 2_000)], "compaction")

        return before_turn

    context = rolled_out(chat_format("qwen2.5"), 1_000, [1], ["x"], before_turn=compact)
    assert context.stop_reason == "aborted"
    assert len(check(context, 1_000).segments) == 1


def test_another_agent_whose_question_is_too_long_is_not_recorded():
    def ask(context):
        async def before_turn(_conversation, _room):
            question = [ChatMessage(role="user", content="too long " * 2_000)]
            await run_sub_agent(context, question, ToolSet([], max_observation_chars=9), Calls(), max_turns=1)

        return before_turn

    context = rolled_out(chat_format("qwen2.5"), 1_000, [1], ["x"], before_turn=ask)
    assert context.stop_reason == "aborted"
    assert len(check(context, 1_000).segments) == 1


def test_where_nothing_fits_the_dialogue_may_still_be_shortened():
    asked = []

    def compact(_context):
        async def before_turn(conversation, room):
            await trio.lowlevel.checkpoint()
            asked.append((len(conversation), room))
            if room < 500:
                return NewDialogue([ChatMessage(role="user", content="Shorter.")], "compaction")
            return None

        return before_turn

    many = {"says": 60, "max_turns": 4, "before_turn": compact}
    context = rolled_out(chat_format("qwen2.5"), 260, [14, 0], ["long " * 200] * 14, **many)
    trajectory = check(context, 260)
    assert [segment.reason for segment in trajectory.segments][1] == "compaction"
    assert asked[0][1] > 0


# ---------------------------------------------------------------- why it ends


@pytest.mark.parametrize(
    ("says", "counts", "max_turns", "max_nudges", "reason"),
    [
        (3, [], 1, 1, "max_turns"),
        (3, [], 3, 1, "no_tool_call"),
        (400, [], 1, 1, "no_end_of_turn"),
        (400, [], 5, 1, "no_end_of_turn"),
        (400, [1], 1, 1, "max_turns"),  # it called a tool before it was cut
        (400, [], 20, 20, "context_budget"),
    ],
)
def test_what_was_wrong_with_the_last_turn_is_told(says, counts, max_turns, max_nudges, reason):
    context = rolled_out(chat_format("qwen2.5"), 900, counts, [], says=says, max_turns=max_turns, max_nudges=max_nudges)
    assert context.stop_reason == reason


@pytest.mark.parametrize(("errors", "reason"), [((False, True), "parse_error"), ((True, False), "max_turns")])
def test_calls_that_nobody_understands_are_told(errors, reason):
    class Wrong(Calls):
        def implied_calls(self, parsed):
            error = "no JSON" if self.counts.pop(0) else ""
            return [ToolCall(name="" if error else "big", arguments={}, raw="big(", error=error)]

    context = rolled_out(chat_format("qwen2.5"), 2_000, errors, ["x"], max_turns=2, style=Wrong)
    assert context.stop_reason == reason


# ---------------------------------------------------------------- cutting


@given(st.lists(st.integers(0, 100), max_size=12), st.integers(0, 600))
def test_each_has_as_much_as_the_others_and_all_together_what_there_is(lengths, at_most):
    share = fitting_share(lengths, at_most)
    kept = [min(length, share) for length in lengths]
    assert sum(kept) <= at_most
    assert kept == list(lengths) or sum(kept) > at_most - len(lengths), "nothing is left over"


def test_where_there_is_no_room_for_the_note_nothing_is_cut():
    codec = chat_format("qwen2.5").codec
    text = "word " * 100
    assert fit_texts(codec, [text], [codec.encode(codec.mark(text))], 3) is None
