"""Rollouts over REST with the standard library alone, for scripts that have nothing of this project installed.

PRORL_REST=http://127.0.0.1:8700 PRORL_TOKEN=... python examples/rest.py

For a node, see `examples/local_node.py`; the description of all endpoints is at `$PRORL_REST/docs`.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

REST = os.environ["PRORL_REST"]
HEADERS = {"Authorization": f"Bearer {os.environ['PRORL_TOKEN']}", "X-Session-Id": "rest-example"}
FULL = 429
RUN = f"{time.time_ns()}"  # in the ids: a node takes the id of a job that has ended for that one's
PATIENCE_S = 300.0


def call(method: str, path: str, body: Any = None) -> Any:
    """Send one request and return what was answered, as JSON. A full node is asked again when it says.

    An answer that no node gives, as a proxy's page while its node restarts, and a lost connection are tried again for
    `PATIENCE_S`. All requests of this program may be repeated.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{REST}{path}", data=data, method=method, headers=HEADERS)
    deadline_s, known = time.monotonic() + PATIENCE_S, ""
    while True:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error_of_node(error)
            if said and error.code != FULL:
                raise SystemExit(f"{method} {path}: {said['code']}: {said['message']}") from None
            why, wait_s = f"HTTP status {error.code}", said.get("retry_after_s") or 1.0
        except (OSError, http.client.HTTPException, ValueError) as error:
            why, wait_s = str(error) or type(error).__name__, 1.0
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{method} {path}: no answer of a node for {PATIENCE_S:g} s; the last attempt: {why}")
        if why != known:
            say(f"{method} {path}: {why}; trying again")
        known = why
        time.sleep(wait_s)


def error_of_node(error: urllib.error.HTTPError) -> dict[str, Any]:
    """Return the error that a node describes in its answer; empty if the answer is not a node's."""
    try:
        return dict(json.load(error)["error"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return {}


def submit(questions: list[tuple[int, int]]) -> int:
    """Submit two rollouts a question; return how many were taken. Submitting them again while they run does no harm."""
    jobs = [
        {
            "job_id": f"{RUN}-{a}x{b}-{n}",
            "group_id": f"{RUN}-{a}x{b}",
            "instance": {
                "instance_id": f"{a}x{b}",
                "handler": "math",
                "payload": {"question": f"What is {a} * {b}?", "answer": str(a * b)},
            },
        }
        for a, b in questions
        for n in range(2)
    ]
    taken = call("POST", "/v1/rollouts", {"jobs": jobs})["jobs"]
    for job in taken:
        if not job["accepted"]:
            say(f"{job['job_id']} was rejected: {job['error']['message']}")
    return sum(job["accepted"] for job in taken)


def take(count: int) -> None:
    """Take `count` outcomes. The cursor acknowledges those before it; without it they would be given again."""
    cursor = 0
    while count:
        page = call("GET", f"/v1/results?cursor={cursor}&wait=60&arrays=list")
        for result in page["results"]:
            outcome = result["outcome"]
            segments = (outcome["trajectory"] or {"segments": []})["segments"]
            tokens = sum(len(segment["token_ids"]) for segment in segments)
            say(f"{outcome['job_id']} {outcome['status']}, reward {outcome['reward']}, {tokens} tokens")
        cursor, count = page["cursor"], count - len(page["results"])
    call("GET", f"/v1/results?cursor={cursor}")  # acknowledge the last ones, too


def update_policy(version: str) -> None:
    """Hold completions while the weights change, and go on under the new version."""
    call("POST", "/v1/backends/pause", {"mode": "wait", "timeout_s": 60})
    say("here the engines' weights change")
    call("POST", "/v1/backends/resume", {"policy_version": version})


def say(line: str) -> None:
    """Print `line`."""
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    take(submit([(6, 7), (12, 12)]))
    update_policy("step-1")
    take(submit([(9, 9)]))
    say(f"the node has {call('GET', '/v1/rollouts')['total']} live rollouts")
