"""Commands that take the place of `make` for who installed a wheel: `engine`, `setup`, `examples`."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from prorl_launch import commands, engine, setup
from prorl_launch.paths import checkout_dir
from prorl_trio.cli import main
from support.vllm_stand_in import SERVER

pytestmark = pytest.mark.timeout(60)

ENGINE = """
import sys
from pathlib import Path
from prorl_launch import engine
from prorl_trio.cli import main
engine.engine_python = lambda: Path(sys.argv[1])
main(sys.argv[2:])
"""


@pytest.fixture
def stand_in(tmp_path):
    """A stand-in for the engine's Python, which ends when the file `end` is there."""
    (tmp_path / "server.py").write_text(
        SERVER.replace("BEHAVIOUR", f"while not os.path.exists({str(tmp_path / 'end')!r}): await trio.sleep(0.1)")
        .replace("await trio.sleep_forever()", "")
        .replace('options["--max-model-len"]', "4096")
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "server.py"} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "model").mkdir()
    return python


@pytest.mark.parametrize(
    ("end", "code", "said"), [("Ctrl-C", 130, "interrupted"), ("by itself", 1, "vLLM has ended by itself; its log is")]
)
def test_an_engine_serves_until_its_end_and_prints_the_lines_of_node_toml(tmp_path, stand_in, end, code, said):
    options = ["--model", str(tmp_path / "model"), "--port", "0", "--log", str(tmp_path / "log")]
    argv = [sys.executable, "-c", ENGINE, str(stand_in), "engine", *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True) as command:
        try:
            lines = [command.stdout.readline() for _ in range(5)]
            tables = tomllib.loads("".join(lines))
            if end == "Ctrl-C":
                command.send_signal(signal.SIGINT)
            else:
                (tmp_path / "end").touch()
            _, error = command.communicate(timeout=30)
        finally:
            command.kill()  # of a failed test, which would else wait for it
    assert tables["model"]["path"] == str(tmp_path / "model")
    assert tables["backends"]["urls"][0] in lines[0]
    assert '"VLLM_SERVER_DEV_MODE": "1"' in (tmp_path / "log").read_text()
    assert (command.returncode, said in error) == (code, True), error


def test_an_engine_that_is_not_set_up_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "engine_python", lambda: tmp_path / "none")
    done = CliRunner().invoke(main, ["engine", "--model", str(tmp_path)])
    assert done.exit_code == 1
    assert "run: prorl-trio setup engine" in done.stderr


@pytest.mark.parametrize(
    ("asked", "parts"),
    [((), ["engine", "runtime"]), (("trainers",), ["train"]), (("apptainer", "engine"), ["apptainer", "engine"])],
)
def test_setup_does_the_parts_that_are_named(monkeypatch, asked, parts):
    done = []
    monkeypatch.setattr(commands, "set_up", lambda *given: done.append(given) or 7)
    assert CliRunner().invoke(main, ["setup", *asked, "--engine", "gpu"]).exit_code == 7
    assert done == [(parts, "gpu")]


def test_a_script_of_set_up_that_fails_is_an_error(tmp_path, monkeypatch, capsys):
    script = tmp_path / "apptainer.sh"
    script.write_text("exit 3\n")  # not executable, as in a wheel
    monkeypatch.setattr(setup.paths, "apptainer_script", lambda: script)
    assert setup.set_up(["apptainer"], "cpu") == 1
    assert "apptainer.sh ended with exit code 3" in capsys.readouterr().out


def test_examples_are_listed_copied_once_and_run(tmp_path):
    run = CliRunner().invoke
    listed = run(main, ["examples"]).stdout
    assert "examples/rest.py: Rollouts over REST" in listed
    assert "launch/systemd/prorl-node.service: A node as a service of systemd" in listed
    done = run(main, ["examples", "copy", str(tmp_path / "mine")])
    assert done.exit_code == 0, done.output
    copied = tmp_path / "mine" / "examples" / "local_node.py"
    assert copied.read_text() == (checkout_dir() / "examples" / "local_node.py").read_text()
    assert "open_local_node" in runpy.run_path(str(copied), run_name="imported")
    again = run(main, ["examples", "copy", str(tmp_path / "mine")])
    assert again.exit_code == 1
    assert "is there already; copy to another folder" in again.stderr
    assert Path(tmp_path, "mine/launch/kubernetes/Dockerfile").is_file()
