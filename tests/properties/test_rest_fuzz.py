"""Whatever a client sends, it is not the server's fault: a thousand broken requests, no 5xx, and the node serves on."""

from __future__ import annotations

import copy
from random import Random

import msgspec
import trio

from support.fake_node import FakeNode, make_spec
from support.fake_rest import open_rest

REQUESTS = 1000
TARGETS = {
    "/v1/rollouts": msgspec.to_builtins(make_spec("j", group_id="g", question="?")),
    "/v1/backends": {"url": "http://a", "weight": 2},
    "/v1/backends/drain": {"url": "http://a"},
    "/v1/backends/weight": {"url": "http://a", "weight": 2},
    "/v1/backends/pause": {"mode": "wait", "timeout_s": 1},
    "/v1/backends/weights": {"folder": "/w", "timeout_s": 1},
    "/v1/backends/resume": {"policy_version": "v"},
    "/process": {"instance": {"data_source": "x", "instance_id": 1}, "sampling_params": {"top_p": 1}, "job_id": "k"},
    "/cancel": {"job_id": "k"},
    "/add_llm_server": {"address": "a"},
}
VALUES = (None, True, -1, 0, 1e308, -1e-9, 10**30, "", "x" * 300, "\x00\n\u2028😀", [], {}, [[{}]], {"": None})
QUERIES = ("wait", "limit", "cursor", "session", "status", "tag", "group", "arrays", "url", "all", "nonsense")


def mutate(random, value):
    """A copy with one thing replaced, removed or added, at a random depth."""
    value = copy.deepcopy(value)
    place = value
    while True:
        name = random.choice(list(place) or ["new"])
        inner = place.get(name)
        if isinstance(inner, dict) and inner and random.random() < 0.7:
            place = inner
            continue
        match random.randrange(4):
            case 0:
                place.pop(name, None)
            case 1:
                place["unknown"] = random.choice(VALUES)
            case _:
                place[name] = random.choice(VALUES)
        return value


def broken(random, body):
    """The bytes of a request: JSON with something wrong, cut off, or no JSON at all."""
    kind = random.randrange(10)
    if kind == 0:
        return random.randbytes(random.randrange(200))
    content = msgspec.json.encode(mutate(random, body))
    if kind == 1:
        return content[: random.randrange(len(content))]
    if kind == 2:
        place = random.randrange(len(content))
        return content[:place] + random.randbytes(3) + content[place:]
    return b'{"jobs":[%s,%s]}' % (content, content) if kind == 3 else content


async def test_no_request_is_the_servers_fault():
    random, node = Random(1), FakeNode()
    with trio.fail_after(120):
        async with open_rest(node, prorl_compat=True, max_wait_s=0.01, prorl_compat_timeout_s=0.01) as rest:
            await rest.call("POST", "/start")
            statuses = set()
            for _ in range(REQUESTS):
                if random.random() < 0.8:
                    method, target = "POST", random.choice(list(TARGETS))
                    sent = broken(random, TARGETS[target])
                else:
                    method, sent = random.choice(["GET", "DELETE"]), b""
                    target = random.choice(["/v1/rollouts", "/v1/rollouts/j", "/v1/results", "/v1/backends"])
                    target += (
                        f"?{random.choice(QUERIES)}={random.choice(['', '-1', 'nan', 'inf', '1e9', 'x', '%ff', '2'])}"
                    )
                answer = await rest.call(method, target, sent)
                # 503 and 504 say of `/process` that no backend is there, and that a job takes its time.
                assert answer.status < 500 or (target == "/process" and answer.status in (503, 504)), (
                    target,
                    sent,
                    answer.body,
                )
                assert answer.status < 400 or answer.json()["error"]["message"], (target, sent)
                statuses.add(answer.status)
            assert {200, 202, 422, 404} <= statuses
            assert (await rest.call("GET", "/healthz")).status == 200
