"""`perf.balance` over HTTP: its engines, its router's process, and what it says of both, in small."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest
import trio

from perf import balance_router
from perf.balance_router import OURS, ROUTED, WORK, measure_router, router_report, run_served
from perf.batch import HEAVY, BatchRun, draw_batch
from perf.peers.environments import PEERS, PeerUnavailable
from perf.peers.process import free_port, open_peer_server

pytestmark = pytest.mark.alone

SMALL = msgspec.structs.replace(WORK, instances=4, rollouts=2, turns_p50=2, max_turns=3)
ROUTER = """
import sys, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
arguments = sys.argv[1:]
if "no-such-policy" in arguments:
    sys.exit("error: no such policy")
workers = arguments[arguments.index("--worker-urls") + 1:]
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.reply(b"")
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.startswith("/finish_session"):
            return self.reply(b"")
        url = workers[hash(self.headers["X-Session-ID"]) % len(workers)] + self.path
        with urllib.request.urlopen(urllib.request.Request(url, body)) as response:
            self.reply(response.read())
    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """The router's environment, with a module that stands in for it and sends each session to one worker."""
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    environment = PEERS["vllm-router"].folder()
    package = environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "vllm_router"
    package.mkdir(parents=True)
    (package / "launch_router.py").write_text(ROUTER)
    (environment / "bin").mkdir()
    (environment / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (environment / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    (environment / ".complete").touch()


def run_of(makespan_s):
    return BatchRun(
        makespan_s=makespan_s, completed=10, moved=0, max_over_mean=1.1, busiest_over_mean=1.1, tokens_per_s=1.0,
        calls=20, prefix_hit_rate=0.8, in_flight=[],
    )  # fmt: skip


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.mark.parametrize("placement", [*OURS, ROUTED[0]], ids=lambda placement: placement.name)
async def test_all_calls_of_the_batch_reach_the_engines_and_nothing_is_left(placement, stand_in):
    before = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(60):
        run = await run_served(placement, 1, work=SMALL)
    turns = [turns for rollouts in draw_batch(SMALL, 1) for turns in rollouts]
    assert run.completed == len(turns) == 8
    assert run.calls == sum(map(len, turns))
    assert run.makespan_s > 0
    assert 1 <= run.busiest_over_mean <= 4
    assert run.prefix_hit_rate > 0, "each rollout finds its own prefix again"
    assert children() == []
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # trio's own, at the first process


async def test_a_router_that_does_not_start_is_quoted(stand_in, tmp_path):
    arguments = ["-m", "vllm_router.launch_router", "--policy", "no-such-policy"]
    with (
        trio.fail_after(60),
        pytest.raises(PeerUnavailable, match=r"did not get ready; it said: error: no such policy"),
    ):
        async with open_peer_server(
            PEERS["vllm-router"], arguments, url=f"http://127.0.0.1:{free_port()}", folder=tmp_path
        ):
            pass
    assert children() == []


async def test_a_router_that_is_not_installed_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(balance_router, "QUICK_WAYS", ROUTED[:1])
    with trio.fail_after(60):
        report = await measure_router(quick=True)
    assert report.metrics() == {}
    assert "python -m perf.peers setup vllm-router" in report.notes[0]


def test_the_router_is_compared_by_its_best_policy_and_by_its_default():
    runs = {placement: [run_of(100.0), run_of(200.0)] for placement in (*OURS, *ROUTED)}
    runs[OURS[0]] = [run_of(80.0), run_of(160.0)]
    runs[ROUTED[0]] = [run_of(72.0), run_of(144.0)]
    report = router_report(runs)
    assert report.more_metrics == pytest.approx(
        {"balance.http.least_over_router_best": 0.9, "balance.http.least_over_router_default": 1.25}
    )
    assert report.detail_metrics["balance.http.router.random.makespan_s"] == 150
    assert report.detail_metrics["balance.http.static_split.prefix_hit_rate"] == pytest.approx(0.8)
    assert any("its best is sticky_least_loaded" in note for note in report.notes)


def test_the_work_over_http_is_the_heavy_one_in_small():
    assert (WORK.prompt_tokens, WORK.turn_tokens_p50) == (HEAVY.prompt_tokens, HEAVY.turn_tokens_p50)
