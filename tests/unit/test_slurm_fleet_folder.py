"""The folder of a fleet that Slurm started: what was killed leaves nothing in it once its job has ended."""

from __future__ import annotations

import msgspec
import pytest

from prorl_launch.slurm.fleet_folder import open_fleet_folder, read_job, remove_ended, write_job
from prorl_trio.rendezvous.entry import Capacity, NodeEntry, SlurmStep, this_process
from prorl_trio.rendezvous.folder import write_entry


@pytest.fixture
def folder(tmp_path):
    open_fleet_folder(tmp_path / "fleet")
    return tmp_path / "fleet"


def add(folder, node_id, job_id):
    step = SlurmStep(job_id=job_id, step_id="0", node_name="n1") if job_id else None
    entry = NodeEntry(
        node_id=node_id,
        url="ws://n1:1",
        token="secret",
        host="n1",
        process=this_process(),
        slurm=step,
        model="m",
        version="1",
        capacity=Capacity(run_workers=1, max_live=1, live=0),
        heartbeat_interval_s=1.0,
        stale_after_s=30.0,
    )
    write_entry(folder, entry)
    (folder / f".draft-{node_id}-x").write_bytes(msgspec.json.encode(entry))


def there(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_entries_of_jobs_that_have_ended_are_removed_and_no_others(folder):
    for node_id, job_id in [("slurm-17-0", "17"), ("slurm-18-0", "18"), ("by-hand", "")]:
        add(folder, node_id, job_id)
    (folder / "broken.json").write_text("{")
    asked = []
    remove_ended(folder, lambda job_ids: asked.append(job_ids) or {"18"})
    assert asked == [["17", "18"]]
    left = ["by-hand", "slurm-18-0"]
    assert there(folder) == [*(f".draft-{name}-x" for name in left), "broken.json", *(f"{name}.json" for name in left)]


def test_files_of_runs_that_have_ended_are_removed_and_no_others(folder):
    for name in ("ended-nodes-17-0", "ended-engines-18-2", "engines-17-1", "engines-18-0", "mine"):
        (folder / "slurm" / name).mkdir()
        (folder / "slurm" / name / "0").touch()
    for name in ("drain-17-0", "drain-18-0"):
        (folder / "slurm" / name).touch()
    write_job(folder, "18")
    remove_ended(folder, lambda _: {"18"})
    assert sorted(path.name for path in (folder / "slurm").iterdir()) == [
        "drain-18-0",
        "ended-engines-18-2",
        "engines-18-0",
        "job_id",
        "mine",
    ]
    assert read_job(folder) == "18"


def test_slurm_is_not_asked_where_there_is_nothing(folder):
    remove_ended(folder, lambda _: pytest.fail("there is nothing to ask for"))
