"""Our own rigs: who left something is named, a skip says why, and an unknown one fails where that is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.skips import Skips, because, parse_allowed, read_allowed
from support.slurm_cluster import why_not

TESTS = Path(__file__).parents[1]
TIMEOUT_S = 60

LEAVES = """
import gc, socket, subprocess, sys, threading
import pytest
from support import leaks

leaks.SETTLE_S = 0.1
KEPT = []

def test_nothing(): pass
def test_socket(): KEPT.append(socket.create_server(("127.0.0.1", 0)))
def test_thread():
    KEPT.append(threading.Event())
    threading.Thread(target=KEPT[-1].wait, name="forgotten", daemon=True).start()
def test_child(): KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
def test_garbage():
    cycle = [socket.create_server(("127.0.0.1", 0))]
    cycle.append(cycle)
def test_after_it(): gc.collect()
def test_failed():
    KEPT.append(socket.socketpair())
    assert False
def test_of_a_fixture(held): pass
def test_of_a_late_fixture(request): request.getfixturevalue("held_late")

@pytest.fixture(scope="module")
def held():
    with socket.create_server(("127.0.0.1", 0)): yield
@pytest.fixture(scope="session")
def held_late():
    with socket.create_server(("127.0.0.1", 0)): yield
"""
MODULE_LEAVES = """
import socket
import pytest
KEPT = []

@pytest.fixture(scope="module")
def bad(): KEPT.append(socket.create_server(("127.0.0.1", 0)))
def test_first(bad): pass
def test_last(bad): pass
"""
SKIPS = """
import pytest
from support.skips import because

@pytest.fixture
async def machine(): pytest.skip(because("no such machine", "buy one"))
async def test_of_trio(machine): pass
def test_plain(): pytest.skip(because("no such machine", "buy one"))
def test_silent(): pytest.skip()
def test_fine(): pass
"""


PLUGINS = ("pytest_trio.plugin", "pytest_timeout", "xdist.plugin", "conftest")


def run(tmp_path, files, *options, allowed=None):
    """pytest over these files, with our conftest and settings, in a process of its own."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if allowed is not None:
        (tmp_path / "allowed.txt").write_text(allowed)
        env["PRORL_ALLOWED_SKIPS"] = str(tmp_path / "allowed.txt")
    argv = [sys.executable, "-m", "pytest", "-c", TESTS.parent / "pyproject.toml", f"--rootdir={tmp_path}"]
    argv += [*(part for plugin in PLUGINS for part in ("-p", plugin)), *options, *(tmp_path / name for name in files)]
    return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_who_leaves_something_is_named(tmp_path):
    done = run(tmp_path, {"test_it.py": LEAVES, "test_module.py": MODULE_LEAVES})
    ended = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("ERROR ", "FAILED "))]
    assert sorted(ended) == [
        "ERROR test_it.py::test_child",
        "ERROR test_it.py::test_garbage",
        "ERROR test_it.py::test_socket",
        "ERROR test_it.py::test_thread",
        "ERROR test_module.py::test_last",
        "FAILED test_it.py::test_failed",
    ], done.stdout
    assert "thread forgotten" in done.stdout
    assert "not waited for" in done.stdout
    assert "the fixtures of this module left behind:\ndescriptor socket:" in done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["here", "in_a_worker"])
def test_one_table_says_of_each_skip_why_and_what_to_do_and_an_unknown_one_fails_the_run(tmp_path, options):
    done = run(tmp_path, {"test_it.py": SKIPS}, *options, allowed="test_it.py::test_of_*  # no machine here\n\n")
    expected = "   2  no such machine.\n      what to do: buy one\n"
    expected += "        test_it.py::test_of_trio\n        test_it.py::test_plain\n"
    assert expected in done.stdout
    assert "what to do: (the reason does not say)\n        test_it.py::test_silent\n" in done.stdout
    assert done.returncode == 1
    listed = done.stdout.partition("this run has failed")[2].splitlines()
    assert listed[1:3] == ["test_it.py::test_plain", "test_it.py::test_silent"]


def test_what_is_on_the_list_may_be_skipped():
    skips = Skips(parse_allowed(["tests/a.py::*", "tests/b.py::test_x[1]"]))
    skips.reasons = dict.fromkeys(["tests/a.py::test_1", "tests/b.py::test_x[1]", "tests/b.py::test_y"], "why")
    assert skips.unknown() == ["tests/b.py::test_y"]
    assert Skips(None).unknown() == []


def test_a_skip_may_be_on_the_list_for_one_reason_and_for_no_other():
    skips = Skips(parse_allowed(["tests/a.py::* because it wants root*  # a remark", "tests/a.py::test_3"]))
    reasons = ["it wants root. What to do: be root", "it is not installed", "it is not installed"]
    skips.reasons = {f"tests/a.py::test_{number}": reason for number, reason in enumerate(reasons, 1)}
    assert skips.unknown() == ["tests/a.py::test_2"]


@pytest.mark.parametrize(
    ("euid", "programs", "is_allowed"),
    [
        (1000, {}, True),
        (0, {}, True),
        (0, {"apt-get"}, False),
        (0, {"apt-get", "slurmctld", "slurmd", "srun", "munged"}, False),
    ],
)
def test_a_run_by_root_fails_where_slurm_could_be_installed_and_was_not(monkeypatch, euid, programs, is_allowed):
    monkeypatch.setattr("os.geteuid", lambda: euid)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name in programs else None)
    monkeypatch.setenv("PRORL_ALLOWED_SKIPS", str(TESTS / "allowed_skips.txt"))
    skips = Skips(read_allowed())
    skips.reasons = {"tests/e2e/test_slurm_fleet.py::test_x": because(why_not("linuxproc"), "install it")}
    assert (skips.unknown() == []) is is_allowed
