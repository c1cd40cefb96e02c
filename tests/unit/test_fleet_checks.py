"""A head asks a node once about equal jobs, and never takes its answer for jobs with another agent or other servers."""

from __future__ import annotations

from prorl_ipc.session import Rejected
from prorl_trio.fleet.checks import JobChecks
from prorl_trio.types.models import JobSpec, TaskInstance


class Client:
    node_id = "n"

    def __init__(self):
        self.asked = []

    async def check(self, specs):
        self.asked += specs
        wrong = [index for index, each in enumerate(specs) if each.mcp or each.agent]
        return [Rejected(request_id=1, index=index, job_id=None, code="malformed", message="no") for index in wrong]


def spec(job_id, **fields):
    return JobSpec(job_id=job_id, instance=TaskInstance(instance_id="q", handler="math", payload={"a": 1}), **fields)


async def test_a_refusal_belongs_to_the_agent_and_the_servers_that_were_asked_for():
    client = Client()
    checks = JobChecks(lambda: [client])
    for wrong in ({"mcp": ["none"]}, {"agent": "none"}):
        await checks.examine([spec("wrong", **wrong), spec("plain")])
        assert checks.refusal(spec("again", **wrong)) is not None
        assert checks.refusal(spec("other")) is None
        assert checks.is_unknown(spec("new", mcp=["another"]))
    assert [each.job_id for each in client.asked[:2]] == ["wrong", "plain"]
