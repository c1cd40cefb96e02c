"""The command loads what it needs: little for its help and its errors, and a command's own parts for that command."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
from click.testing import CliRunner

from prorl_launch.slurm import sweep
from prorl_trio.cli import main

MAX_MODULES_OF_OURS = 60
OURS = ("prorl_trio", "prorl_ipc", "prorl_launch", "prorl_daemon", "perf")
HEAVY = ("numpy", "rich", "trio", "jinja2", "prometheus_client", "tokenizers", "h11", "trio_websocket")
RUN = """
import sys
from prorl_launch.slurm import sweep
from prorl_trio.cli import main
try:
    main(sys.argv[1:])
finally:
    print("loaded:", *sys.modules)
"""


def loaded(*arguments):
    """The exit code of a command, and the modules that are there when it ends."""
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.partition("loaded: ")[2].split()


def top_level(modules):
    return {module.partition(".")[0] for module in modules}


def test_importing_the_command_loads_no_test_tools():
    look = "import prorl_trio.cli, sys; assert not [m for m in sys.modules if 'testing' in m or m == 'pytest']"
    subprocess.run([sys.executable, "-c", look], check=True)


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--version"], 0), (["--nope"], 2), (["nope"], 2)])
def test_help_and_errors_load_no_command(arguments, code):
    ended, modules = loaded(*arguments)
    assert ended == code
    ours = [module for module in modules if module.partition(".")[0] in OURS]
    assert 1 < len(ours) < MAX_MODULES_OF_OURS, ours
    assert not top_level(modules) & {*HEAVY}
    assert not {f"prorl_trio.cli.{name}" for name in main.commands} & {*modules}


def test_the_simulation_is_loaded_by_its_command_alone():
    for name, simulates in {"simulate": True, "submit": False, "status": False, "serve": False}.items():
        code, modules = loaded(name, "--help")
        assert code == 0
        assert any(module.startswith("prorl_trio.simulation") for module in modules) == simulates, name


def test_the_help_says_of_each_command_in_one_line_what_it_is_for():
    lines = CliRunner().invoke(main, ["--help"], terminal_width=80).output.partition("Commands:\n")[2].splitlines()
    names = [line.split()[0] for line in lines]
    assert {*names} == {
        *main.commands,
        "agents",
        "demo",
        "doctor",
        "engine",
        "examples",
        "image",
        "learn",
        "local",
        "setup",
        "slurm",
        "tasks",
    }
    assert all(len(line.split()) > 3 and line.endswith(".") and not line.endswith("...") for line in lines), lines


def test_a_command_that_cannot_be_imported_does_not_spoil_the_help(monkeypatch):
    broken = metadata.EntryPoint("broken", "no_such_package.commands:broken", "prorl_trio.commands")
    monkeypatch.setattr("prorl_trio.cli.lazy_group.entry_points", lambda group: [broken])
    done = CliRunner().invoke(main, ["--help"])
    assert done.exit_code == 0
    assert "broken" in done.output
    done = CliRunner().invoke(main, ["broken"])
    assert done.exit_code == 1
    assert "the command 'broken' (no_such_package.commands:broken) cannot be loaded: No module named" in done.stderr


def test_a_name_that_is_nearly_right_is_told():
    assert "Did you mean 'status'?" in CliRunner().invoke(main, ["stats"]).stderr


def test_commands_of_other_packages_do_not_replace_ours(monkeypatch):
    other = metadata.EntryPoint("serve", "no_such_package.commands:serve", "prorl_trio.commands")
    monkeypatch.setattr("prorl_trio.cli.lazy_group.entry_points", lambda group: [other])
    assert CliRunner().invoke(main, ["serve", "--help"]).exit_code == 0


def test_no_number_is_no_reward_to_be_correct_from():
    done = CliRunner().invoke(main, ["eval", "--tasks", "sums", "--token", "x", "--correct-from", "nan"])
    assert done.exit_code != 0
    assert "nan is no number" in done.output


@pytest.mark.parametrize("argv", [("-m", "prorl_trio", "--version"), ("-m", "prorl_trio.cli", "--version")])
def test_the_package_runs_as_a_module(argv):
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=True)
    assert "version" in done.stdout


def test_the_sweep_tells_what_it_is_instead_of_sweeping(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "local_candidates", lambda _: pytest.fail("it sweeps"))
    monkeypatch.setattr(sys, "argv", ["prorl-trio-sweep", "--help"])
    with pytest.raises(SystemExit, match="0"):
        sweep.main()
    assert capsys.readouterr().out.startswith("Usage: prorl-trio-sweep\n")
