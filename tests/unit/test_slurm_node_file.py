"""The node.toml of a machine of a fleet, and the folder on its own disk."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from prorl_launch.slurm.fleet_folder import LONGEST_FOLDER_BYTES, find_local_folder, local_folder_problem
from prorl_launch.slurm.node_file import MachineFacts, head_config, node_config, read_config
from prorl_trio.config import HeadConfig, NodeConfig
from prorl_trio.types.errors import ConfigError

ENV = {"SLURM_JOB_ID": "17", "SLURM_NODEID": "3"}
MACHINE = MachineFacts(fleet_dir="/shared/f", address="10.0.0.3", folder="/tmp/t")
LOCAL = "21 1 0:1 / / rw - ext4 /dev/sda rw\n"


def test_the_machine_adds_its_name_address_and_fleet():
    made = node_config({"model": {"path": "/m"}}, MACHINE, ENV)
    assert made == {
        "node_id": "slurm-17-3",
        "model": {"path": "/m"},
        "listen": {"host": "10.0.0.3", "port": 0, "unix_socket": ""},
        "fleet": {"dir": "/shared/f"},
        "ledger": {"dir": "/tmp/t/ledger"},
    }


def test_what_the_user_set_stays():
    common = {"listen": {"host": "0.0.0.0", "port": 8700}, "fleet": {"stale_after_s": 60.0}}
    made = node_config(common, MACHINE, ENV)
    assert made["listen"] == {"host": "0.0.0.0", "port": 8700, "unix_socket": ""}
    assert made["fleet"] == {"stale_after_s": 60.0, "dir": "/shared/f"}


def test_what_would_be_one_nodes_is_not_shared_by_all():
    common = {"node_id": "mine", "listen": {"endpoint_file": "/shared/endpoint.json", "unix_socket": "/tmp/socket"}}
    names = []
    for number in range(2):
        made = node_config(common, MACHINE, {**ENV, "SLURM_NODEID": str(number)})
        assert made["listen"] == {"host": "10.0.0.3", "port": 0, "unix_socket": ""}
        names.append(made["node_id"])
    assert names == ["mine-0", "mine-1"]


@pytest.mark.parametrize(
    ("common", "ledger"),
    [
        ({"fleet": {"restart_within_s": 60.0}}, None),
        (
            {"ledger": {"dir": "/scratch/me", "max_attempts": 2}},
            {"dir": "/scratch/me/slurm-17-3", "max_attempts": 2},
        ),
        (
            {"fleet": {"restart_within_s": 60.0}, "ledger": {"dir": "/scratch/me"}},
            {"dir": "/scratch/me/slurm-17-3"},
        ),
        ({"ledger": {"dir": "auto"}}, {"dir": "auto"}),
        ({"ledger": {"dir": ""}}, {"dir": ""}),
        ({"ledger": {"max_attempts": 2}}, {"dir": "/tmp/t/ledger", "max_attempts": 2}),
    ],
)
def test_the_ledger_ends_with_the_task_unless_a_next_start_shall_find_it(common, ledger):
    assert node_config(common, MACHINE, ENV).get("ledger") == ledger


def test_nodes_of_one_machine_have_ledgers_of_their_own():
    common = {"ledger": {"dir": "/scratch/me"}}
    folders = {
        node_config(common, MACHINE, {"SLURM_JOB_ID": job, "SLURM_NODEID": "0"})["ledger"]["dir"]
        for job in ("17", "18")
    }
    assert folders == {"/scratch/me/slurm-17-0", "/scratch/me/slurm-18-0"}


@pytest.mark.parametrize(("common", "drain_timeout_s"), [({}, 300.0), ({"drain_timeout_s": 5.0}, 5.0)])
def test_a_drain_of_which_slurm_tells_no_end_lasts_as_long_as_was_said(common, drain_timeout_s):
    machine = msgspec.structs.replace(MACHINE, drain_s=300.0)
    assert node_config(common, machine, ENV)["drain_timeout_s"] == drain_timeout_s


def test_engines_of_the_fleet_come_after_those_of_the_user():
    machine = msgspec.structs.replace(MACHINE, engines=["http://n1:8000"])
    made = node_config({"backends": {"urls": ["http://gpu:1"], "required": True}}, machine, ENV)
    assert made["backends"] == {"urls": ["http://gpu:1", "http://n1:8000"], "required": True}


def test_what_is_made_is_a_node_toml():
    machine = msgspec.structs.replace(MACHINE, engines=["http://n1:8000"])
    made = msgspec.toml.encode(node_config({"model": {"path": "/m"}}, machine, ENV))
    assert msgspec.toml.decode(made, type=NodeConfig).node_id == "slurm-17-3"


def test_a_loopback_address_would_be_no_use_to_other_machines():
    made = node_config({"listen": {"host": "127.0.0.1"}}, MACHINE, ENV)
    assert made["listen"]["host"] == "10.0.0.3"


def test_a_head_is_reached_from_other_machines_and_its_next_start_finds_its_jobs():
    common = {"listen": {"token": "secret", "port": 8000, "host": "127.0.0.1"}, "stages": {"run_workers": 4}}
    made = head_config(common, {}, MACHINE)
    config = msgspec.convert(made, HeadConfig)
    assert (config.listen.host, config.listen.port, config.listen.token) == (MACHINE.address, 0, "secret")
    assert (config.fleet.dir, config.ledger.dir) == (MACHINE.fleet_dir, f"{MACHINE.fleet_dir}/head")
    own = {"ledger": {"dir": "/elsewhere"}, "listen": {"port": 9, "host": "0.0.0.0"}, "member_timeout_s": 7.0}
    config = msgspec.convert(head_config(common, own, MACHINE), HeadConfig)
    assert (config.ledger.dir, config.listen.host, config.listen.port) == ("/elsewhere", "0.0.0.0", 9)
    assert config.member_timeout_s == 7.0


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "node.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match=r"node\.toml is no TOML"):
        read_config(tmp_path / "node.toml")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path / "other.toml")


@pytest.mark.parametrize("kind", ["lustre", "nfs4", "gpfs", "beegfs"])
def test_sockets_are_not_tried_on_a_network_file_system(kind):
    mounts = f"{LOCAL}22 21 0:2 / /nowhere rw - {kind} server rw\n"
    assert local_folder_problem(Path("/nowhere"), mounts) == f"it is on a network file system ({kind})"


def test_the_first_folder_that_serves_is_taken(tmp_path):
    long = tmp_path / ("x" * LONGEST_FOLDER_BYTES)
    assert str(find_local_folder(env={"SLURM_TMPDIR": str(long), "TMPDIR": "/nowhere"})) == "/tmp"


def test_if_none_serves_each_says_why():
    with pytest.raises(ConfigError, match=r"/nowhere: no socket or lock can be made there \(No such file"):
        find_local_folder("/nowhere")
