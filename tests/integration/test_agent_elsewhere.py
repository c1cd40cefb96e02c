"""Agents that are elsewhere: the rollout waits for them in RUN, and the policy answers them at the node's own port."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import msgspec
import pytest
import trio

from prorl_trio.client import BlockingClient, connect
from prorl_trio.types.errors import MalformedJob, NoAgentWanted, UnknownJob
from prorl_trio.types.models import AgentProgram, Budgets, RetryPolicy, TaskInstance
from prorl_trio.types.programs import FinishAgent, OpenAgent
from support.sdks import SDKS
from support.whole_node import TOKEN, job, open_service

pytestmark = pytest.mark.timeout(90)

EXTERNAL = AgentProgram(external=True)


def post(url, body, key):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=20) as got:
            return got.status, json.load(got)
    except urllib.error.HTTPError as exc:
        return exc.code, json.load(exc)


def get(url, key):
    try:
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked, timeout=20) as got:
            return got.status, json.load(got)
    except urllib.error.HTTPError as exc:
        return exc.code, json.load(exc)


def say(urls, key, instruction):
    """Ask for one turn as any SDK of OpenAI's does, and return its text."""
    body = {"model": "m", "messages": [{"role": "user", "content": instruction}]}
    status, answer = post(urls["openai"] + "/chat/completions", body, key)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


async def talk(*args):
    return await trio.to_thread.run_sync(say, *args, abandon_on_cancel=True)


async def only_outcome(client):
    with trio.fail_after(30):
        async for outcome in client.results(count=1):
            return outcome


@pytest.fixture
async def service(tmp_path):
    async with (
        open_service(tmp_path, says=["It is \\boxed{42}."]) as (url, _engine, _ends),
        connect(url, TOKEN) as client,
    ):
        yield client, url


async def test_an_agent_of_the_trainers_own_works_on_a_rollout_and_the_handler_grades_it(service):
    client, _ = service
    async with client.open_agent(job("j")) as agent:
        assert "6 * 7" in agent.instruction
        assert agent.env["OPENAI_API_KEY"] == agent.key
        assert await talk(agent.urls, agent.key, agent.instruction) == "It is \\boxed{42}."
    outcome = await only_outcome(client)
    assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome.error
    assert (outcome.trajectory.stop_reason, len(outcome.trajectory.turns)) == ("finished", 1)


QUESTIONS = {
    "math": {"question": "What is 6 * 7?", "answer": "42"},
    "stem": {
        "question": "Which metal is liquid?",
        "grader": {"kind": "choice", "choices": ["iron", "Hg"], "answer": "B"},
    },
    "code": {"prompt": "Write double(x).", "tests": {"kind": "output", "cases": [{"input": "2\n", "output": "4"}]}},
}


@pytest.mark.parametrize("handler", QUESTIONS)
@pytest.mark.parametrize("own", ["", "Do as finish says."])
async def test_it_is_told_of_no_tool_that_it_does_not_have(service, handler, own):
    client, _ = service
    payload = {**QUESTIONS[handler], **({"instruction": own} if own else {})}
    instance = TaskInstance(instance_id="q", handler=handler, payload=payload)
    await client.submit([msgspec.structs.replace(job("j", agent=EXTERNAL), instance=instance)])
    opened = await client.operate(OpenAgent(job_id="j"))
    told = "\n".join(message.content for message in opened.messages)
    assert ("finish" in told) == bool(own), "a task's own words are what they are"
    assert "ipython" not in told
    await client.cancel(["j"])


async def test_what_it_says_is_graded_in_place_of_what_the_policy_said_and_its_own_reward_in_place_of_both(service):
    client, _ = service
    async with client.open_agent(job("j")) as agent:
        await talk(agent.urls, agent.key, agent.instruction)
        agent.answer = "41"
    assert (await only_outcome(client)).reward == 0.0
    async with client.open_agent(job("k")) as agent:
        await talk(agent.urls, agent.key, agent.instruction)
        agent.answer, agent.reward = "41", 0.25
    outcome = await only_outcome(client)
    assert (outcome.reward, outcome.details) == (0.25, {"graded_by": "agent"})


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_is_no_reward(service, reward):
    client, _ = service
    async with client.open_agent(job("j", retry=RetryPolicy(max_attempts=1))) as agent:
        await talk(agent.urls, agent.key, agent.instruction)
        agent.reward = reward
    outcome = await only_outcome(client)
    assert (outcome.status, outcome.reward, outcome.error_code) == ("failed", None, "evaluator_malformed")


async def test_an_error_of_its_own_cancels_the_job(service):
    client, _ = service
    with pytest.raises(ZeroDivisionError):
        async with client.open_agent(job("j")):
            raise ZeroDivisionError
    outcome = await only_outcome(client)
    assert (outcome.status, outcome.error) == ("cancelled", "its agent has failed")


async def test_sdks_find_the_nodes_own_port_by_the_variables_that_they_read(service, monkeypatch):
    client, _ = service
    for name, sdk in SDKS.items():
        async with client.open_agent(job(name)) as agent:
            for variable, value in agent.env.items():
                monkeypatch.setenv(variable, value)

            def work(sdk=sdk, agent=agent):
                with sdk() as model:
                    return model.ask([model.user(agent.instruction)], stream=True).text

            agent.answer = await trio.to_thread.run_sync(work)
        outcome = await only_outcome(client)
        assert (outcome.job_id, outcome.trajectory.stop_reason) == (name, "finished"), outcome.error
        assert agent.answer in outcome.trajectory.turns[0].text


async def test_over_rest(service):
    client, url = service
    origin = url.replace("ws://", "http://").rstrip("/")
    await client.submit([job("a/b", agent=EXTERNAL)])
    get_it = f"{origin}/v1/rollouts/a/b/gateway?wait_s=20"
    status, opened = await trio.to_thread.run_sync(get, get_it, TOKEN)
    assert status == 200, opened
    await talk(opened["urls"], opened["key"], opened["messages"][-1]["content"])
    finish = f"{origin}/v1/rollouts/a/b/finish"
    for _ in range(2):  # the second is from somebody who has not heard the answer to the first
        body = {"key": opened["key"], "reward": 0.5}
        assert await trio.to_thread.run_sync(post, finish, body, TOKEN) == (200, {"turns": 1})
    assert (await only_outcome(client)).reward == 0.5
    status, refused = await trio.to_thread.run_sync(post, finish, {}, TOKEN)
    assert (status, refused["error"]["code"]) == (404, "unknown_job")
    assert (await trio.to_thread.run_sync(get, get_it, "wrong"))[0] == 401


async def test_the_key_is_the_rollouts_alone_and_ends_with_it(service):
    client, _ = service
    async with client.open_agent(job("j")) as agent:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        path = agent.urls["openai"] + "/chat/completions"
        assert (await trio.to_thread.run_sync(post, path, body, TOKEN))[0] == 401
        await talk(agent.urls, agent.key, "Hi")
    await only_outcome(client)
    assert (await trio.to_thread.run_sync(post, path, body, agent.key))[0] in {403, 404, 410}


async def test_jobs_that_want_no_agent_say_so(service):
    client, _ = service
    with pytest.raises(UnknownJob):
        await client.operate(OpenAgent(job_id="nobody"))
    with pytest.raises(UnknownJob):
        await client.operate(FinishAgent(job_id="nobody"))
    await client.submit([job("mine", agent=EXTERNAL)])
    opened = await client.operate(OpenAgent(job_id="mine"))
    with pytest.raises(NoAgentWanted, match="open its agent again"):
        await client.operate(FinishAgent(job_id="mine", key=opened.key + "x"))
    await client.cancel(["mine"])


async def test_an_agent_that_never_asks_is_infrastructure_and_no_bad_answer(service):
    client, _ = service
    spec = job("j", agent=EXTERNAL, budgets=Budgets(agent_s=0.5), retry=RetryPolicy(max_attempts=1))
    await client.submit([spec])
    outcome = await only_outcome(client)
    assert (outcome.status, outcome.reward, outcome.error_code) == ("failed", None, "agent_program")


async def test_one_that_asks_and_then_falls_silent_is_graded_when_its_time_is_over(service):
    client, _ = service
    await client.submit([job("j", agent=EXTERNAL, budgets=Budgets(agent_s=1.5))])
    opened = await client.operate(OpenAgent(job_id="j"))
    await talk(opened.urls, opened.key, "6 * 7?")
    outcome = await only_outcome(client)
    assert (outcome.status, outcome.trajectory.stop_reason) == ("completed", "agent_budget")


async def test_an_agent_that_the_node_does_not_have_is_refused_at_once_with_the_remedy(service):
    client, _ = service
    (refused,) = await client.submit([job("j", agent="no-such-agent")])
    assert (refused.code, refused.path) == ("malformed", "$.agent.preset")
    assert "there is no agent 'no-such-agent'; there are: " in refused.message
    with pytest.raises(MalformedJob):
        async with client.open_agent(
            msgspec.structs.replace(job("j"), instance=TaskInstance(instance_id="q", handler="math", payload={}))
        ):
            pass


async def test_in_plain_calls(tmp_path):
    async with open_service(tmp_path, says=["It is \\boxed{42}."]) as (url, _engine, _ends):

        def work():
            with BlockingClient(url, TOKEN) as client:
                with client.open_agent(job("j")) as agent:
                    say(agent.urls, agent.key, agent.instruction)
                with pytest.raises(ZeroDivisionError), client.open_agent(job("k")):
                    raise ZeroDivisionError
                return {outcome.job_id: outcome.status for outcome in client.results(count=2)}

        assert await trio.to_thread.run_sync(work) == {"j": "completed", "k": "cancelled"}
