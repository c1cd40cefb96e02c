"""A client written for the ProRL Agent server, over a fake node."""

from __future__ import annotations

import base64
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import trio

from prorl_trio.chat.format import ChatFormat
from prorl_trio.config import RestConfig
from prorl_trio.edges.prorl_compat.endpoints import Asked, ProcessRequest, make_result
from prorl_trio.edges.prorl_compat.endpoints import make_spec as make_spec_of
from prorl_trio.tasks.sets.swe_rows import read_specifications
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import ConfigError, MalformedJob
from prorl_trio.types.models import ChatMessage, Segment, ToolCall, Trajectory, Turn
from support.fake_node import make_outcome, make_spec
from support.fake_rest import TOKEN, open_rest

OPENING = [ChatMessage(role="system", content="You calculate."), ChatMessage(role="user", content="What is 6*7?")]
REMINDER = [ChatMessage(role="user", content="Go on.")]
TOOLS = [{"type": "function", "function": {"name": "ipython", "description": "", "parameters": {"type": "object"}}}]
SOURCES = {"deepscaler": "fake", "mathy": "math"}


pytestmark = pytest.mark.timeout(30)


def open_compat(node, **rest):
    return open_rest(node, **{"prorl_compat": True, "data_sources": SOURCES, "allowed": ["*"], **rest})


def request(job_id="j", **fields):
    instance = {"data_source": "deepscaler", "instance_id": 7, "trajectory_id": 1, "prompt": "6*7?", **fields}
    return {"instance": instance, "sampling_params": {"temperature": 0.5, "model": "x"}, "job_id": job_id}


async def begin(rest, node):
    assert (await rest.call("POST", "/start")).json() == {"status": "Server started successfully"}
    await rest.call("POST", "/add_llm_server", {"address": "10.0.0.1:8000"})
    assert node.backends.urls() == ("http://10.0.0.1:8000",)


class Asking:
    """A /process in the background."""

    def __init__(self, nursery, rest, sent):
        self.answer = None
        self.done = trio.Event()
        nursery.start_soon(self._ask, rest, sent)

    async def _ask(self, rest, sent):
        self.answer = await rest.call("POST", "/process", sent)
        self.done.set()

    async def result(self):
        await self.done.wait()
        return self.answer.status, self.answer.json()


def two_turns(spec):
    segment = Segment.from_arrays(
        np.arange(100, 112), np.linspace(-1, 0, 12, dtype="<f4"), [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1], []
    )
    call = ToolCall(name="ipython", arguments={"code": "6*7"}, raw="<call/>")
    turns = [
        Turn(segment=0, completion_start=3, completion_end=5, text="let me", finish_reason="stop", tool_calls=[call],
             observations=["42"], inference_s=1.0, tools_s=1.0, messages=OPENING),
        Turn(segment=0, completion_start=8, completion_end=12, text="42", finish_reason="stop", tool_calls=[],
             observations=[], inference_s=1.0, tools_s=1.0, messages=REMINDER),
    ]  # fmt: skip
    trajectory = Trajectory(segments=[segment], turns=turns, stop_reason="finished", tools=TOOLS)
    return msgspec.structs.replace(make_outcome(spec), trajectory=trajectory), segment


async def test_process_blocks_until_the_result_and_has_the_tokens_message_by_message(node):
    async with open_compat(node) as rest, trio.open_nursery() as nursery:
        await begin(rest, node)
        asking = Asking(nursery, rest, request())
        await node.wait_live(1)
        spec = node.live["j"]
        assert (spec.sampling.temperature, spec.instance.instance_id) == (0.5, "7")
        status = (await rest.call("GET", "/status")).json()
        assert (status["status"], status["running"], status["pending_jobs"]) == ("running", True, 1)
        outcome, segment = two_turns(spec)
        node.read_turn = lambda ids, tools: ("let me\n<call/>", outcome.trajectory.turns[0].tool_calls[:1])
        node.finish("j", outcome)
        code, result = await asking.result()
        assert code == 200
        assert (result["instance_id"], result["trajectory_id"], result["resolved"], result["reward"]) == (
            "7",
            1,
            True,
            1.0,
        )
        assert (result["critical_error"], result["filter"], result["finish"], result["error"]) == (
            None,
            False,
            True,
            None,
        )
        messages = result["messages"]
        assert [(message["role"], message["content"]) for message in messages] == [
            ("system", "You calculate."),
            ("user", "What is 6*7?"),
            ("assistant", "let me"),
            ("tool", "42"),
            ("user", "Go on."),
            ("assistant", "let me"),
        ]
        assert messages[2]["tool_calls"] == [{"name": "ipython", "arguments": '{"code":"6*7"}'}]
        assert result["tools"] == TOOLS
        assert [token for message in messages for token in message["token_ids"]] == segment.token_ids.tolist()
        assert messages[5]["input_ids"] == segment.token_ids[:8].tolist()
        assert messages[5]["logprobs"] == segment.logprobs[8:].tolist()
        assert [message["input_ids"] is None for message in messages] == [True, True, False, True, True, False]
        assert set(result["timing"]) == {
            "init_time", "run_time", "eval_time", "others_time", "counted_elapsed", "timeout_triggered"
        }  # fmt: skip


async def test_cancel_resolves_process_at_once_with_a_cancelled_result(node):
    async with open_compat(node) as rest, trio.open_nursery() as nursery:
        await begin(rest, node)
        asking = Asking(nursery, rest, request())
        await node.wait_live(1)
        assert (await rest.call("POST", "/cancel", {"job_id": "j"})).json() == {"status": "Cancel requested for job j"}
        code, result = await asking.result()
        assert (code, result["critical_error"], result["resolved"]) == (200, "cancelled", False)
        assert (result["reward"], result["filter"], result["success"]) == (None, True, False)
        assert (await rest.call("POST", "/cancel", {"job_id": "j"})).status == 200
        answer = await rest.call("POST", "/cancel", {"job_id": "never"})
        assert (answer.status, answer.json()) == (200, {"status": "Cancel requested for job never"})


async def test_same_job_id_joins_live_and_ended(node):
    async with open_compat(node) as rest, trio.open_nursery() as nursery:
        await begin(rest, node)
        both = [Asking(nursery, rest, request()) for _ in range(2)]
        await node.wait_live(1)
        other = await rest.call("POST", "/process", request(prompt="another"))
        assert other.status == 409
        with trio.move_on_after(0.05):
            await rest.call("POST", "/process", request())
        node.finish("j")
        assert [(await asking.result())[0] for asking in both] == [200, 200]
        assert (await rest.call("POST", "/process", request())).json()["reward"] == 1.0
        assert len(node.submitted) == 1
        Asking(nursery, rest, request(prompt="another"))
        await node.wait_live(1)
        node.finish("j")


async def test_stop_cancels_the_jobs_answers_who_waits_and_leaves_the_node(node):
    async with open_compat(node) as rest, trio.open_nursery() as nursery:
        await begin(rest, node)
        asking = [Asking(nursery, rest, request(str(index))) for index in range(10)]
        await node.wait_live(10)
        assert (await rest.call("POST", "/stop")).json() == {"status": "Server stopped successfully"}
        results = [await one.result() for one in asking]
        assert {(code, result["critical_error"]) for code, result in results} == {(200, "cancelled")}
        assert not node.draining
        for method, path, sent in (
            ("POST", "/stop", None),
            ("GET", "/status", None),
            ("POST", "/process", request()),
            ("POST", "/cancel", {"job_id": "j"}),
        ):
            answer = await rest.call(method, path, sent)
            assert (answer.status, answer.json()["error"]["code"]) == (503, "not_running")
        assert (await rest.call("POST", "/start")).status == 200
        answer = await rest.call("POST", "/start")
        assert (answer.status, answer.json()["detail"]) == (400, "Server is already running")
        assert (await rest.call("GET", "/status")).json()["pending_jobs"] == 0


async def test_errors_of_process(node):
    async with open_compat(node, prorl_compat_timeout_s=0.05) as rest:
        await rest.call("POST", "/start")
        answer = await rest.call("POST", "/process", request())
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_llm_server")
        await rest.call("POST", "/add_llm_server", {"address": "http://a"})
        for sent, status, path in (
            (b"nonsense", 422, "$"),
            ({"instance": 3}, 422, "$.instance"),
            (request(data_source="other"), 400, "$.instance.data_source"),
            (request(data_source="mathy", prompt=3), 422, "$.instance.prompt"),
            (request(data_source="mathy"), 422, "$.instance"),
            ({**request(), "sampling_params": {"temperature": "hot"}}, 422, "$.sampling_params.temperature"),
            ({**request(), "sampling_params": {"top_p": 3}}, 422, "$"),
        ):
            answer = await rest.call("POST", "/process", sent)
            assert (answer.status, answer.json()["error"]["path"]) == (status, path), sent
            assert answer.json()["detail"]
        answer = await rest.call("POST", "/process", request())
        assert (answer.status, answer.json()["error"]["code"]) == (504, "timeout")
        assert list(node.live) == ["j"]


async def test_infrastructure_failure_is_filtered_and_has_no_reward(node):
    async with open_compat(node) as rest, trio.open_nursery() as nursery:
        await begin(rest, node)
        asking = Asking(nursery, rest, request())
        await node.wait_live(1)
        outcome = make_outcome(node.live["j"], reward=None)
        node.finish("j", msgspec.structs.replace(outcome, status="timed_out", cause="sandbox", error="slow"))
        _, result = await asking.result()
        assert (result["critical_error"], result["filter"], result["reward"], result["resolved"], result["error"]) == (
            "timeout", True, None, False, "slow"
        )  # fmt: skip


SAID = [{"role": "system", "content": "s"}, {"role": "user", "content": "6*7?"}]


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param("6*7?", id="text"),
        pytest.param(SAID, id="messages"),
        pytest.param(msgspec.json.encode(SAID).decode(), id="messages as JSON"),
        pytest.param([*SAID, {"role": "assistant", "content": "Hm"}], id="not the last message"),
        pytest.param([{"role": "user", "content": [{"type": "text", "text": "6*7?"}]}], id="in parts"),
    ],
)
async def test_math_instance_becomes_question_and_answer(node, prompt):
    async with open_compat(node) as rest:
        await begin(rest, node)
        sent = request(data_source="mathy", prompt=prompt, reward_model={"ground_truth": 42})
        taken = []
        node.check, node.take = (lambda *_: None), (lambda spec, _sink, _attempt: taken.append(spec))
        with trio.move_on_after(0.2):
            await rest.call("POST", "/process", sent)
        assert (taken[0].instance.handler, taken[0].instance.payload) == ("math", {"question": "6*7?", "answer": "42"})


@pytest.mark.parametrize(("gold", "answer"), [(18, "18"), (["18", 19], ["18", "19"]), (1.5, "1.5")])
async def test_gold_answers_stay_what_they_are_and_limits_become_the_jobs(node, gold, answer):
    sent = request(data_source="mathy", reward_model={"ground_truth": gold})
    sent["sampling_params"] |= {"max_iterations": 35, "max_model_len": 4096, "max_output_tokens": 99}
    spec = make_spec_of(msgspec.convert(sent, ProcessRequest), SOURCES)
    assert spec.instance.payload["answer"] == answer
    assert (spec.max_turns, spec.max_trajectory_tokens, spec.sampling.max_output_tokens) == (35, 4096, 99)


PATCH = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1 +1 @@
-add = 1
+add = 2
"""


def test_a_published_row_of_swe_bench_becomes_the_handlers_payload(tmp_path):
    row = {"data_source": "swebench", "instance_id": "psf__requests-863", "repo": "psf/requests", "version": "2.3",
           "base_commit": "a0df2cb", "problem_statement": "It fails.", "patch": PATCH,
           "test_patch": PATCH.replace("calc.py", "tests/test_calc.py"),
           "FAIL_TO_PASS": '["tests/test_calc.py::test_add"]', "PASS_TO_PASS": "[]"}  # fmt: skip
    sent = msgspec.convert({"instance": row, "job_id": "j"}, ProcessRequest)
    sources = RestConfig().data_sources
    with pytest.raises(MalformedJob, match=r"nothing says how the tests of psf/requests 2\.3 are run"):
        make_spec_of(sent, sources)
    specs = tmp_path / "specs.json"
    specs.write_text('{"*": {"*": {"test_cmd": "pytest -rA"}}}')
    instance = make_spec_of(sent, sources, read_specifications(specs)).instance
    assert instance.handler == "swe"
    assert instance.payload["tests"]["fail_to_pass"] == ["tests/test_calc.py::test_add"]
    assert instance.payload["image"] == "docker://swebench/sweb.eval.x86_64.psf_1776_requests-863:latest"


async def test_a_question_that_only_looks_like_messages_is_one(node):
    async with open_compat(node) as rest:
        await begin(rest, node)
        taken = []
        node.check, node.take = (lambda *_: None), (lambda spec, _sink, _attempt: taken.append(spec))
        with trio.move_on_after(0.2):
            await rest.call(
                "POST",
                "/process",
                request(data_source="mathy", prompt="[1, 2] has how many?", reward_model={"ground_truth": "2"}),
            )
        assert taken[0].instance.payload["question"] == "[1, 2] has how many?"


async def test_a_client_that_works_on_text_gets_no_tokens(node):
    async with open_compat(node) as rest, trio.open_nursery() as nursery:
        await begin(rest, node)
        sent = request()
        sent["sampling_params"]["token_level_generation"] = False
        asking = Asking(nursery, rest, sent)
        await node.wait_live(1)
        node.finish("j", two_turns(node.live["j"])[0])
        _, result = await asking.result()
        assert [set(message) - {"tool_calls"} for message in result["messages"]] == [{"role", "content"}] * 6


async def test_what_was_written_as_a_call_is_no_text_and_what_was_not_is_no_call(node, tmp_path):
    """As the model's own format reads it: nothing is there twice, and nothing of what was said is lost."""
    tiny = make_tiny_model(tmp_path)
    chat_format = ChatFormat.load(tmp_path)
    good = '<tool_call>\n{"name": "ipython", "arguments": {"code": "6*7"}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "ipython", "arguments": {</tool_call>'
    fenced = "```python\n6*7\n```"
    texts = [f"I think so.\n{good}", f"And {broken}", f"Or {fenced}"]
    ids = [tiny.turn(text) for text in texts]
    starts = [sum(map(len, ids[:n])) for n in range(4)]
    implied = ToolCall(name="ipython", arguments={"code": "6*7"}, raw="6*7")
    turns = [
        Turn(segment=0, completion_start=start, completion_end=end, text="", finish_reason="stop",
             tool_calls=[implied], observations=["42"], inference_s=0.0, tools_s=0.0)
        for start, end in pairwise(starts)
    ]  # fmt: skip
    tokens = [token for each in ids for token in each]
    segment = Segment.from_arrays(tokens, [-0.5] * len(tokens), [1] * len(tokens), [])
    trajectory = Trajectory(segments=[segment], turns=turns, stop_reason="finished", tools=TOOLS)
    outcome = msgspec.structs.replace(make_outcome(make_spec("j")), trajectory=trajectory)
    result = make_result(outcome, Asked("q"), chat_format.read_turn)
    said = [message for message in result["messages"] if message["role"] == "assistant"]
    assert [message["content"] for message in said] == ["I think so.", f"And {broken}", f"Or {fenced}"]
    assert [message["tool_calls"] for message in said] == [
        [{"name": "ipython", "arguments": '{"code":"6*7"}'}], [], []
    ]  # fmt: skip


async def test_an_engine_is_known_by_its_openai_address_and_may_be_down(node):
    node.down_backends.add("http://b:8000")
    async with open_compat(node) as rest:
        for address in ("http://a:8000/v1", "a:8000", "http://a:8000/v1/"):
            assert (await rest.call("POST", "/add_llm_server", {"address": address})).status == 200
        assert node.backends.urls() == ("http://a:8000",)
        answer = await rest.call("POST", "/add_llm_server", {"address": "b:8000/v1"})
        assert (answer.status, answer.json()["status"].split(":")[0]) == (200, "Buffered LLM server b")
        assert node.listed("http://b:8000").state == "down"


async def test_backends_are_added_before_the_start_and_those_of_others_are_left_alone(node):
    node.unfit_backends.add("http://unfit")
    await node.backends.add("http://others")
    node.backends.drain("http://others")
    async with open_compat(node) as rest:
        for address in ("http://a", "http://others"):
            answer = await rest.call("POST", "/add_llm_server", {"address": address})
            assert answer.json() == {"status": f"Added LLM server {address}"}
        assert node.listed("http://others").state == "draining"
        assert (await rest.call("POST", "/add_llm_server", {"address": "http://unfit"})).status == 422
        assert (await rest.call("POST", "/add_llm_server", {"adress": "x"})).status == 422
        await node.backends.remove("http://a")
        await rest.call("POST", "/add_llm_server", {"address": "http://a"})
        await rest.call("POST", "/add_llm_server", {"address": "http://b"})
        await node.backends.remove("http://b")
        assert (await rest.call("POST", "/clear_llm_server")).json() == {"status": "Cleared all LLM servers"}
        assert node.backends.urls() == ("http://others",)


async def test_other_sessions_jobs_are_left_alone(node):
    async with open_compat(node) as rest:
        await begin(rest, node)
        job = msgspec.to_builtins(make_spec("theirs"))
        assert (await rest.call("POST", "/v1/rollouts?session=theirs", job)).status == 202
        assert (await rest.call("POST", "/cancel", {"job_id": "theirs"})).status == 200
        assert (await rest.call("POST", "/stop")).status == 200
        assert list(node.live) == ["theirs"]


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1:8000", []), ("127.9.9.9:1", []), ("localhost:8000", []), ("[::1]:8000", []),
        ("10.0.0.5:8000", ["*"]),
        ("10.0.0.5:8000", ["10.0.0.0/8"]), ("10.0.0.5:8000", ["10.0.0.5:8000"]), ("gpu1:8000/v1", ["gpu1"]),
        ("GPU1:8000", ["gpu1:8000"]), ("a.gpus.local:80", ["*.gpus.local"]), ("[fd00::5]:80", ["[fd00::/8]:80"]),
    ],
)  # fmt: skip
async def test_engines_are_contacted_where_the_configuration_allows_it(node, address, allowed):
    async with open_compat(node, allowed=allowed) as rest:
        assert (await rest.call("POST", "/add_llm_server", {"address": address})).status == 200


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("169.254.169.254:80", []), ("10.0.0.5:8000", []), ("gpu1:8000", []), ("0.0.0.0:8000", []),
        ("2130706433:80", []),
        ("127.0.0.1.evil.example:8000", []), ("localhost.evil.example:80", []), ("127.0.0.1:80@evil.example:80", []),
        ("http://evil.example#127.0.0.1", []), ("http://evil.example?127.0.0.1", []), ("http://[::1", []), ("", []),
        ("127.0.0.1:8000", ["10.0.0.0/8"]), ("11.0.0.5:8000", ["10.0.0.0/8"]), ("10.0.0.5:22", ["10.0.0.5:8000"]),
        ("gpus.local:80", ["*.gpus.local"]), ("evilgpus.local:80", ["*.gpus.local"]), ("gpu1:22", ["gpu1:8000"]),
        ("10.evil.example:80", ["10.0.0.0/8"]), ("[fd00::5]:81", ["[fd00::/8]:80"]),
    ],
)  # fmt: skip
async def test_engines_are_contacted_nowhere_else(node, address, allowed):
    async with open_compat(node, allowed=allowed) as rest:
        answer = await rest.call("POST", "/add_llm_server", {"address": address})
        assert (answer.status, answer.json()["error"]["code"]) == (403, "backend_not_allowed")
        assert "backends.allowed" in answer.json()["detail"]
        assert "restart the node" in answer.json()["detail"]
        assert node.backends.urls() == ()


NO_TOKEN = {"Authorization": ""}


async def test_they_ask_for_the_token_unless_that_is_turned_off(node):
    for open_to_all in (False, True):
        async with open_compat(node, **({"prorl_compat_token": False} if open_to_all else {})) as rest:
            for path in ("/start", "/add_llm_server", "/process", "/cancel", "/stop", "/clear_llm_server"):
                answer = await rest.call("POST", path, headers=NO_TOKEN)
                assert (answer.status == 401) is not open_to_all, path
            assert (await rest.call("GET", "/v1/status", headers=NO_TOKEN)).status == 401


@pytest.mark.parametrize("where", [{"host": "0.0.0.0"}, {"sandbox_network": True}])
async def test_no_token_is_refused_where_others_could_come(node, where):
    with pytest.raises(ConfigError, match="prorl_compat_token"):
        async with open_compat(node, prorl_compat_token=False, **where):
            pass


async def test_the_token_may_come_as_a_password_in_the_url(node):
    async with open_compat(node, prorl_compat_token=True) as rest:
        for credentials, status in ((f"any:{TOKEN}", 200), (f":{TOKEN}", 400), ("any:wrong", 401), (TOKEN, 401)):
            basic = base64.b64encode(credentials.encode()).decode()
            answer = await rest.call("POST", "/start", headers={"Authorization": f"Basic {basic}"})
            assert answer.status == status, credentials
        answer = await rest.call("POST", "/start", headers={"Authorization": "Basic ???"})
        assert answer.status == 401
