from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner

from prorl_launch import commands, doctor
from prorl_launch.doctor import Check, Report
from prorl_trio.sandbox.provider import ProviderReport

WORKS = ProviderReport(name="bubblewrap", usable=True, version="0.11")
BROKEN = ProviderReport(name="apptainer", usable=False, problem="no such program", remedy="make apptainer")


@pytest.mark.parametrize(("reports", "state"), [([BROKEN, WORKS], "warning"), ([BROKEN], "missing")])
def test_a_broken_provider_is_a_fault_only_if_none_works(reports, state):
    check = doctor._sandboxes(reports)[0]
    assert (check.state, check.detail, check.remedy) == (state, "no such program", "make apptainer")


def test_working_providers_are_named_with_their_version():
    assert doctor._sandboxes([WORKS])[0].detail.startswith("0.11")


def test_a_provider_that_cannot_change_layers_is_named_with_what_to_do():
    report = msgspec.structs.replace(WORKS, images_problem="rm: Input/output error", remedy="another overlay")
    check = doctor._sandboxes([report])[0]
    assert (check.state, check.remedy) == ("warning", "another overlay")
    assert "layers do not work: rm: Input/output error" in check.detail


def test_image_runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    check = doctor._runtime()
    assert (check.state, check.remedy) == ("warning", "prorl-trio setup runtime")
    doctor.bundle_path().mkdir(parents=True)
    assert doctor._runtime().state == "ok"


def test_fuse(tmp_path):
    assert doctor._fuse(tmp_path / "none").state == "warning"
    assert "mknod" in doctor._fuse(tmp_path / "none").remedy
    (tmp_path / "fuse").touch()
    assert doctor._fuse(tmp_path / "fuse").state == "ok"


@pytest.mark.parametrize(("available_kib", "state"), [(16 * 1024**2, "ok"), (1024**2, "warning")])
def test_memory(tmp_path, available_kib, state):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 32000000 kB\nMemAvailable: {available_kib} kB\n")
    assert doctor._memory(meminfo).state == state


def test_cgroups(tmp_path):
    (tmp_path / "own").write_text("5:memory:/job\n")
    check = doctor._cgroups(tmp_path / "cgroup", tmp_path / "own")
    assert check.state == "warning"
    assert "watchdog" in check.detail
    assert "Delegate=yes" in check.remedy


def test_disk_asks_for_the_nearest_folder_that_exists(monkeypatch, tmp_path):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "not" / "yet"))
    assert str(tmp_path) in doctor._disk().detail


def test_shared_memory_too_small(tmp_path):
    assert doctor._shared_memory(tmp_path / "none").state == "warning"


@pytest.fixture
def report(monkeypatch):
    """What `doctor` prints in place of an examination of this machine."""
    checks = [
        Check(name="python", state="ok", detail="3.11"),
        Check(name="engine", state="missing", detail="no [cpu] engine", remedy="make engine"),
    ]

    async def examine(_kind: str, *, with_engine: bool) -> Report:
        return Report(usable=not with_engine, checks=checks[: 2 if with_engine else 1])

    monkeypatch.setattr(commands, "examine", examine)


@pytest.mark.usefixtures("report")
def test_something_missing_is_said_with_what_to_do_and_exit_code_1():
    result = CliRunner().invoke(commands.doctor)
    assert result.exit_code == 1
    assert "no [cpu] engine" in result.output
    assert "What to do: make engine" in result.output


@pytest.mark.usefixtures("report")
def test_all_there_is_exit_code_0():
    assert CliRunner().invoke(commands.doctor, ["--no-engine"]).exit_code == 0


@pytest.mark.usefixtures("report")
def test_json_is_the_report():
    result = CliRunner().invoke(commands.doctor, ["--json"])
    assert result.exit_code == 1
    report = msgspec.json.decode(result.output, type=Report)
    assert [check.name for check in report.checks] == ["python", "engine"]
