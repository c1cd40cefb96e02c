from __future__ import annotations

import io
import json
import logging
from functools import partial
from pathlib import Path

import click
import msgspec
import pytest
import trio
from click.testing import CliRunner
from rich.console import Console

from prorl_trio.cli import connection, main, serve
from prorl_trio.cli.exit_codes import EXIT_INTERNAL, EXIT_JOBS_CUT
from prorl_trio.runs import progress
from prorl_trio.runs.recording import OutcomeFile, RunInfo, write_json
from prorl_trio.types.errors import ConfigError, InternalError
from prorl_trio.types.models import Turn
from support.fake_node import FakeNode, make_outcome, make_spec
from support.fake_service import TOKEN as SERVICE_TOKEN
from support.fake_service import open_service

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
        (("submit", "--tasks", "nope"), 1, "nor a readable file: No such file or directory"),
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
    assert "PRORL_TOKEN" in result.output


@pytest.fixture
def node_toml(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text('[model]\npath = "/nowhere"\n[listen]\ntoken = "t"\n')
    path.chmod(0o600)  # it has a token
    return str(path)


@pytest.mark.parametrize(("clean", "code"), [(True, 0), (False, EXIT_JOBS_CUT)])
def test_the_exit_code_says_whether_jobs_were_cut(monkeypatch, node_toml, clean, code):
    async def serve_node(config, handlers, *, load, ends_process, task_status):
        assert load() == config
        logging.getLogger("prorl_trio.node.node").info("working")
        task_status.started(("127.0.0.1", 1234))
        return clean

    monkeypatch.setattr(serve, "serve_node", serve_node)
    result = run("--log-format", "json", "serve", "--config", node_toml)
    assert result.exit_code == code
    assert "READY ws://127.0.0.1:1234\n" in result.stdout
    (line,) = [json.loads(line) for line in result.stderr.splitlines()]
    assert (line["level"], line["message"], line["logger"]) == ("info", "working", "prorl_trio.node.node")


def test_backends_and_their_weights_may_be_options(monkeypatch, node_toml):
    served = []

    async def serve_node(config, handlers, *, load, ends_process, task_status):
        served.append(config.backends)
        assert load().backends == config.backends
        task_status.started(("127.0.0.1", 1))
        return True

    monkeypatch.setattr(serve, "serve_node", serve_node)
    options = ("--backend", "http://a:1,weight=2", "--backend", "http://b:1")
    assert run("serve", "--config", node_toml, *options).exit_code == 0
    assert (served[0].urls, served[0].weights) == (["http://a:1", "http://b:1"], {"http://a:1": 2.0, "http://b:1": 1.0})
    for weight, why in [("x", "is not a number"), ("0", "must be > 0"), ("nan", "must be > 0")]:
        result = run("serve", "--config", node_toml, "--backend", f"http://a:1,weight={weight}")
        assert result.exit_code == 2
        assert why in result.stderr


def test_a_bug_of_ours_has_an_exit_code_of_its_own(monkeypatch, node_toml):
    async def serve_node(config, handlers, *, load, ends_process, task_status):
        raise InternalError("impossible")

    monkeypatch.setattr(serve, "serve_node", serve_node)
    result = run("serve", "--config", node_toml)
    assert result.exit_code == EXIT_INTERNAL
    assert "error: impossible" in result.stderr


def test_the_level_of_the_log_is_an_option(monkeypatch, node_toml):
    async def serve_node(config, handlers, *, load, ends_process, task_status):
        task_status.started(("127.0.0.1", 1))
        logging.getLogger("x").info("quiet please")
        return True

    monkeypatch.setattr(serve, "serve_node", serve_node)
    assert "quiet" not in run("--log-level", "warning", "serve", "--config", node_toml).stderr
    assert "quiet" in run("serve", "--config", node_toml, env={"PRORL_LOG_LEVEL": "debug"}).stderr


@pytest.mark.parametrize(
    "info", [None, RunInfo(model="", tasks="t", started="now"), RunInfo(model="/nowhere", tasks="t", started="now")]
)
def test_a_run_whose_model_is_not_known_is_shown_as_text(tmp_path, info):
    if info is not None:
        write_json(tmp_path / "run.json", info)
    turn = Turn(
        segment=0, completion_start=0, completion_end=8, text="six times seven", finish_reason="stop", tool_calls=[],
        observations=[], inference_s=1.0, tools_s=0.1,
    )  # fmt: skip
    outcome = make_outcome(make_spec("job-1"))
    trajectory = msgspec.structs.replace(outcome.trajectory, turns=[turn])
    with OutcomeFile(tmp_path / "trajectories.msgpack") as file:
        file.append(msgspec.structs.replace(outcome, trajectory=trajectory))
    result = run("show", str(tmp_path / "trajectories.msgpack"), "job-1")
    assert result.exit_code == 0, result.output
    assert "six times seven" in result.stdout
    assert "model folder is not known" in result.stderr


def test_what_ended_a_command_is_its_last_line(monkeypatch, node_toml):
    async def serve_node(config, handlers, *, load, ends_process, task_status):  # noqa: ASYNC128 - it does not start
        for n in range(2_000):
            logging.getLogger("x").info("line %d", n)
        raise ConfigError("the port is taken")

    monkeypatch.setattr(serve, "serve_node", serve_node)
    result = run("serve", "--config", node_toml)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert (len(lines), lines[-1]) == (2_001, "error: the port is taken")


@pytest.fixture
def recorded(tmp_path):
    with OutcomeFile(tmp_path / "trajectories.msgpack") as file:
        for n in range(50):
            file.append(make_outcome(make_spec(f"job-{n}")))
    return str(tmp_path / "trajectories.msgpack")


def test_show_takes_a_runs_folder_and_names_jobs_where_none_matches(recorded):
    folder = str(Path(recorded).parent)
    assert run("show", folder).stdout == run("show", recorded).stdout
    result = run("show", folder, "nope")
    assert result.exit_code == 1
    assert "match 'nope': it has job-0, job-1, job-2, job-3, job-4, ...; without JOB_ID all are listed" in result.stderr


def test_show_has_times_and_log_probabilities(recorded):
    result = run("show", recorded, "job-7", "--logprobs")
    assert result.exit_code == 0, result.output
    for wanted in ("init 0.00 s (queued 0.00), run", "logprob mean", "inference s", "-2.0000"):
        assert wanted in result.stdout
    assert "-2.0000" not in run("show", recorded, "job-7").stdout
    assert "-1.050" in run("show", recorded).stdout, "the mean of each, in the list"


@pytest.mark.parametrize(
    ("options", "terminal", "lines", "paged"),
    [
        ((), True, 10, True),
        ((), True, 500, False),
        ((), False, 10, False),
        (("--no-pager",), True, 10, False),
        (("--pager",), False, 500, True),
    ],
)
def test_what_is_too_long_for_the_terminal_comes_in_a_pager(monkeypatch, recorded, options, terminal, lines, paged):
    shown = io.StringIO()
    console = Console(file=shown, width=80, height=lines, force_terminal=terminal, color_system=None)
    monkeypatch.setattr(progress, "console", console)
    pages = []
    monkeypatch.setattr(click, "echo_via_pager", lambda text, color: pages.append(text))
    assert run("show", recorded, *options).exit_code == 0
    assert [len(pages), "job-49" in "".join(pages), "job-49" in shown.getvalue()] == [paged, paged, not paged]


async def test_a_command_that_asks_a_node_says_one_line_when_there_is_none(monkeypatch):
    monkeypatch.setattr(connection, "connect", partial(connection.connect, connect_timeout_s=0.3))
    for env, alone in ((TOKEN, True), ({**TOKEN, "PRORL_LOG_LEVEL": "info"}, False)):
        result = await trio.to_thread.run_sync(partial(run, "status", "--url", "ws://127.0.0.1:1", env=env))
        assert result.exit_code == 1
        *before, last = result.stderr.splitlines()
        assert (not before) == alone
        assert last.startswith("error: no connection to ws://127.0.0.1:1/ within 0.3 s")
        assert "Connection refused" in last


async def test_a_node_that_is_not_there_is_told_with_the_reason(monkeypatch):
    monkeypatch.setattr(connection, "connect", partial(connection.connect, connect_timeout_s=0.01))
    result = await trio.to_thread.run_sync(partial(run, "status", "--url", "ws://127.0.0.1:1", env=TOKEN))
    assert result.exit_code == 1
    assert "no connection to ws://127.0.0.1:1/ within 0.01 s" in result.stderr
    assert "Connection refused; is a node listening there?" in result.stderr


@pytest.mark.parametrize("command", [("image", "pull", "docker://a/b"), ("image", "runtime")])
def test_a_cache_folder_that_cannot_be_made_is_told_in_one_line(tmp_path, command):
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    result = run(*command, env={"PRORL_CACHE_DIR": str(cache), "PATH": "/nonexistent"})
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert f"{tmp_path}/file" in result.stderr


async def test_a_node_is_found_by_its_endpoint_file(tmp_path):
    async with open_service(FakeNode()) as service:
        (tmp_path / "endpoint.json").write_text(json.dumps({"url": service.url}))
        for env, options in [
            ({}, ("--endpoint-file", str(tmp_path / "endpoint.json"))),
            ({"PRORL_ENDPOINT_FILE": str(tmp_path / "endpoint.json"), "PRORL_URL": "ws://127.0.0.1:1"}, ()),
        ]:
            call = partial(run, "status", *options, env={"PRORL_TOKEN": SERVICE_TOKEN, **env})
            with trio.fail_after(30):
                result = await trio.to_thread.run_sync(call)
            assert (result.exit_code, '"node_id": "fake-node"' in result.stdout) == (0, True), result.output
