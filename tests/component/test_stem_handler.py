"""The handler `stem` over a fake engine: its turns with search, what a search costs, and answers made to hurt."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from prorl_trio.agent.context import RolloutContext
from prorl_trio.agent.loop import asking_service
from prorl_trio.config import BudgetConfig, SearchConfig
from prorl_trio.http.client import RetryPolicy
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.search.backend import Document, SearchBackend, SearchFailed
from prorl_trio.search.service import Search
from prorl_trio.tasks.handlers.stem.handler import MAX_ANSWER_CHARS, NUDGE, StemHandler
from prorl_trio.tasks.handlers.stem.payload import read_payload
from prorl_trio.types.errors import EvaluationError, MalformedJob, NotRestorable, SearchUnavailable
from prorl_trio.types.models import Recorded, TaskInstance

GOLD = Document(document_id="g", title="Gold", text="Gold has atomic number 79.", url="https://example.org/gold")
CHOICE = {"kind": "choice", "choices": ["72", "79", "29"], "answer": "B"}
NUMBER = {"kind": "number", "answer": 79}

pytestmark = pytest.mark.timeout(120)


class Scripted(SearchBackend):
    """Answers with what `says` holds: documents, or a failure; then with gold. Each search takes `takes_s`."""

    name = "scripted"
    max_query_chars = 1000

    def __init__(self, *says, takes_s=0.0):
        self.says, self.takes_s, self.queries = list(says), takes_s, []

    async def search(self, query, *, max_results, timeout_s):
        self.queries.append(query)
        await trio.sleep(self.takes_s)
        said = self.says.pop(0) if self.says else [GOLD]
        if isinstance(said, Exception):
            raise said
        return said[:max_results]

    async def aclose(self):
        await trio.lowlevel.checkpoint()


def call(name, **arguments):
    return f"<tool_call>\n{msgspec.json.encode({'name': name, 'arguments': arguments}).decode()}\n</tool_call>"


def instance(grader=CHOICE, **fields):
    payload = {"question": "What is the atomic number of gold?", "grader": grader, **fields}
    return TaskInstance(instance_id="q", handler="stem", payload=payload)


@asynccontextmanager
async def open_task(rig, backend, task=None, **limits):
    """A context to run in, with its handler; the search is of `backend`, None for none."""
    async with rig.open():
        if backend is not None:
            search = Search(backend, SearchConfig(**limits), retry=RetryPolicy(max_attempts=2, first_delay_s=0.001))
            rig.resources.search = search
        handler = StemHandler()
        await handler.prepare(rig.resources)
        context = RolloutContext(spec=rig.spec(instance=task or instance(), max_turns=6), resources=rig.resources)
        async with rig.provider.open_sandbox(SandboxSpec()) as context.sandbox:
            yield handler, context


async def test_it_searches_computes_and_finishes(rig):
    rig.says = [call("search", query="gold atomic number"), call("ipython", code="79"), call("finish", answer="(B) 79")]
    async with open_task(rig, Scripted()) as (handler, context):
        await handler.run(context)
        evaluation = await handler.eval(context)
    assert [turn.observations[0] for turn in context.turns[:2]] == [
        "[1] Gold (https://example.org/gold)\nGold has atomic number 79.",
        "79",
    ]
    assert evaluation.reward == 1.0
    assert evaluation.details["searches"] == 1
    assert (evaluation.details["gold"], evaluation.details["parsed_answer"]) == ("B", "B")
    assert [tool["function"]["name"] for tool in context.tools] == ["search", "bash", "ipython", "finish"]
    assert "A. 72\nB. 79\nC. 29" in context.turns[0].messages[1].content


async def test_a_boxed_answer_counts_and_a_reminder_is_given(rig):
    rig.says = ["Hm.", r"It is \boxed{79}."]
    async with open_task(rig, None, instance(NUMBER)) as (handler, context):
        await handler.run(context)
        assert (await handler.eval(context)).reward == 1.0
    assert context.turns[1].messages[0].content == NUDGE
    assert [tool["function"]["name"] for tool in context.tools] == ["bash", "ipython", "finish"]


@pytest.mark.parametrize(
    ("turn", "reward"),
    [
        (r"So $E = \boxed{79}\ \text{kJ}$.", 1.0),
        (r"\boxed{79} J", 0.0),
        (r"\boxed{79}", 0.0),
        (r"\boxed{79\,\mathrm{kJ}}", 1.0),
    ],
)
async def test_the_unit_behind_a_box_counts(rig, turn, reward):
    rig.says = [turn]
    task = instance({"kind": "number", "answer": 79, "unit": "kJ", "unit_required": True})
    async with open_task(rig, None, task) as (handler, context):
        await handler.run(context)
        assert (await handler.eval(context)).reward == reward


async def test_a_search_that_fails_for_everybody_ends_the_rollout_without_a_verdict(rig):
    backend = Scripted(*[SearchFailed("gone", retryable=True)] * 9)
    rig.says = [call("search", query="gold")]
    async with open_task(rig, backend) as (handler, context):
        with pytest.raises(SearchUnavailable, match="search by scripted does not work: gone"):
            await handler.run(context)
    assert backend.queries == ["gold", "gold", "water"]
    assert len(context.turns) == 1, "what was sampled is recorded"


async def test_a_query_that_breaks_the_backend_is_an_observation_and_the_rollout_goes_on(rig):
    broken = SearchFailed("status 500", retryable=True)
    rig.says = [call("search", query="boom"), call("finish", answer="A")]
    async with open_task(rig, Scripted(broken, broken, [GOLD], broken)) as (handler, context):
        await handler.run(context)
        assert (await handler.eval(context)).reward == 0.0
    assert context.turns[0].tool_results[0].outcome == "error"
    assert "put it otherwise" in context.turns[0].observations[0]


async def test_a_search_that_answers_is_the_agents_time(rig):
    rig.config = msgspec.structs.replace(rig.config, budgets=BudgetConfig(agent_s=1.0))
    rig.says = [call("search", query="gold")] * 6
    async with open_task(rig, Scripted(takes_s=0.4)) as (handler, context):
        await handler.run(context)
    assert context.stop_reason == "agent_budget"
    assert len(context.turns) < 6


async def test_a_search_that_fails_takes_none_of_the_agents_time(rig):
    rig.config = msgspec.structs.replace(rig.config, budgets=BudgetConfig(agent_s=1.0))
    rig.says = [call("search", query="gold")]
    fails = Scripted(*[SearchFailed("no", retryable=True)] * 9, takes_s=0.5)  # three times: twice, and the probe
    async with open_task(rig, fails) as (handler, context):
        with pytest.raises(SearchUnavailable):
            await handler.run(context)
    assert len(fails.queries) == 3


async def test_nobody_asks_a_service_but_from_a_tool(rig):
    async with open_task(rig, None) as (_, context):
        with pytest.raises(RuntimeError, match="inside a tool's call"), asking_service(context, "search"):
            pass


async def test_a_task_that_asks_for_search_is_refused_where_there_is_none(rig):
    async with open_task(rig, None) as (handler, _):
        handler.validate(instance().payload)
        with pytest.raises(MalformedJob, match="no search") as caught:
            handler.validate(instance(tools=["search"]).payload)
    assert caught.value.path == "$.instance.payload.tools"


def test_without_prepare_nothing_is_said_of_what_the_node_has():
    """A client that loads a set knows neither the node's search nor its packages."""
    StemHandler().validate(instance(tools=["search"]).payload)


async def test_golds_are_checked_in_a_scoring_process(rig):
    async with rig.open():
        for unit, error in (("kJ", ""), ("zorks", "the task's unit 'zorks' cannot be read")):
            payload = instance({"kind": "number", "answer": 5, "unit": unit}).payload
            found = await rig.resources.scorers.score(StemHandler.gold_check, {"payload": payload}, timeout_s=60)
            assert found["error"].startswith(error)
            assert found["path"] == ("$.instance.payload.grader.unit" if error else "")


def test_a_task_that_no_package_here_can_grade_is_refused():
    grader = {"kind": "reasoning_gym", "family": "puzzle24", "seed": 1, "version": "0.1.25"}
    with pytest.raises(MalformedJob, match="does not look at which numbers") as caught:
        StemHandler().validate(instance(grader).payload)
    assert caught.value.path == "$.instance.payload.grader.family"


async def test_without_bash_and_ipython_there_is_no_sandbox(rig):
    async with open_task(rig, Scripted(), instance(tools=["search"])) as (handler, context):
        assert handler.sandbox_spec(context) is None
    async with open_task(rig, None) as (handler, context):
        spec = handler.sandbox_spec(context)
        assert (spec.prestart_ipython, spec.prestart_bash) == (True, True)
    async with open_task(rig, None, instance(tools=["ipython"])) as (handler, context):
        spec = handler.sandbox_spec(context)
        assert (spec.prestart_ipython, spec.prestart_bash) == (True, False)


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        ({"grader": CHOICE}, "question"),
        ({"question": " ", "grader": CHOICE}, "empty"),
        ({"question": "?", "grader": {**CHOICE, "answer": "D"}}, "answer must be one of A, B, C"),
        ({"question": "?", "grader": {**CHOICE, "choices": ["one"]}}, "choices"),
        ({"question": "?", "grader": {"kind": "number", "answer": "many"}}, "no finite number"),
        ({"question": "?", "grader": {"kind": "text", "answer": []}}, "answer is empty"),
        ({"question": "?", "grader": {"kind": "guess"}}, "kind"),
        ({"question": "?", "grader": CHOICE, "tools": ["telnet"]}, "tools"),
        ({"question": "?", "grader": CHOICE, "extra": 1}, "extra"),
    ],
)
def test_a_malformed_payload_is_told_with_its_field(payload, path):
    with pytest.raises(MalformedJob) as caught:
        read_payload(payload)
    assert path in f"{caught.value} {caught.value.path}"


HOSTILE = [
    *(
        "9" * 300 + " m",
        "1e" + "9" * 299,
        "1 " + "m" * 70,
        "1 m" + "^9" * 30,
        "(" * 299,
        "1 (m*" * 50,
        "\\boxed{" * 2000,
    ),
    *("\x00\udcff", "[[[[" * 4000, "__import__('os').system('true')", "answer: " * 2000, "\\text{" * 3000, " " * 9999),
    *("1 yottayottayottameter**9**9", "²" * 300, "1" + "," * 19_000, "A" * MAX_ANSWER_CHARS, "a b " * 5000),
]
GRADERS = {
    "choice": CHOICE,
    "number": {"kind": "number", "answer": 79, "unit": "m"},
    "text": {"kind": "text", "answer": ["seventy-nine", "79"]},
}


@pytest.mark.parametrize("kind", GRADERS)
async def test_answers_made_to_hurt_are_worth_nothing_and_the_next_is_graded(rig, kind):
    async with open_task(rig, None, instance(GRADERS[kind])) as (handler, context):
        for answer in [*HOSTILE, "", None, "x" * 5_000_000]:
            context.answer = answer
            assert (await handler.eval(context)).reward == 0.0, repr(answer)[:60]
        context.answer = {"choice": "b", "number": "7900 cm", "text": "79"}[kind]
        assert (await handler.eval(context)).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("(B) 79", 1.0), (f"{'gold ' * 200}, 72", None), ("B" * (MAX_ANSWER_CHARS + 1), 0.0), (None, 0.0)],
)
async def test_a_recorded_answer_is_graded_as_it_was(rig, answer, reward):
    async with open_task(rig, None) as (handler, context):
        context.answer = answer
        evaluation = await handler.eval(context)
        assert evaluation.details | handler.gradable(context) == evaluation.details
        context.answer = None
        handler.restore(context, Recorded(details=evaluation.details, stop_reason="finished"))
        assert await handler.eval(context) == evaluation
    assert reward is None or evaluation.reward == reward


async def test_an_outcome_without_an_answer_cannot_be_graded_again(rig):
    async with open_task(rig, None) as (handler, context):
        with pytest.raises(NotRestorable, match=r"details\.answer is missing"):
            handler.restore(context, Recorded(details={"searches": 1}, stop_reason="finished"))


async def test_a_task_whose_unit_is_none_has_no_verdict(rig):
    task = instance({"kind": "number", "answer": 5, "unit": "zorks"})
    async with open_task(rig, None, task) as (handler, context):
        context.answer = "5 m"
        with pytest.raises(EvaluationError, match="the task's unit 'zorks'"):
            await handler.eval(context)
