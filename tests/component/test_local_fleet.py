"""A fleet on one machine: configurations, the claim of `up`, and the processes of its nodes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading

import pytest
import trio
from click.testing import CliRunner

from prorl_launch.local import plan as local_fleet
from prorl_launch.local.commands import claimed, find_claim
from prorl_launch.local.plan import run_nodes, write_head, write_plan
from prorl_launch.node import NodeLost
from prorl_trio.cli import main
from prorl_trio.config import load_config, load_head_config
from prorl_trio.types.errors import ConfigError

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("signals_restored")]

COMMON = """
[model]
path = "/models/m"
[listen]
token = "secret"
port = 8700
[fleet]
stale_after_s = 60.0
[stages]
run_workers = 3
"""

ENTRY = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from prorl_trio.rendezvous.entry import Capacity, NodeEntry
from prorl_trio.rendezvous.folder import write_entry
from prorl_trio.rendezvous.entry import this_process
folder = Path(sys.argv[1]).parent
def on_term(_number, _frame):
    (folder / "asked").open("a").write("x")
    if {patient} and len((folder / "asked").read_text()) == 1:
        return
    sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
print("a node begins", os.environ.get("PRORL_TOKEN") != "", flush=True)
if {code}:
    sys.exit({code})
entry = NodeEntry(
    node_id=folder.name, url="ws://127.0.0.1:1", token="t", host="h", process=this_process(), model="m", version="1",
    capacity=Capacity(run_workers=1, max_live=1, live=0), heartbeat_interval_s=1.0, stale_after_s=10.0,
)
write_entry(folder.parent.parent, entry)
while True:
    time.sleep(10)
"""


HEAD = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from prorl_trio.rendezvous.head import HeadEntry, renew_head
from prorl_trio.rendezvous.entry import this_process
folder = Path(sys.argv[1]).parent
(folder / "starts").open("a").write("x")
entry = HeadEntry(
    node_id="head", url="ws://127.0.0.1:1", token="t", host="h", process=this_process(), version="1",
    heartbeat_interval_s=1.0, stale_after_s=10.0,
)
renew_head(folder.parent.parent, None, entry)
if {dies} and (folder / "starts").read_text() == "x":
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(10)
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text(COMMON)
    return path


@pytest.fixture
def fleet(tmp_path):
    return tmp_path / "fleet"


@pytest.fixture
def as_nodes(monkeypatch):
    """Run a short program in place of each node."""

    def replace(*, code=0, patient=False):
        program = ENTRY.format(path=sys.path, code=code, patient=patient)
        command = lambda config_file: [sys.executable, "-c", program, str(config_file)]  # noqa: E731
        monkeypatch.setattr(local_fleet, "serve_command", command)

    return replace


def run(*arguments):
    return CliRunner().invoke(main, ["local", *map(str, arguments)])


@pytest.fixture
def as_head(monkeypatch):
    """Have a program in place of a real head, which kills itself at its first start if it `dies`."""

    def become(*, dies=False):
        program = HEAD.format(path=sys.path, dies=dies)
        monkeypatch.setattr(local_fleet, "head_command", lambda file: [sys.executable, "-c", program, str(file)])

    return become


def test_each_node_has_a_name_ports_and_a_ledger_of_its_own(config_file, fleet):
    nodes = write_plan(config_file, fleet, 2)
    assert [node.node_id for node in nodes] == ["local-0", "local-1"]
    for node in nodes:
        config = load_config(node.config_file)
        assert config.node_id == node.node_id
        assert (config.listen.port, config.listen.unix_socket) == (0, "")
        assert config.ledger.dir == str(fleet / "local" / node.node_id / "ledger")
        assert (config.fleet.dir, config.fleet.stale_after_s) == (str(fleet), 60.0)
        assert (config.listen.token, config.stages.run_workers) == ("secret", 3)
        assert node.config_file.stat().st_mode & 0o777 == 0o600


def test_a_ledger_in_memory_stays_there_and_a_node_id_names_all(config_file, fleet):
    config_file.write_text('node_id = "mine"\n' + config_file.read_text() + '[ledger]\ndir = ""\n')
    (node,) = write_plan(config_file, fleet, 1)
    assert (node.node_id, load_config(node.config_file).ledger.dir) == ("mine-0", "")


def test_a_wrong_configuration_is_told_before_anything_is_made(config_file, fleet):
    config_file.write_text("[model]\npath = 3\n")
    done = run("up", "--fleet", fleet, "--config", config_file)
    assert done.exit_code == 1
    assert "model.path" in done.output
    assert not list(fleet.glob("local/local-*"))


def test_one_process_at_a_time_runs_a_fleet(config_file, fleet):
    assert find_claim(fleet) is None
    with claimed(fleet, 2) as other:
        assert other is None
        claim = find_claim(fleet)
        assert (claim.nodes, claim.process.pid) == (2, os.getpid())
        with claimed(fleet, 2) as second:
            assert second == claim
        again = run("up", "--fleet", fleet, "--config", config_file, "--nodes", 2)
        assert again.exit_code == 0
        assert f"2 nodes of the fleet in {fleet} are up already, by process {os.getpid()}" in again.output
        more = run("up", "--fleet", fleet, "--config", config_file, "--nodes", 3)
        assert more.exit_code == 1
        assert "local down" in more.output
    assert find_claim(fleet) is None


def test_who_only_looks_keeps_no_fleet_from_coming_up(fleet):
    with claimed(fleet, 1):
        pass
    looking = os.open(fleet / "local/up.lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, [looking]).start()
    with claimed(fleet, 1) as other:
        assert other is None


def test_what_is_not_up_is_told(fleet):
    assert run("down", "--fleet", fleet).output == f"no fleet is up in {fleet}\n"
    missing = run("status", "--fleet", fleet)
    assert missing.exit_code == 1
    assert "cannot be read" in missing.output
    with claimed(fleet, 1):
        assert json.loads(run("status", "--fleet", fleet).output) == {
            "up": os.getpid(),
            "head": None,
            "nodes": {},
            "broken": {},
        }


def test_the_help_teaches():
    text = run("up", "--help").output
    for word in ("Ctrl-C", "node.toml", "ledger", "Exit code"):
        assert word in text
    assert "local down" in run("--help").output


async def test_signals_go_to_all_nodes_and_their_ends_are_told(config_file, fleet, as_nodes, as_head):
    as_nodes(patient=True)
    as_head()
    nodes, head = write_plan(config_file, fleet, 2), write_head(config_file, None, fleet)
    ended, ready = [], trio.Event()

    async def ask():
        await ready.wait()
        for times in ("x", "xx"):
            os.kill(os.getpid(), signal.SIGTERM)
            while any(
                not (node.path / "asked").exists() or (node.path / "asked").read_text() != times for node in nodes
            ):
                await trio.sleep(0.02)

    with trio.fail_after(110):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            codes = await run_nodes(fleet, nodes, head, on_ready=ready.set, on_end=lambda *end: ended.append(end))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "one that comes too late changes no exit code"
    assert codes == {"local-0": 0, "local-1": 0}
    assert sorted(ended) == sorted(codes.items())


async def test_a_node_that_does_not_start_is_told_and_ends_the_others(config_file, fleet, as_nodes, as_head):
    as_nodes(code=7)
    as_head()
    nodes, head = write_plan(config_file, fleet, 2), write_head(config_file, None, fleet)
    with trio.fail_after(110), pytest.raises(NodeLost, match=r"ended with exit code 7(.|\n)*a node begins True"):
        await run_nodes(fleet, nodes, head, on_ready=lambda: None, on_end=lambda *_: None)


def test_a_head_has_settings_of_its_own(config_file, fleet, tmp_path):
    own = tmp_path / "head.toml"
    tables = '[ledger]\ndir = "/elsewhere"\n[listen]\nport = 8123\n[fleet]\ndir = "/no"\n'
    own.write_text(f"member_timeout_s = 7.0\n{tables}")
    config = load_head_config(write_head(config_file, own, fleet).config_file)
    assert (config.member_timeout_s, config.ledger.dir, config.listen.port) == (7.0, "/elsewhere", 8123)
    assert (config.listen.token, config.fleet.dir) == ("secret", str(fleet))
    own.write_text("member_timeout = 7.0")
    with pytest.raises(ConfigError, match="member_timeout"):
        write_head(config_file, own, fleet)


async def test_a_head_is_started_again_when_it_is_killed_and_ends_with_the_nodes(
    config_file, fleet, as_nodes, as_head, monkeypatch
):
    as_nodes()
    as_head(dies=True)
    nodes, head = write_plan(config_file, fleet, 1), write_head(config_file, None, fleet)
    ended, ready = [], trio.Event()
    config = load_head_config(head.config_file)
    assert (config.ledger.dir, config.fleet.dir) == (str(fleet / "local" / "head" / "ledger"), str(fleet))
    assert (config.listen.token, config.listen.port) == ("secret", 0)
    monkeypatch.setattr(local_fleet, "HEAD_RETRY_S", 0.01)

    async def ask():
        await ready.wait()
        while len((head.path / "starts").read_text()) < 2:
            await trio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    with trio.fail_after(110):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            codes = await run_nodes(fleet, nodes, head, on_ready=ready.set, on_end=lambda *end: ended.append(end))
    assert codes == {"local-0": 0}
    assert ended[0] == ("head", 128 + signal.SIGKILL)


def test_a_folder_that_others_can_enter_is_refused(config_file, fleet):
    fleet.mkdir()
    fleet.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        write_plan(config_file, fleet, 1)
