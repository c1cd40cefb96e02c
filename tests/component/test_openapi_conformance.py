"""Whatever schemathesis makes of the OpenAPI page, the answer is one that the page describes: status, type and body."""

from __future__ import annotations

import threading

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, Phase, settings

from prorl_trio.config import BackendConfig
from prorl_trio.edges.prorl_compat import compat_endpoints
from prorl_trio.edges.rest.app import ENDPOINTS, describe
from support.fake_node import FakeNode, make_outcome
from support.fake_rest import TOKEN, open_rest

schemathesis = pytest.importorskip("schemathesis")

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]  # its tests share names, which xdist takes for one test

BASE = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
COMPATIBLE = {endpoint.path: endpoint for endpoint in compat_endpoints(BackendConfig(), free=False)}
PAGE = msgspec.json.decode(describe([*ENDPOINTS, *COMPATIBLE.values()]))
API = schemathesis.openapi.from_dict(PAGE).exclude(path="/v1/events")  # that answer never ends
NOT_CHECKED = [
    # A 503 that is described is an answer like others; one that is not, and any 500, fails the check of statuses.
    schemathesis.checks.CHECKS.get_one("not_a_server_error"),
    # What a schema cannot say is refused by 422, too: a handler that is not there, a cursor that was never given.
    schemathesis.checks.CHECKS.get_one("positive_data_acceptance"),
]


class Server(threading.Thread):
    """The REST edge over a fake node whose jobs end at once, in a loop of its own: schemathesis blocks."""

    def __init__(self):
        super().__init__(name="rest")
        self.url, self._ready, self._end = "", threading.Event(), None

    def run(self):
        trio.run(self._serve)

    async def _serve(self):
        stop, token = trio.Event(), trio.lowlevel.current_trio_token()
        self._end = lambda: token.run_sync_soon(stop.set)
        node = FakeNode(on_submit=make_outcome)
        await node.backends.add("http://gpu:8000")
        async with open_rest(
            node, prorl_compat=True, prorl_compat_token=True, max_wait_s=0.01, prorl_compat_timeout_s=0.05
        ) as rest:
            self.url = rest.url
            self._ready.set()
            await stop.wait()

    def __enter__(self):
        self.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_exc_info):
        self._end()
        self.join(10)
        assert not self.is_alive()


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


def check(case, server):
    if case.path in COMPATIBLE:  # they answer 503 from `/stop` to the next `/start`
        API["/start"]["POST"].Case().call(base_url=server.url, headers=AUTHORIZATION, timeout=10)
    answer = case.call(base_url=server.url, headers=AUTHORIZATION, timeout=10)
    case.validate_response(answer, headers=AUTHORIZATION, excluded_checks=NOT_CHECKED)


@API.parametrize()
@settings(BASE, max_examples=2, phases=[Phase.generate])
def test_every_answer_is_as_described(case, server):
    check(case, server)


@pytest.mark.slow
@pytest.mark.timeout(300)
@API.parametrize()
@settings(BASE, max_examples=20, phases=[Phase.explicit, Phase.generate])
def test_every_answer_is_as_described_at_every_bound_of_the_schemas(case, server):
    check(case, server)
