"""What real clients sent, asked again of the gateway: each recording becomes the segments of the specification.

The clients themselves are in tests/integration/test_agent_scenarios.py. See `support.agent_recordings`.
"""

from __future__ import annotations

import json

import pytest
import requests
import trio

from prorl_trio.types.models import SamplingParams
from support.agent_recordings import OPENER, load, read_tables, recorded, rekeyed, table
from support.agent_scenarios import MAX_OUTPUT_TOKENS, context_tokens
from support.gateway_rig import serving

pytestmark = pytest.mark.timeout(60)
TABLES = read_tables()


def ask(url, entry, keys):
    """Send a request of a recording, and return the status."""
    body = rekeyed(json.dumps(entry["body"], ensure_ascii=False), keys)
    headers = {**entry["headers"], "content-type": "application/json"}
    return requests.post(url + entry["path"], data=body.encode(), headers=headers, timeout=30).status_code


class Sampled:
    """The policy of a recording: it says what was sampled there, in as many pieces as are asked for."""

    def __init__(self, tiny):
        self.tiny, self.text = tiny, ""

    def __call__(self, prompt):
        begun = self.tiny.decode(prompt[-2 * MAX_OUTPUT_TOKENS :]).rpartition(OPENER)[2]
        ids = self.tiny.turn(self.text.removesuffix("<|im_end|>").removeprefix(begun))
        return ids, [-0.5] * len(ids), "stop"


async def replay(rig, client, name):
    """Ask the gateway all that a recording has; return the trajectory."""
    sampling = SamplingParams(max_output_tokens=MAX_OUTPUT_TOKENS)
    how = {"sampling": sampling, "max_turns": 16, "max_trajectory_tokens": context_tokens(client, name)}
    keys, policy = {}, Sampled(rig.tiny)
    rig.script = policy
    async with rig.open(max_model_len=1_000_000), serving(rig, **how) as served:
        for entry in load(client)[name]:
            if entry.get("fault") in ("overflow", "unavailable"):
                continue  # the gateway never heard of it
            policy.text, before = entry.get("said", ""), len(served.context.turns)
            status = await trio.to_thread.run_sync(ask, served.url, entry, keys)
            assert (status == 200) == ("key" in entry), "answered as it was"
            if "key" in entry:
                assert (entry["key"] not in keys) == (len(served.context.turns) > before), "sampled where it was"
                keys.setdefault(entry["key"], list(served.gateway._by_key)[-1])
        trajectory = served.context.trajectory()
        prompts = {tuple(request.prompt) for request in rig.engine.requests}
    for turn in trajectory.turns:
        assert tuple(trajectory.segments[turn.segment].token_ids[: turn.completion_start].tolist()) in prompts
    assert trajectory.undelivered_tokens == 0
    assert sum(int(segment.loss_mask.sum()) for segment in trajectory.segments) == sum(
        turn.completion_end - turn.completion_start for turn in trajectory.turns
    )
    return trajectory


@pytest.mark.parametrize(("client", "name"), recorded())
async def test_a_recording_becomes_the_segments_of_the_specification(rig, client, name):
    assert table(await replay(rig, client, name)) == TABLES[client, name]


def test_the_specification_is_of_what_was_recorded():
    assert sorted(TABLES) == sorted(recorded())
