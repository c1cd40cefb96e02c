"""An agent that is a program: in a real sandbox, through the gateway, graded by the task's own handler."""

from __future__ import annotations

import json

import numpy as np
import pytest

from prorl_trio.client import connect
from prorl_trio.types.models import AgentProgram, RetryPolicy
from support.whole_node import TOKEN, job, open_service, outcome_of, usable

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(params=["bubblewrap", "apptainer", "process"])
def provider(request):
    return usable(request.param)


LOOP = """
import json, os, subprocess, sys, urllib.request
def ask(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [{"type": "function", "function": {
        "name": "sh", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    said = ask(messages)
    messages.append(said)
    if not said.get("tool_calls"):
        break
    for call in said["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        said = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
"""
CALL = '<tool_call>{"name": "sh", "arguments": {"command": "expr 6 \\\\* 7"}}</tool_call>'


def program(code=LOOP, **fields):
    return AgentProgram(command=["python3", "-c", code, "{instruction}"], **fields)


async def test_a_program_in_the_sandbox_works_on_a_task_and_the_handler_grades_it(tmp_path, provider):
    says = [CALL, "It is \\boxed{42}."]
    async with open_service(tmp_path, provider=provider, says=says) as (url, engine, _ends):
        outcome = await outcome_of(url, job("j", agent=program()))
        assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error
        (segment,) = outcome.trajectory.segments
        prompts = [request.prompt for request in engine.requests]
        assert segment.token_ids.tolist()[: len(prompts[-1])] == prompts[-1]
        assert [turn.messages[-1].content for turn in outcome.trajectory.turns[1:]] == ["42\n"]
        assert outcome.trajectory.echoes == {"exact": 1}
        assert outcome.trajectory.stop_reason == "finished"
        async with connect(url, TOKEN) as client:
            status = await client.status()
        assert status["gateway"] == {"requests": {"chat": {"ok_total": 2}}, "ignored_fields": {}, "joined_total": 0}


SAME = """
import json, os, sys, urllib.request
messages, tools = json.loads(sys.argv[1])
for observation in (None, *json.loads(sys.argv[2]), None):
    if observation is not None:
        messages.append({"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": observation})
    body = {"model": "policy", "messages": messages, "tools": tools}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(said)
    if not said.get("tool_calls"):
        break
"""


@pytest.mark.parametrize("provider", ["process"], indirect=True)
async def test_a_program_that_says_what_our_own_loop_says_is_the_same_rollout(tmp_path, provider):
    """The same policy, task, words and tools: the same tokens, log-probabilities, masks, versions and reward."""
    answer = r"It is \boxed{42}."
    call = '<tool_call>{"name": "ipython", "arguments": {"code": "print(6*7)"}}</tool_call>'

    def policy(prompt):
        return answer if "<tool_response>" in prompt else call

    async with open_service(tmp_path, provider=provider, policy=policy, max_model_len=9000) as (url, _engine, _ends):
        ours = await outcome_of(url, job("ours"))
        first, *_ = ours.trajectory.turns
        opening = [{"role": each.role, "content": each.content} for each in first.messages]
        observations = [each for turn in ours.trajectory.turns for each in turn.observations]
        said = json.dumps([opening, ours.trajectory.tools]), json.dumps(observations)
        theirs = await outcome_of(url, job("theirs", agent=AgentProgram(command=["python3", "-c", SAME, *said])))
    assert [each.strip() for each in observations] == ["42"]
    assert (ours.reward, theirs.reward) == (1.0, 1.0), theirs.error
    assert ours.trajectory.tools == theirs.trajectory.tools
    (mine,), (other,) = ours.trajectory.segments, theirs.trajectory.segments
    for name in ("token_ids", "logprobs", "loss_mask"):
        assert np.array_equal(getattr(mine, name), getattr(other, name)), name
    assert mine.spans == other.spans
    assert mine.logprobs.any()


@pytest.mark.parametrize("provider", ["bubblewrap"], indirect=True)
@pytest.mark.parametrize(
    ("code", "says"),
    [("import no_such_module", "No module named"), ("print('done')", "done")],
    ids=["crash", "silence"],
)
async def test_a_program_that_asks_for_nothing_is_infrastructure(tmp_path, provider, code, says):
    async with open_service(tmp_path, provider=provider) as (url, _engine, _ends):
        spec = job("j", agent=program(code), retry=RetryPolicy(max_attempts=1))
        outcome = await outcome_of(url, spec)
        assert (outcome.status, outcome.reward, outcome.error_code) == ("failed", None, "agent_program")
        assert says in outcome.error


@pytest.mark.parametrize("provider", ["bubblewrap"], indirect=True)
async def test_a_program_that_crashes_after_a_turn_is_graded(tmp_path, provider):
    code = LOOP + "\nraise SystemExit(3)"
    async with open_service(tmp_path, provider=provider, says=["It is 41."]) as (url, _engine, _ends):
        outcome = await outcome_of(url, job("j", agent=program(code)))
        assert (outcome.status, outcome.reward) == ("completed", 0.0), outcome.error
        assert outcome.trajectory.stop_reason == "program_error"
