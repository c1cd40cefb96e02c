"""A node that does not come to listen: told so in one line, ended by a signal, and without harm to what is stored."""

from __future__ import annotations

import os
import signal
import socket

import msgspec
import pytest
import trio

from prorl_trio.config import NodeConfig, SandboxConfig
from prorl_trio.ledger import LedgerLimits, open_ledger
from prorl_trio.node.parts import warn_of_image
from prorl_trio.node.serve import serve_node
from prorl_trio.sessions.journal import open_journal
from prorl_trio.sessions.session_table import SessionTable
from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.errors import ConfigError, Draining
from prorl_trio.types.models import JobSpec, TaskInstance
from support.fake_node import FakeNode
from support.sessions import submit

MIB = 1024 * 1024
LIMITS = LedgerLimits(log_bytes=MIB, reserve_bytes=MIB, max_bytes=16 * MIB)


@pytest.fixture
def config(tmp_path):
    """Of a node that starts in no time, as tables of node.toml."""
    make_tiny_model(tmp_path / "model")
    ledger = {"dir": str(tmp_path / "ledger"), "log_bytes": MIB, "reserve_bytes": MIB, "max_bytes": 16 * MIB}
    return {
        "model": {"path": str(tmp_path / "model")},
        "listen": {"port": 0, "token": "t", "unix_socket": ""},
        "ledger": ledger,
        "arena": {"enabled": False},
    }


class Math(MathHandler):
    """Without the seconds that its scoring process takes to start."""

    async def prepare(self, resources):
        pass


async def serve(config):
    return await serve_node(msgspec.convert(config, NodeConfig), HandlerRegistry([Math()]), provider=FakeProvider())


class Gone(FakeNode):
    """Ends between a job's storage and its start."""

    def check(self, spec, sink, ahead):
        pass

    def take(self, spec, sink, attempt):
        raise Draining("the node has ended")


@pytest.fixture
async def stored_jobs(tmp_path):
    """What a killed node leaves: the ids of jobs that it accepted and did not finish."""
    instance = TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})
    specs = [JobSpec(job_id=f"job-{n}", instance=instance) for n in range(6)]
    async with open_ledger(tmp_path / "ledger", LIMITS) as ledger, open_journal(ledger) as journal:
        session, _ = SessionTable(journal).open("s", 0)
        await submit(session, Gone(), *specs)
    return [spec.job_id for spec in specs]


async def unfinished(tmp_path):
    async with open_ledger(tmp_path / "ledger", LIMITS) as ledger:
        return ledger.recovered.unfinished


async def test_jobs_outlive_a_start_at_a_port_that_is_taken(tmp_path, config, stored_jobs):
    with trio.fail_after(60), socket.create_server(("127.0.0.1", 0)) as other:
        port = config["listen"]["port"] = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: .*in use.*set listen\.port to another"):
            await serve(config)
        left = await unfinished(tmp_path)
    assert [(job.job_id, job.last_attempt) for job in left] == [(job_id, 0) for job_id in stored_jobs]


@pytest.mark.parametrize(("name", "why"), [("none/endpoint.json", "No such file"), ("", "Is a directory")])
async def test_jobs_outlive_a_start_whose_endpoint_file_cannot_be_written(tmp_path, config, stored_jobs, name, why):
    config["listen"]["endpoint_file"] = str(tmp_path / name)
    with trio.fail_after(60):
        with pytest.raises(ConfigError, match=rf"listen\.endpoint_file: {tmp_path}.*{why}.*name a file in a folder"):
            await serve(config)
        left = await unfinished(tmp_path)
    assert [job.job_id for job in left] == stored_jobs
    assert not tmp_path.with_name(tmp_path.name + ".new").exists()


@pytest.mark.parametrize(
    ("table", "fields", "why"),
    [
        ("listen", {"heartbeat_interval_s": 50.0}, r"listen\.heartbeat_interval_s \(50\) must be"),
        ("listen", {"endpoint_file": "{tmp}/none/endpoint.json"}, r"listen\.endpoint_file: .*No such file"),
        ("listen", {"unix_socket": "{tmp}/open/node"}, r"listen\.unix_socket: .*has mode 0755, others can enter it"),
        ("listen", {"host": "192.0.2.1"}, r"listen: cannot bind 192\.0\.2\.1:0: .*an address of this machine"),
        ("listen", {"host": "a..b"}, r"listen\.host: 'a\.\.b' is no host name"),
        ("fleet", {"dir": "{tmp}/open"}, r"the fleet's folder .*has mode 0755, others can enter it"),
    ],
)
async def test_what_is_wrong_with_an_address_or_a_path_is_told_before_a_backend_is_asked(
    tmp_path, config, table, fields, why
):
    (tmp_path / "open").mkdir(mode=0o755)
    fields = {name: value.format(tmp=tmp_path) if isinstance(value, str) else value for name, value in fields.items()}
    config[table] = {**config.get(table, {}), **fields}
    (silent,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with silent:
        url = f"http://127.0.0.1:{silent.socket.getsockname()[1]}"
        config["backends"] = {"urls": [url], "probe_timeout_s": 600.0}
        with trio.fail_after(60), pytest.raises(ConfigError, match=why):
            await serve(config)
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize(
    "url", ["gpu1:8000", "http://gpu1:8000/v1", "ftp://gpu1", "http://gpu1:99999", "http://gpu 1:80", ""]
)
async def test_a_url_that_no_backend_can_have_is_not_waited_for(config, url):
    config["backends"] = {"urls": ["http://127.0.0.1:1", url]}
    with (
        trio.fail_after(60),
        pytest.raises(ConfigError, match=rf"backends\.urls: '{url}' is not an origin like http://"),
    ):
        await serve(config)


async def test_a_url_that_comes_twice_is_refused(config):
    config["backends"] = {"urls": ["http://127.0.0.1:1", "http://127.0.0.1:1/"]}
    with trio.fail_after(60), pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1/ is there twice; .* a weight"):
        await serve(config)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_a_start_that_waits_for_a_backend(tmp_path, config, stored_jobs, number, caplog):
    (silent,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(60):
        async with silent:
            config["backends"] = {
                "urls": [f"http://127.0.0.1:{silent.socket.getsockname()[1]}"],
                "probe_timeout_s": 600.0,
            }
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, config)
                probe = await silent.accept()
                os.kill(os.getpid(), number)
            await probe.aclose()
        left = await unfinished(tmp_path)
    assert f"{number.name}: the node ends before it has started" in caplog.text
    assert [(job.job_id, job.last_attempt) for job in left] == [(job_id, 0) for job_id in stored_jobs]


@pytest.mark.parametrize(("image", "why"), [("docker://debian:12", "has not been pulled"), ("/none", "does not exist")])
def test_an_image_that_is_not_there_is_told_at_the_start(tmp_path, monkeypatch, caplog, image, why):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    warn_of_image(SandboxConfig(image=image))
    assert f"sandbox.image: until it is there, rollouts that use it fail: image {image} {why}" in caplog.text
    caplog.clear()
    for config in (SandboxConfig(), SandboxConfig(image=str(tmp_path))):
        warn_of_image(config)
    assert not caplog.records
    warn_of_image(SandboxConfig(provider="process", image=image))
    assert "sandbox.image has no effect" in caplog.text
