"""Rollouts by REST, over a fake node: submitting, waiting, cancelling, results, with their errors."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from prorl_trio.sessions.limits import SessionLimits
from prorl_trio.types.models import Outcome
from support.fake_node import make_spec
from support.fake_rest import open_rest
from support.sessions import ended, sessions_in, submit

pytestmark = pytest.mark.timeout(30)


def body(job_id, **fields):
    return msgspec.to_builtins(msgspec.structs.replace(make_spec(job_id), **fields))


def error(answer):
    return answer.status, answer.json()["error"]["code"], answer.json()["error"]["path"]


# ---------------------------------------------------------------- submit


async def test_submit_wait_and_take_the_result(node):
    async with open_rest(node) as rest:
        answer = await rest.call("POST", "/v1/rollouts", body("j"))
        assert answer.status == 202
        (job,) = answer.json()["jobs"]
        assert (job["job_id"], job["accepted"], job["status"]) == ("j", True, "queued")
        outcome = node.finish("j")
        answer = await rest.call("GET", "/v1/rollouts/j")
        assert (answer.status, answer.json()["status"]) == (200, "completed")
        segment = answer.json()["outcome"]["trajectory"]["segments"][0]
        want = outcome.trajectory.segments[0]
        assert base64.b64decode(segment["token_ids"]) == want.token_ids_le
        assert np.frombuffer(base64.b64decode(segment["logprobs"]), "<f4").tolist() == want.logprobs.tolist()


async def test_outcomes_as_lists_and_as_msgpack(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        outcome = node.finish("j")
        want = outcome.trajectory.segments[0]
        answer = await rest.call("GET", "/v1/rollouts/j?arrays=list")
        segment = answer.json()["outcome"]["trajectory"]["segments"][0]
        assert segment["token_ids"] == want.token_ids.tolist()
        assert segment["logprobs"] == want.logprobs.tolist()
        assert segment["loss_mask"] == want.loss_mask.tolist()
        answer = await rest.call("GET", "/v1/rollouts/j", headers={"Accept": "application/msgpack"})
        assert answer.headers["content-type"] == "application/msgpack"
        packed = msgspec.msgpack.decode(answer.body)["outcome"]
        assert msgspec.convert(packed, Outcome) == outcome


async def test_wait_on_submission_answers_with_the_outcome_or_the_status(node):
    async with open_rest(node) as rest, trio.open_nursery() as nursery:
        answers = []

        async def submit(wait):
            answers.append(await rest.call("POST", f"/v1/rollouts?wait={wait}", body("j")))

        await submit(0.01)
        assert (answers[0].status, answers[0].json()["jobs"][0]["outcome"]) == (202, None)
        nursery.start_soon(submit, 20)
        nursery.start_soon(submit, 20)
        await node.wait_live(1)
        node.finish("j")
        nursery.cancel_scope.deadline = trio.current_time() + 10
        while len(answers) < 3:
            await trio.sleep(0.01)
        assert [answer.status for answer in answers[1:]] == [200, 200]
        assert all(answer.json()["jobs"][0]["outcome"]["reward"] == 1.0 for answer in answers[1:])


async def test_batch_tells_of_each_job(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("taken"))
        jobs = [body("a"), {**body("b"), "max_turns": "x"}, body("taken", max_turns=3), make_spec("d", handler="no")]
        answer = await rest.call("POST", "/v1/rollouts", {"jobs": [msgspec.to_builtins(job) for job in jobs]})
        assert answer.status == 207
        told = answer.json()["jobs"]
        assert [job["accepted"] for job in told] == [True, False, False, False]
        codes = [(job["error"]["code"], job["error"]["path"]) for job in told[1:]]
        assert codes == [
            ("malformed", "$.jobs[1].max_turns"),
            ("duplicate_job", ""),
            ("unknown_handler", ""),
        ]
        assert [job["job_id"] for job in told] == ["a", "b", "taken", "d"]


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        (b"", "$"),
        (b"[1]", "$"),
        (b"\xff\xfe", "$"),
        (b'{"jobs": 3}', "$.jobs"),
        (b'{"jobs": []}', "$.jobs"),
        (b'{"job_id": "x", "instance": {"instance_id": "i", "handler": 3}}', "$.instance.handler"),
        (b"[" * 100_000, "$"),
    ],
)
async def test_what_is_no_job_is_422_with_the_field(node, sent, path):
    async with open_rest(node) as rest:
        assert error(await rest.call("POST", "/v1/rollouts", sent)) == (422, "malformed", path)
        assert node.submitted == []


async def test_number_that_the_wire_has_not_is_422(node):
    async with open_rest(node) as rest:
        sent = b'{"job_id":"x","instance":{"instance_id":"i","handler":"fake","payload":{"n":%d}}}' % 10**30
        assert error(await rest.call("POST", "/v1/rollouts", sent))[:2] == (422, "malformed")


async def test_same_id_with_another_spec_is_409_and_the_same_spec_joins(node):
    async with open_rest(node) as rest:
        for _ in range(2):
            assert (await rest.call("POST", "/v1/rollouts", body("j"))).status == 202
        assert error(await rest.call("POST", "/v1/rollouts", body("j", max_turns=2)))[:2] == (409, "duplicate_job")
        assert len(node.submitted) == 1


async def test_full_session_is_429_with_retry_after(node, nursery):
    async with open_rest(node, sessions=sessions_in(nursery, SessionLimits(max_undelivered=1))) as rest:
        await rest.call("POST", "/v1/rollouts", body("a"))
        answer = await rest.call("POST", "/v1/rollouts", body("b"))
        assert error(answer)[:2] == (429, "admission")
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["retry_after_s"] == 1.0


async def test_draining_node_is_503(node):
    node.draining = True
    async with open_rest(node) as rest:
        assert error(await rest.call("POST", "/v1/rollouts", body("a")))[:2] == (503, "draining")
        answer = await rest.call("GET", "/readyz")
        assert (answer.status, answer.json()) == (503, {"ready": False, "reason": "the node is draining"})


# ---------------------------------------------------------------- look, wait, cancel


async def test_many_waits_on_one_job_all_get_its_outcome(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        answers = []

        async def wait():
            answers.append(await rest.call("GET", "/v1/rollouts/j?wait=20"))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(wait)
            await trio.sleep(0.05)
            assert answers == []
            node.finish("j")
        assert [answer.status for answer in answers] == [200] * 20


async def test_wait_that_is_over_tells_how_the_job_stands(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        node.advance("j", "run")
        answer = await rest.call("GET", "/v1/rollouts/j?wait=0.01")
        assert (answer.status, answer.json()["status"], answer.json()["outcome"]) == (202, "run", None)


async def test_list_filters(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts?session=one", body("a", group_id="g", tags={"k": "v"}))
        await rest.call("POST", "/v1/rollouts", body("b", group_id="g"), headers={"X-Session-Id": "two"})
        node.advance("b", "run")

        async def ids(query):
            answer = await rest.call("GET", f"/v1/rollouts?{query}")
            return [job["job_id"] for job in answer.json()["jobs"]], answer.json()["total"]

        assert await ids("") == (["a", "b"], 2)
        assert await ids("group=g&limit=1") == (["a"], 2)
        assert await ids("session=two") == (["b"], 1)
        assert await ids("status=run") == (["b"], 1)
        assert await ids("tag=k:v") == (["a"], 1)
        assert await ids("tag=k:v&tag=x:y") == ([], 0)
        assert error(await rest.call("GET", "/v1/rollouts?tag=k")) == (422, "malformed", "query.tag")
        assert error(await rest.call("GET", "/v1/rollouts?limit=0")) == (422, "malformed", "query.limit")
        assert error(await rest.call("GET", "/v1/rollouts?nonsense=0"))[:2] == (422, "malformed")


async def test_delete_cancels_then_forgets_then_knows_nothing(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        answer = await rest.call("DELETE", "/v1/rollouts/j")
        assert (answer.status, answer.json()["status"], answer.json()["forgotten"]) == (200, "cancelled", False)
        assert node.live == {}
        assert (await rest.call("GET", "/v1/rollouts/j")).json()["outcome"]["status"] == "cancelled"
        assert (await rest.call("DELETE", "/v1/rollouts/j")).json()["forgotten"] is True
        for method in ("GET", "DELETE"):
            assert error(await rest.call(method, "/v1/rollouts/j"))[:2] == (404, "unknown_job")
        assert (await rest.call("POST", "/v1/rollouts", body("j", max_turns=5))).status == 202


async def test_delete_drops_no_outcome_that_another_sessions_trainer_has_not_taken(node):
    async with open_rest(node) as rest:
        trainers, _ = rest.sessions.open("a trainer's", 0)
        await submit(trainers, node, *map(make_spec, "abc"))
        for name in ("a", "b", "c"):
            node.finish(name)
        await ended(trainers, 3)
        answer = await rest.call("DELETE", "/v1/rollouts/b")
        assert error(answer)[:2] == (409, "undelivered")
        assert 'session "a trainer\'s"' in answer.json()["error"]["message"]
        listener = Listener()
        feed = trainers.attach(listener, 0, 1)
        by_name = {"headers": {"X-Session-Id": "a trainer's"}}
        assert error(await rest.call("DELETE", "/v1/rollouts/b", **by_name))[:2] == (409, "undelivered")
        assert feed.next_frame() is not None
        trainers.detach(listener)
        assert (await rest.call("DELETE", "/v1/rollouts/b", **by_name)).json()["forgotten"] is True
        feed = trainers.attach(listener, 1, 1)
        trainers.ack(1)
        assert msgspec.msgpack.decode(feed.next_frame())["cursor"] == 3


class Listener:
    """A connection that nobody looks at."""

    reader_id = ""

    def wake(self):
        pass

    def event(self, event):
        pass

    def replaced(self):
        raise AssertionError


async def test_job_id_with_anything_in_it(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("a/b c?ü"))
        assert (await rest.call("GET", "/v1/rollouts/a/b%20c%3F%C3%BC")).json()["job_id"] == "a/b c?ü"


async def test_delete_of_a_group_cancels_its_jobs_only(node):
    async with open_rest(node) as rest:
        for job_id in ("a", "b"):
            await rest.call("POST", "/v1/rollouts", body(job_id, group_id="g"))
        await rest.call("POST", "/v1/rollouts", body("c"))
        assert (await rest.call("DELETE", "/v1/rollouts?group=g")).json() == {"cancelled": ["a", "b"]}
        assert list(node.live) == ["c"]
        assert error(await rest.call("DELETE", "/v1/rollouts"))[:2] == (422, "malformed")
        assert list(node.live) == ["c"]


# ---------------------------------------------------------------- results


async def test_results_are_kept_until_their_cursor_comes_back(node):
    async with open_rest(node) as rest:
        for job_id in ("a", "b", "c"):
            await rest.call("POST", "/v1/rollouts", body(job_id))
            node.finish(job_id)

        async def take(query):
            answer = (await rest.call("GET", f"/v1/results?{query}")).json()
            return [entry["job_id"] for entry in answer["results"]], answer["cursor"], answer["more"]

        assert await take("limit=2") == (["a", "b"], 2, True)
        assert await take("limit=2") == (["a", "b"], 2, True)
        assert await take("cursor=2") == (["c"], 3, False)
        assert await take("cursor=0") == (["c"], 3, False)
        assert await take("cursor=3") == ([], 3, False)
        assert error(await rest.call("GET", "/v1/results?cursor=4"))[:2] == (422, "protocol")


async def test_results_pass_over_what_was_forgotten(node):
    async with open_rest(node) as rest:
        for job_id in ("a", "b", "c"):
            await rest.call("POST", "/v1/rollouts", body(job_id))
            node.finish(job_id)
        await rest.call("DELETE", "/v1/rollouts/b")
        answer = (await rest.call("GET", "/v1/results")).json()
        assert [(entry["job_id"], entry["cursor"]) for entry in answer["results"]] == [("a", 1), ("c", 3)]


async def test_long_poll_ends_with_the_first_outcome(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        answers = []

        async def poll():
            answers.append((await rest.call("GET", "/v1/results?wait=20")).json())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll)
            await trio.sleep(0.05)
            node.finish("j")
        assert [entry["job_id"] for entry in answers[0]["results"]] == ["j"]
        assert (await rest.call("GET", "/v1/results?wait=0.01&cursor=1")).json()["results"] == []


async def test_disconnect_during_a_wait_loses_nothing(node):
    async with open_rest(node) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        for target in ("/v1/results?wait=20", "/v1/rollouts/j?wait=20"):
            with trio.move_on_after(0.05):
                await rest.call("GET", target)
        with trio.move_on_after(0.05):
            await rest.call("POST", "/v1/rollouts?wait=20", body("k"))
        assert set(node.live) == {"j", "k"}
        node.finish("j")
        assert [e["job_id"] for e in (await rest.call("GET", "/v1/results")).json()["results"]] == ["j"]


async def test_outcomes_nobody_takes_expire_and_are_counted(node):
    async with open_rest(node, results_retention_s=0.05) as rest:
        await rest.call("POST", "/v1/rollouts", body("j"))
        node.finish("j")
        while (await rest.call("GET", "/v1/rollouts/j")).status != 404:
            await trio.sleep(0.02)
        assert rest.sessions.get("rest").statistics()["expired_total"] == 1
