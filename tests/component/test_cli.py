from __future__ import annotations

import pytest
from click.testing import CliRunner

from prorl_trio.cli import main

TOKEN = {"PRORL_TOKEN": "a-token"}


def run(*arguments, env=None):
    return CliRunner().invoke(main, list(arguments), env=env or {})


def test_help_names_every_command_those_of_other_packages_included():
    text = run("--help").output
    for command in ("serve", "submit", "status", "cancel", "show", "demo", "doctor"):
        assert command in text


@pytest.mark.parametrize("command", ["serve", "submit", "status", "cancel", "show", "demo", "doctor"])
def test_every_command_explains_itself(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("submit", "--tasks", "nope"), 1, "neither a task set (gsm8k) nor a readable file"),
        (("show", "/nope"), 1, "/nope: cannot be read"),
        (("serve", "--config", "/nope.toml"), 1, "/nope.toml: cannot be read"),
        (("status", "--url", "http://x"), 2, "ws://HOST:PORT"),
        (("demo", "--backend", "http://127.0.0.1:1"), 2, "--backend needs --model"),
        (("cancel",), 2, "JOB_ID"),
    ],
)
def test_bad_input_is_one_clear_line_and_no_traceback(arguments, code, message):
    result = run(*arguments, env=TOKEN)
    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_command_that_needs_a_token_says_where_it_is_looked_for():
    result = run("status", env={"PRORL_TOKEN": ""})
    assert result.exit_code == 2
    assert "--token" in result.output
