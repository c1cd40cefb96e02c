"""`prorl-trio run`, and `serve --handler`: a handler of one's own without a package."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from prorl_trio.cli import main, serve
from support.own_handler import MODULE

pytestmark = pytest.mark.timeout(60)


UNMADE = """
from my_env import SupportHandler

class Needy(SupportHandler):
    def __init__(self, url): ...

class Leaving(SupportHandler):
    def __init__(self): raise SystemExit(9)
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_env.py").write_text(MODULE)
    rows = [f'{{"instance_id": "t{n}", "handler": "support", "payload": {{"request": "help {n}"}}}}' for n in range(3)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    yield "tasks.jsonl"
    for name in ("my_env", "unmade"):
        sys.modules.pop(name, None)


def run(*arguments):
    return CliRunner().invoke(main, ["run", *arguments, "--provider", "process"])


def test_tasks_run_in_this_process_and_show_what_was_said_and_the_reward(tasks):
    done = run("my_env:SupportHandler", "--task", tasks, "--limit", "2")
    assert done.exit_code == 0, done.output
    assert "help 1" in done.stdout
    assert done.stdout.count("evaluator: it was looked at") == 2
    assert done.stdout.splitlines()[-1] == "t1: completed, reward 1.0"
    assert "my_env" in sys.modules, "the handler runs here, where a debugger sees it"


def test_a_bug_of_the_handler_is_shown_with_its_line(tasks):
    done = run("my_env:Broken", "--task", tasks)
    assert done.exit_code == 1
    assert "KeyError: 'nothing' (" in done.stdout.replace("\n", "")
    assert "my_env.py:27)" in done.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("my_env:Missing", "'my_env:Missing' cannot be loaded"),
        ("my_env:run_agent", "'my_env:run_agent' is not a subclass of AgentHandler"),
        ("../my_env:SupportHandler", "'../my_env:SupportHandler' is not MODULE:CLASS"),
        ("a:b:c", "'a:b:c' is not MODULE:CLASS"),
        ("leaving:X", "'leaving:X' cannot be loaded: SystemExit: 7 ("),
        ("unmade:Needy", "'unmade:Needy' cannot be created: TypeError: "),
        ("unmade:Leaving", "'unmade:Leaving' cannot be created: SystemExit: 9 ("),
        ("nobody", "no handler is called 'nobody'; name a class as MODULE:CLASS"),
    ],
)
def test_what_is_no_handler_is_named(tasks, tmp_path, target, said):
    (tmp_path / "leaving.py").write_text("raise SystemExit(7)")
    (tmp_path / "unmade.py").write_text(UNMADE)
    done = run(target, "--task", tasks)
    assert done.exit_code == 1
    assert said in done.stderr


def test_a_node_serves_a_handler_that_no_package_declares(tasks, tmp_path, monkeypatch):
    served = []

    async def serve_node(config, handlers, *, load, ends_process, task_status):  # noqa: ASYNC128 - it does not start
        served.extend(handlers.names)
        return True

    monkeypatch.setattr(serve, "serve_node", serve_node)
    (tmp_path / "node.toml").write_text('[model]\npath = "/m"\n[listen]\ntoken = "t"\n')
    done = CliRunner().invoke(main, ["serve", "--config", "node.toml", "--handler", "my_env:SupportHandler"])
    assert done.exit_code == 0, done.output
    assert {"math", "support"} <= {*served}
