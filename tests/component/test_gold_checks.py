"""Gold answers that no grader reads are refused before a rollout is paid for: at submit over every edge, at load."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from prorl_trio import BlockingClient, connect
from prorl_trio.agent.scoring import NotScored
from prorl_trio.http.client import HttpClient
from prorl_trio.tasks.handlers.gold_checks import GoldChecks
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.tasks.sets import load_task_set, task_checks
from prorl_trio.types.errors import ConfigError, EvaluationError, MalformedJob
from prorl_trio.types.models import JobSpec, TaskInstance
from support.fake_node import FakeNode
from support.fake_rest import open_rest
from support.quick_node import AnswersOnly, open_quick_node

MODULE = "checks_under_test"
SOURCE = """
import os, time
from pathlib import Path
CALLS = Path(__file__).with_name("calls")
def check(call):
    answer = call["payload"]["answer"]
    with CALLS.open("a") as file: file.write(answer + "\\n")
    if answer == "unreadable":
        return {"error": "the gold answer is no number: write one", "path": "$.instance.payload.answer"}
    if answer == "raises": raise RuntimeError("no such thing")
    if answer == "exits": os._exit(3)
    if answer == "hangs": time.sleep(1000)
    return {"error": "", "path": ""}
"""
PATH = "$.instance.payload.answer"


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A scorer of gold answers; returns a function that returns the answers it was asked about."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "calls"
    return lambda: file.read_text().splitlines() if file.exists() else []


class Checked(AnswersOnly):
    """Mathematics whose gold answers are checked by the module of the fixture."""

    gold_check = f"{MODULE}:check"


def spec(job_id, answer, question="6 * 7?"):
    payload = {"question": question, "answer": answer}
    return JobSpec(job_id=job_id, instance=TaskInstance(instance_id=answer, handler="math", payload=payload))


@pytest.mark.timeout(120)
async def test_a_node_refuses_it_over_every_edge_and_checks_a_payload_once(calls, monkeypatch):
    monkeypatch.setattr("support.quick_node.AnswersOnly", Checked)
    async with open_quick_node() as node:
        async with connect(node.url, node.token) as client:
            jobs = [spec("a", "42"), spec("b", "unreadable"), spec("c", "42"), spec("d", "unreadable"), spec("e", "43")]
            accepted, refused, _, again, _ = await client.submit(jobs)
            assert accepted.job_id == "a"
            assert (refused.code, refused.message) == ("malformed", "the gold answer is no number: write one")
            assert refused.path == again.path == PATH
            assert sorted(calls()) == ["42", "43", "unreadable"]
            answers = await client.submit([*jobs, spec("f", "42"), spec("g", "raises"), spec("h", "exits")])
            assert [getattr(each, "code", "") for each in answers[:6]] == ["", "malformed", "", "malformed", "", ""]
            assert answers[6].message == "the gold answer cannot be graded: RuntimeError: no such thing"
            assert "exit status 3" in answers[7].message
            assert sorted(calls()) == ["42", "43", "exits", "raises", "unreadable"]

        def submit():
            with BlockingClient(node.url, node.token) as client:
                return client.submit([spec("i", "unreadable")])

        (refused,) = await trio.to_thread.run_sync(submit)
        assert (refused.code, refused.path) == ("malformed", PATH)
        answer = await post(node, "/v1/rollouts", spec("j", "unreadable"))
        assert answer["error"]["code"] == "malformed"
        assert answer["error"]["path"] == PATH
        assert calls().count("unreadable") == 1


@pytest.mark.timeout(120)
async def test_a_node_that_ends_waits_for_no_check_and_leaves_no_process(calls, monkeypatch):
    monkeypatch.setattr("support.quick_node.AnswersOnly", Checked)
    async with open_quick_node() as node, trio.open_nursery() as nursery:
        client = await nursery.start(hold_client, node)
        nursery.start_soon(client.submit, [spec("a", "hangs")])
        while calls() != ["hangs"]:
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert not [line for line in command_lines() if MODULE in line]


async def hold_client(node, task_status):
    async with connect(node.url, node.token) as client:
        task_status.started(client)
        await trio.sleep_forever()


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_text(errors="replace")


async def post(node, path, body):
    headers = [("Authorization", f"Bearer {node.token}"), ("Content-Type", "application/json")]
    http = HttpClient(node.rest_url)
    reply = await http.request("POST", path, body=msgspec.json.encode(body), headers=headers, timeout_s=20)
    http.close()
    return msgspec.json.decode(reply.body)


class RefusingNode(FakeNode):
    """A node that finds out only by `examine` that nothing can be graded."""

    def __init__(self):
        super().__init__()
        self.examined = []

    def is_unexamined(self, spec):
        return spec.job_id not in self.examined

    async def examine(self, specs):
        await trio.lowlevel.checkpoint()
        self.examined += [spec.job_id for spec in specs]

    def check(self, spec, sink, ahead):
        super().check(spec, sink, ahead)
        assert spec.job_id in self.examined
        raise MalformedJob("the gold answer is no number: write one", PATH)


async def test_a_client_of_the_prorl_agent_server_is_told_as_well():
    node = RefusingNode()
    async with open_rest(node, prorl_compat=True, data_sources={"mathy": "fake"}) as rest:
        await rest.call("POST", "/start")
        await rest.call("POST", "/add_llm_server", {"address": "127.0.0.1:8000"})
        instance = {"data_source": "mathy", "instance_id": 7, "trajectory_id": 1, "prompt": "6*7?"}
        answer = await rest.call("POST", "/process", {"instance": instance, "sampling_params": {}, "job_id": "j"})
    assert answer.status == 422
    assert "the gold answer is no number" in answer.body.decode()


# ---------------------------------------------------------------- whose fault it is


class Scorers:
    """A pool of scoring processes that answers as it is told."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), 0

    async def score(self, function, payload, *, timeout_s):
        self.calls += 1
        await trio.lowlevel.checkpoint()
        answer = self.answers.pop(0)
        if answer is None:
            await trio.sleep_forever()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def examined(scorers, *payloads, timeout_s=10.0):
    checks, handler = GoldChecks(scorers), Checked()
    await checks.examine([(handler, each) for each in payloads], timeout_s=timeout_s)
    return checks, handler


MATHS = {"question": "?", "answer": "1"}


@pytest.mark.parametrize(
    ("answer", "is_refused"),
    [
        ({"error": "", "path": ""}, False),
        ({}, True),
        ({"equal": True}, True),
        ({"error": "no number", "path": PATH}, True),
        ({"error": "no number"}, True),
        (EvaluationError("the scorer used up its CPU time", error_code="evaluator_timeout"), True),
        (NotScored("no process starts"), False),
        (OSError(24, "Too many open files"), False),
    ],
)
async def test_only_what_the_check_found_refuses_a_row(answer, is_refused):
    scorers = Scorers(answer)
    checks, handler = await examined(scorers, MATHS)
    assert (checks.refusal(handler, MATHS) is not None) == is_refused
    assert not checks.is_unknown(handler, MATHS)


async def test_a_slow_machine_refuses_nothing_and_is_waited_for_once(autojump_clock, caplog):
    checks, handler = await examined(Scorers(None), MATHS, timeout_s=30)
    assert trio.current_time() > 29
    assert checks.refusal(handler, MATHS) is None
    assert not checks.is_unknown(handler, MATHS)
    assert "1 gold answers are not checked" in caplog.text


async def test_a_check_that_is_cut_short_decides_nothing():
    checks, handler = GoldChecks(Scorers(None)), Checked()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(checks.examine, [(handler, MATHS)], timeout_s=1000))
            await trio.testing.wait_all_tasks_blocked()
            await checks.aclose()
            assert checks.is_unknown(handler, MATHS)
        await checks.examine([(handler, MATHS)], timeout_s=1000)


async def test_the_same_payload_at_the_same_time_is_checked_once():
    scorers = Scorers({"error": "no", "path": PATH})
    checks, handler = GoldChecks(scorers), Checked()
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(partial(checks.examine, [(handler, MATHS)] * 3, timeout_s=10))
    assert scorers.calls == 1


async def test_no_check_is_made_where_there_is_none_or_the_payload_is_malformed():
    scorers = Scorers()
    checks, handler = await examined(scorers, {"question": "?"})
    assert checks.is_unknown(handler, {"question": "?"})
    assert not checks.is_unknown(MathHandlerWithout(), MATHS)
    await checks.examine([(MathHandlerWithout(), MATHS)], timeout_s=10)
    assert scorers.calls == 0


class MathHandlerWithout(MathHandler):
    gold_check = ""


# ---------------------------------------------------------------- at load


@pytest.fixture
def checked_at_load(calls, monkeypatch):
    monkeypatch.setattr(task_checks, "_handler", lambda name: Checked() if name == "math" else None)
    return calls


def rows_file(folder, *answers):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"problem": "?", "answer": answer}) for answer in answers))
    return path


@pytest.mark.timeout(60)
def test_every_gold_answer_that_cannot_be_graded_is_named_at_load(checked_at_load, tmp_path):
    path = rows_file(tmp_path, "1", "unreadable", "2", "raises", "unreadable")
    with pytest.raises(ConfigError) as caught:
        load_task_set(str(path))
    assert str(caught.value).splitlines() == [
        f"{path}: 3 of 5 rows cannot be used, so none is:",
        "  line 2, field `payload.answer`: the gold answer is no number: write one",
        "  line 4, field `payload`: the gold answer cannot be graded: RuntimeError: no such thing",
        "  line 5, field `payload.answer`: the gold answer is no number: write one",
        "Correct them, or use the other 2 rows with --skip-bad (skip_bad=True).",
    ]
    assert len(load_task_set(str(path), skip_bad=True)) == 2
    assert sorted(checked_at_load()) == ["1", "2", "raises", "unreadable"]


@pytest.mark.timeout(60)
def test_a_set_that_was_found_sound_is_not_graded_again_until_it_or_its_grader_changes(checked_at_load, tmp_path):
    path = rows_file(tmp_path, "1", "2", "2")
    for _ in range(2):
        load_task_set(str(path))
    assert sorted(checked_at_load()) == ["1", "2"]
    load_task_set(str(rows_file(tmp_path, "1", "3")))
    assert sorted(checked_at_load()) == ["1", "1", "2", "3"]
    (tmp_path / f"{MODULE}.py").write_text(SOURCE + "\n# changed")
    load_task_set(str(path))
    assert len(checked_at_load()) == 6


@pytest.mark.timeout(60)
def test_a_set_whose_check_could_not_be_carried_out_is_loaded_and_checked_next_time(checked_at_load, tmp_path, caplog):
    path, module = rows_file(tmp_path, "1", "unreadable"), tmp_path / f"{MODULE}.py"
    module.write_text("import no_such_package")
    assert len(load_task_set(str(path))) == 2
    assert "a gold answer is not checked" in caplog.text
    module.write_text(SOURCE)
    with pytest.raises(ConfigError, match="1 of 2 rows cannot be used"):
        load_task_set(str(path))


@pytest.mark.timeout(60)
async def test_a_set_can_be_loaded_inside_of_a_trio_program(checked_at_load, tmp_path):
    assert len(load_task_set(str(rows_file(tmp_path, "1")))) == 1


def test_a_handler_that_is_not_installed_here_is_left_to_the_node(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"instance_id": "a", "handler": "elsewhere", "payload": {}}')
    with caplog.at_level(logging.WARNING):
        assert load_task_set(str(path))[0].handler == "elsewhere"
    assert "handler 'elsewhere' is not installed here" in caplog.text
