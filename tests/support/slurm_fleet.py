"""A fleet of real nodes on the test's cluster of Slurm, by `prorl-trio slurm`."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prorl_trio.rendezvous.folder import HEAD_FILE
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance
from support.quiet_clock import stretched, wait_until
from support.remains import left_after
from support.slurm_cluster import NODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.slurm_cluster import SlurmCluster

PROGRAM = str(Path(sys.executable).with_name("prorl-trio"))
MIB = 1024 * 1024
START_TIMEOUT_S = 300.0
LIMIT_S = 10.0
"""From the end of the job to nothing left."""


class SlurmFleet:
    """The folder of a fleet, and Slurm's commands for it."""

    def __init__(self, slurm: SlurmCluster) -> None:
        self.slurm = slurm
        self.shared = Path(tempfile.mkdtemp(prefix="shared-", dir=slurm.folder))
        self.folder = self.shared / "fleet"
        self.mark = secrets.token_hex(8)
        self.config = self.shared / "node.toml"
        self.model = self.shared / "model"
        self.places = [slurm.temporary(node) for node in range(1, NODES + 1)]

    def write_config(self, urls: Sequence[str] = (), stale_after_s: float = 30.0, **changes: object) -> None:
        """Write the node.toml of all nodes: small ones, with sandboxes as this machine has them."""
        config = {
            "model": {"path": str(self.model)},
            "backends": {"urls": list(urls), "health": {"interval_s": 1.0}},
            "fleet": {"heartbeat_interval_s": 1.0, "stale_after_s": stretched(stale_after_s)},
            "stages": {"run_workers": 4, "eval_workers": 1},
            "sandbox": {"max_warm": 0, "start_timeout_s": stretched(60.0)},
            "ledger": {"log_bytes": MIB, "reserve_bytes": MIB},
            "arena": {"enabled": False},
            **changes,
        }
        self.config.write_bytes(msgspec.toml.encode(config))

    def command(self, name: str, *options: str) -> str:
        """Return what `prorl-trio slurm NAME` says of this fleet."""
        words = [PROGRAM, "slurm", name, "--fleet", str(self.folder), *options]
        return self.slurm.said("env", f"PRORL_TEST_MARK={self.mark}", *words)

    def up(self, nodes: int, *options: str) -> None:
        """Submit it."""
        self.command("up", "--config", str(self.config), "--nodes", str(nodes), *options)

    def status(self) -> dict[str, Any]:
        """Return what `status` tells."""
        told: dict[str, Any] = json.loads(self.command("status"))
        return told

    @property
    def job(self) -> str:
        """Return the id of the job that it is."""
        return (self.folder / "slurm/job_id").read_text()

    def live(self) -> bool:
        """Return whether Slurm still has the job."""
        return bool(self.slurm.run("squeue", "-h", "-j", self.job).stdout)

    def entries(self) -> list[Path]:
        """Return the files by which its nodes are found."""
        return [path for path in self.folder.glob("*.json") if path.name != HEAD_FILE]

    def wait_up(self, nodes: int) -> dict[str, dict[str, Any]]:
        """Wait until so many nodes and the head are in the folder, live; return the nodes' entries."""

        def is_up() -> bool:
            head = self.status()["head"]
            return len(self.entries()) == nodes and head is not None and head["life"] == "live"

        wait_until(is_up, "all are up", START_TIMEOUT_S, self.report)
        told = self.status()
        assert {entry["life"] for entry in told["nodes"].values()} == {"live"}, told
        assert not told["broken"]
        assert "token" not in str(told)
        nodes_told: dict[str, dict[str, Any]] = told["nodes"]
        return nodes_told

    def log(self) -> str:
        """Return the ends of the jobs' logs."""
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in (self.folder / "slurm").glob("*.log"))

    def report(self) -> str:
        """Return the logs and the cluster's state, for whoever asks why nothing happens."""
        return f"{self.log()}\n{self.slurm.report()}"

    def assert_nothing_left(self) -> None:
        """Require that no fleet has left anything on any machine, nor this one in its folder."""
        left, took_s = left_after(self.mark, self.places, LIMIT_S, self.slurm.networks())
        assert left == [], f"after {took_s:.1f} s: {self.log()}"
        assert not self.entries()
        assert {path.suffix for path in (self.folder / "slurm").iterdir()} == {"", ".lock", ".log", ".sh"}
        assert not [path for path in (self.folder / "slurm").iterdir() if path.is_dir()]

    def remove(self) -> None:
        """End what runs on the cluster, and remove the shared folder."""
        self.slurm.cancel_all()
        shutil.rmtree(self.shared)


def math_job(job_id: str) -> JobSpec:
    """Return a job whose right answer is 42."""
    payload = {"question": "6 * 7?", "answer": "42", "describe_tools": False}
    instance = TaskInstance(instance_id="q", handler="math", payload=payload)
    return JobSpec(job_id=job_id, instance=instance, sampling=SamplingParams(max_output_tokens=200))


def once_each(job_ids: Sequence[str]) -> Counter[str]:
    """Return how often each outcome is to come."""
    return Counter(dict.fromkeys(job_ids, 1))
