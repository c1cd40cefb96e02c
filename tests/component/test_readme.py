"""What the documents show works as it is printed, and what they name exists."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import click
import msgspec
import pytest
import trio

from prorl_trio.cli import main
from prorl_trio.config import NodeConfig, load_config
from prorl_trio.sandbox.sandbox import Sandbox
from prorl_trio.types.models import JobSpec, TaskInstance
from support.fake_node import FakeNode, make_outcome
from support.fake_service import TOKEN, open_service

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


class Node(FakeNode):
    """Takes jobs of any handler, and completes them at once; the infrastructure fails that of `fails`."""

    def __init__(self, fails=""):
        super().__init__(lambda spec: self.outcome_of(spec))
        self.fails = fails

    def outcome_of(self, spec):
        outcome = make_outcome(spec)
        if spec.job_id != self.fails:
            return outcome
        fields = {"status": "failed", "reward": None, "trajectory": None, "cause": "sandbox", "error": "no disk"}
        return msgspec.structs.replace(outcome, **fields)

    def check(self, spec, sink, ahead):
        pass


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
async def test_examples_for_trainers_run_and_end_by_themselves(code, capsys):
    assert "ws://127.0.0.1:8700" in code
    instance = TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})
    names = {"token": TOKEN, "specs": [JobSpec(job_id=f"job-{n}", instance=instance) for n in range(4)]}
    with trio.fail_after(30):
        async with open_service(Node(fails="q1-3")) as service:
            code = code.replace("ws://127.0.0.1:8700", service.url)
            if "async with" in code:
                imports, _, body = code.partition("\n\n")
                exec(f"{imports}\nasync def example():\n{textwrap.indent(body, '    ')}", names)
                await names["example"]()
                assert capsys.readouterr().out == "q1-3 failed sandbox no disk\n"
            else:
                await trio.to_thread.run_sync(exec, code, names)


LIMITS = README.partition("## Limits of this version")[2]
NOT_THERE_YET = {
    "code": "prorl_trio/handlers/code*",
    "shell": "prorl_trio/handlers/shell*",
    "SWE": "prorl_trio/handlers/swe*",
    "STEM": "prorl_trio/handlers/stem*",
    "Tavily": "prorl_trio/**/*search*",
    "QEMU": "prorl_trio/**/*qemu*",
    "gateway": "prorl_trio/**/*gateway*",
    "MCP": "prorl_trio/**/*mcp*",
    "TRL": "prorl_trio/integrations/*trl*",
    "veRL": "prorl_trio/integrations/*verl*",
    "NeMo RL": "prorl_trio/integrations/*nemo*",
    "DAPO": "prorl_trio/client/*dapo*",
    "Slurm": "launch/*slurm*",
    "joins several nodes": "prorl_trio/client/*fleet*",
    "viewer": "prorl_trio/**/*viewer*",
}
"""What README says is missing, and the files that would be there if it were not."""


@pytest.mark.parametrize("name", NOT_THERE_YET)
def test_what_is_missing_is_named_until_it_is_there(name):
    found = [path for path in ROOT.glob(NOT_THERE_YET[name]) if ".venv" not in path.parts]
    missing, _, _ = LIMITS.partition("**Of what is there**")
    assert (re.search(rf"\b{name}\b", missing) is None) == bool(found), found


def test_the_limits_are_named_where_the_claim_is_made():
    claim = README.partition("## Two commands")[0]
    assert "It implements" not in claim
    assert "not yet" in claim
    assert "(#limits-of-this-version)" in claim


def test_the_examples_are_there():
    assert len(blocks("python")) == 2
    assert len(blocks("toml")) == 1


def test_the_configuration_can_be_read(tmp_path):
    (tmp_path / "node.toml").write_text(blocks("toml")[0])
    config = load_config(tmp_path / "node.toml")
    assert config.backends.urls == ["http://gpu1:8000", "http://gpu2:8000"]
    example = main.get_command(click.Context(main), "serve").help.partition("A minimal node.toml:")[2]
    (tmp_path / "minimal.toml").write_text(textwrap.dedent(example))
    assert load_config(tmp_path / "minimal.toml").model.path == "/models/Qwen3-8B"


def commands_shown():
    """Each `prorl-trio ...` of the README's shell sessions and of its text."""
    text = [line for block in blocks("sh") for line in block.splitlines()]
    text += re.findall(r"`(prorl-trio [^`]+)`", README.replace("\n", " "))
    for line in text:
        command = line.partition("#")[0].strip().rstrip("&").strip()
        if command.startswith("prorl-trio "):
            yield command


@pytest.mark.parametrize("command", sorted(set(commands_shown())))
def test_commands_and_their_options_exist(command):
    found = main
    arguments = shlex.split(command)[1:]
    while arguments and isinstance(found, click.Group):
        name = arguments.pop(0)
        found = found.get_command(click.Context(found), name)
        assert found is not None, name
    options = {option for parameter in found.params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= options


def settings_named():
    """Each `table.field` that a document names of node.toml. What handlers call is `sandbox.NAME`, too."""
    tables = "|".join(field.name for field in msgspec.structs.fields(NodeConfig))
    for name in DOCUMENTS:
        for path in re.findall(rf"`((?:{tables})(?:\.[a-z_]+)+)(?: = [^`]*)?`", (ROOT / name).read_text()):
            if not path.endswith(".py") and not hasattr(Sandbox, path.removeprefix("sandbox.")):
                yield name, path


@pytest.mark.parametrize(("document", "path"), sorted(set(settings_named())))
def test_settings_exist(document, path):
    table = NodeConfig
    for name in path.split("."):
        fields = {field.name: field.type for field in msgspec.structs.fields(table)}
        assert name in fields, f"{document} names {path}"
        table = fields[name]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_linked_or_named_as_a_file_is_there(document):
    text = (ROOT / document).read_text()
    linked = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    named = re.findall(r"`((?:tests|prorl_trio|launch|ipc|perf|sandbox_daemon)/[\w/.]+)`", text)
    inside = [f"prorl_trio/{path}" for path in re.findall(r"`((?:service|inference|sandbox|ledger)/\w+\.py)`", text)]
    missing = [path for path in (*linked, *named, *inside) if not (ROOT / path).exists()]
    assert not missing


def test_modules_named_as_commands_exist():
    for document in DOCUMENTS:
        for module in re.findall(r"python -m (perf(?:\.\w+)?)", (ROOT / document).read_text()):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (document, module)
