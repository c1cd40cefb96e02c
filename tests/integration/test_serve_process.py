"""`prorl-trio serve` as an operator has it: a process, signals, a log, metrics, `top`, exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import urllib.request
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_trio.cli.exit_codes import EXIT_JOBS_CUT
from prorl_trio.client import connect
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance

TOKEN = "a-token-for-tests-0123456789"
LAUNCH = Path(__file__).parents[2] / "launch"
CLI = [sys.executable, "-m", "prorl_trio.cli"]


pytestmark = pytest.mark.timeout(120)


class Serve:
    """A running `serve`: its endpoints, what it has logged so far, its exit code at the end."""

    def __init__(self, folder, process):
        self.process, self.log, self._more = process, [], trio.lowlevel.ParkingLot()
        self.config, self._endpoint_file = folder / "node.toml", folder / "endpoint.json"

    @property
    def endpoints(self):
        return json.loads(self._endpoint_file.read_bytes())

    async def read_log(self):
        rest = b""
        async for chunk in self.process.stderr:
            *lines, rest = (rest + chunk).split(b"\n")
            self.log += [json.loads(line) for line in lines]
            self._more.unpark_all()

    async def said(self, text):
        while not any(text in line["message"] for line in self.log):
            await self._more.park()


async def end(process):
    process.kill()


@asynccontextmanager
async def open_serve(tmp_path, *, on_hangup="auto", **process):
    """A node that listens, and its engine. `process`: how it is started, instead of with pipes."""
    tiny = make_tiny_model(tmp_path / "model")
    answer = tiny.turn(r"\boxed{42}")
    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    env = {**os.environ, "PRORL_TOKEN": TOKEN, "PRORL_LOG_FORMAT": "json"}
    async with (
        open_fake_engine(script=lambda _: (answer, [-0.5] * len(answer), "stop"), config=engine_config) as engine,
        trio.open_nursery() as nursery,
    ):
        config = {
            "drain_timeout_s": 60.0,
            "on_hangup": on_hangup,
            "model": {"path": str(tmp_path / "model")},
            "listen": {"port": 0, "endpoint_file": str(tmp_path / "endpoint.json")},
            "backends": {"urls": [engine.url], "required": True},
            "sandbox": {"provider": "process", "max_warm": 0},
        }
        (tmp_path / "node.toml").write_bytes(msgspec.toml.encode(config))
        command = [*CLI, "serve", "--config", str(tmp_path / "node.toml")]
        run = partial(
            trio.run_process,
            command,
            env=env,
            deliver_cancel=end,
            check=False,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | process),
        )
        node = Serve(tmp_path, await nursery.start(run))
        if node.process.stderr is not None:
            nursery.start_soon(node.read_log)
        ready = b""
        while node.process.stdout is not None and b"READY" not in ready:
            ready += await node.process.stdout.receive_some() or pytest.fail(f"it ended: {node.log}")
        try:
            yield node, engine
        finally:
            nursery.cancel_scope.cancel()


def job(job_id):
    instance = TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})
    return JobSpec(job_id=job_id, instance=instance, sampling=SamplingParams(max_output_tokens=50))


def close_streams():
    for descriptor in range(3):
        os.close(descriptor)


@pytest.mark.parametrize("how", ["full", "closed"])
async def test_a_node_whose_log_and_output_cannot_be_written_works_and_ends_well(tmp_path, how):
    with open("/dev/full", "wb") as full:
        streams = {"stdout": full, "stderr": full} if how == "full" else {"stdout": None, "stderr": None}
        if how == "closed":
            streams["preexec_fn"] = close_streams
        async with open_serve(tmp_path, **streams) as (node, _):
            while not (tmp_path / "endpoint.json").exists():
                assert node.process.poll() is None, "it ended before it listened"
                await trio.sleep(0.05)
            async with connect(node.endpoints["url"], TOKEN) as client:
                await client.submit([job("j-1")])
                (outcome,) = [outcome async for outcome in client.results(1)]
            assert outcome.status == "completed", outcome.error
            numbers = range(3) if how == "closed" else (1, 2)
            standard = {os.readlink(f"/proc/{node.process.pid}/fd/{number}") for number in numbers}
            assert standard <= {"/dev/null", "/dev/full"}, "no file of the node has the number of a standard stream"
            node.process.send_signal(signal.SIGTERM)
            assert await node.process.wait() == 0


async def test_metrics_top_reload_log_and_a_clean_end(tmp_path):
    async with open_serve(tmp_path) as (node, _):
        async with connect(node.endpoints["url"], TOKEN) as client:
            await client.submit([job("j-1")])
            (outcome,) = [outcome async for outcome in client.results(1)]
            assert outcome.status == "completed", outcome.error

        top = [*CLI, "top", "--once", "--url", node.endpoints["url"]]
        shown = await trio.run_process(top, env={**os.environ, "PRORL_TOKEN": TOKEN}, capture_stdout=True)
        assert b"1 completed" in shown.stdout
        assert b"0 jobs, 0 stuck" in shown.stdout

        request = urllib.request.Request(
            node.endpoints["rest_url"] + "/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        page = await trio.to_thread.run_sync(lambda: urllib.request.urlopen(request, timeout=30).read())
        assert b'prorl_outcomes_total{cause="",handler="math",status="completed"} 1.0' in page
        assert b"prorl_backend_calls_total{" in page
        there = re.findall(r"^# TYPE (\w+)", page.decode(), re.MULTILINE)
        watched = "".join((LAUNCH / "grafana" / name).read_text() for name in ("dashboard.json", "alerts.yaml"))
        names = set(re.findall(r"\b(?:prorl|process)_\w+", watched)) - {"prorl_trio"}
        assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} <= set(there)

        text = node.config.read_text()
        node.config.write_text(text.replace("drain_timeout_s = 60.0", "drain_timeout_s = 7.0"))
        node.process.send_signal(signal.SIGHUP)
        await node.said("reload: drain_timeout_s: 60.0 -> 7.0")

        node.process.send_signal(signal.SIGTERM)
        assert await node.process.wait() == 0
        await node.said("every job had its own outcome")
    (end,) = [line for line in node.log if line["logger"] == "prorl_trio.jobs"]
    assert (end["job_id"], end["status"], end["turns"]) == ("j-1", "completed", 1)
    await node.said("draining for 7 s at most")
    assert TOKEN not in json.dumps(node.log)


async def test_a_second_signal_cuts_the_jobs_that_are_left_and_the_exit_code_says_so(tmp_path):
    async with open_serve(tmp_path) as (node, engine):
        engine.hold()
        async with connect(node.endpoints["url"], TOKEN) as client:
            await client.submit([job("cut")])
            await engine.wait_until(lambda stats: stats.running == 1)
            node.process.send_signal(signal.SIGTERM)
            await node.said("1 jobs left (1 run)")
            node.process.send_signal(signal.SIGTERM)
            (outcome,) = [outcome async for outcome in client.results(1)]
        assert outcome.status == "cancelled"
        assert await node.process.wait() == EXIT_JOBS_CUT


# ---------------------------------------------------------------- a terminal


class Terminal:
    """A terminal that `serve` is started from, until it is lost."""

    def __init__(self):
        self._ours, self._theirs = os.openpty()
        self.said = b""

    def start(self, *, stderr=None):
        """As a shell would: with all three on it, unless told otherwise, and as the leader of its session."""

        def control():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        theirs = self._theirs
        return {
            "stdin": theirs,
            "stdout": theirs,
            "stderr": theirs if stderr is None else stderr,
            "start_new_session": True,
            "preexec_fn": control,
        }

    async def wait_ready(self):
        os.close(self._theirs)
        while b"READY" not in self.said:
            await trio.lowlevel.wait_readable(self._ours)
            self.said += os.read(self._ours, 65_536)

    def lose(self):
        os.close(self._ours)


async def test_a_node_whose_terminal_is_lost_lets_its_jobs_finish_and_leaves_nothing(tmp_path):
    terminal = Terminal()
    with trio.fail_after(90):
        async with open_serve(tmp_path, **terminal.start()) as (node, engine):
            await terminal.wait_ready()
            engine.hold()
            async with connect(node.endpoints["url"], TOKEN) as client:
                await client.submit([job("last")])
                await engine.wait_until(lambda stats: stats.running == 1)
                terminal.lose()
                while not (await client.status())["draining"]:
                    await trio.sleep(0.02)
                os.kill(node.process.pid, signal.SIGHUP)  # the shell says it again, and that is no second signal
                assert len((await client.status())["jobs"]) == 1
                engine.release()
                (outcome,) = [outcome async for outcome in client.results()]
            assert outcome.status == "completed", outcome.error
            assert await node.process.wait() == 0


async def test_a_node_that_is_told_so_outlives_its_terminal(tmp_path):
    terminal = Terminal()
    with trio.fail_after(90):
        started = terminal.start(stderr=subprocess.PIPE)
        async with open_serve(tmp_path, on_hangup="reload", **started) as (node, _):
            await terminal.wait_ready()
            terminal.lose()
            await node.said("reload: nothing has changed")
            async with connect(node.endpoints["url"], TOKEN) as client:
                assert not (await client.status())["draining"]
            node.process.send_signal(signal.SIGTERM)
            assert await node.process.wait() == 0
