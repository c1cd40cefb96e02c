"""The documents: what they show works as it is printed, and what they name exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import pytest
import trio

from prorl_trio.cli import main
from prorl_trio.config import BackendConfig, NodeConfig, load_config
from prorl_trio.edges.prorl_compat import compat_endpoints
from prorl_trio.edges.rest.app import ENDPOINTS
from prorl_trio.sandbox.sandbox import Sandbox
from prorl_trio.types.models import JobSpec, TaskInstance
from support.fake_node import FakeNode, make_outcome
from support.fake_service import TOKEN, open_service
from support.tiny_weights import make_adapter, make_model, tensors

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *("README.md", "ARCHITECTURE.md", "GUARANTEES.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
]
TEXTS = {name: (ROOT / name).read_text() for name in DOCUMENTS}
README = TEXTS["README.md"]
PACKAGES = ("prorl_trio", "sandbox_daemon", "ipc", "launch", "perf", "examples", "tests")
SOURCES = ("Makefile", "pyproject.toml", "ipc/PROTOCOL.md")
WITHOUT_SYNTAX = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class Block(NamedTuple):
    """A fenced block, `number` of its language in `document`."""

    document: str
    number: int
    text: str

    @property
    def file_name(self) -> str:
        """Return the name of the file that the block is to be saved as, which its first line says; else nothing."""
        found = re.match(r"# ([\w/]+\.\w+)\n", self.text)
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.document}-{self.number}"


def blocks(language, *documents):
    """The blocks in `language` of some documents, or of all."""
    for document in documents or DOCUMENTS:
        texts = re.findall(rf"```{language}\n(.*?)```", TEXTS[document], re.DOTALL)
        yield from (Block(document, number, text) for number, text in enumerate(texts, 1))


@cache
def sources():
    """The text of all code, in one piece."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path != Path(__file__)]
    files += (ROOT / "launch/kubernetes").rglob("*.yaml")
    return "\n".join(path.read_text() for path in (*files, *(ROOT / name for name in SOURCES)))


# ---------------------------------------------------------------- Python


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


URL = "ws://127.0.0.1:8700"
PYTHON = list(blocks("python"))
TRAINERS = [block for block in PYTHON if URL in block.text]
PRINTED = {
    "README.md-1": "0 16.0 (16, 8) float32 128\n1 16.0 (16, 8) float32 128\n2 16.0 (16, 8) float32 128\n",
    "docs/trainer.md-1": "q1-3 failed sandbox no disk\n",
}
"""The output of those programs that print anything."""


@pytest.mark.parametrize("block", TRAINERS, ids=str)
async def test_programs_of_trainers_run_and_end_by_themselves(block, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PRORL_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    instance = TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})
    names = {
        "token": TOKEN,
        "state": tensors(),
        "specs": [JobSpec(job_id=f"job-{n}", instance=instance) for n in range(4)],
    }
    for folder in (tmp_path, tmp_path / "step-2"):
        make_model(folder)
    make_adapter(tmp_path / "adapter")
    node = Node(fails="q1-3")
    node.model_folder = str(tmp_path)
    with trio.fail_after(30):
        await node.backends.add("http://engine:1")  # what updates of the policy are for
        async with open_service(node) as service:
            text = block.text.replace(URL, service.url).replace("/shared/weights", str(tmp_path))
            code = compile(text, str(block), "exec", WITHOUT_SYNTAX)
            if code.co_flags & inspect.CO_COROUTINE:
                await eval(code, names)
            else:
                await trio.to_thread.run_sync(exec, code, names)
        await node.backends.aclose()
    assert capsys.readouterr().out == PRINTED.get(str(block), "")


def test_trainers_find_programs():
    assert set(PRINTED) <= {str(block) for block in TRAINERS}


@pytest.mark.parametrize("document", sorted({block.document for block in PYTHON if block.file_name}))
def test_files_of_a_guide_pass_their_own_tests(document, tmp_path):
    files = [block for block in PYTHON if block.document == document and block.file_name]
    for block in files:
        path = tmp_path / block.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntrio_mode = true\npythonpath = .\nfilterwarnings = error\n")
    tests = [block.file_name for block in files if Path(block.file_name).name.startswith("test_")]
    assert tests, "a guide's files are tried by a test that it shows"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", *tests]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


ELSEWHERE = {"datasets", "ray", "skyrl", "torch", "trl", "verl"}
"""Packages of trainers' own environments, in which tests run the programs that import them."""
THERE = ("prorl_trio.learn.", "prorl_trio.integrations.skyrl.")
"""Our modules that need one of them."""


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles_and_what_it_imports_exists(block):
    tree = ast.parse(block.text)
    compile(block.text, str(block), "exec", WITHOUT_SYNTAX)
    shown = {Path(other.file_name).stem for other in PYTHON if other.file_name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in ELSEWHERE:
                    importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module not in shown:
            if node.module.partition(".")[0] in ELSEWHERE or node.module.startswith(THERE):
                continue
            module = importlib.import_module(node.module)
            public = getattr(module, "__all__", ())  # what is imported at its first use is only named
            missing = [
                alias.name for alias in node.names if alias.name not in public and not hasattr(module, alias.name)
            ]
            assert not missing, node.module


# ---------------------------------------------------------------- what is missing

LIMITS = README.partition("## Limits of this version")[2]
NOT_THERE_YET = {
    "code": "prorl_trio/tasks/handlers/code*",
    "shell": "prorl_trio/tasks/handlers/shell*",
    "R2E-Gym": "prorl_trio/tasks/sets/swe_rows*",
    "STEM": "prorl_trio/tasks/handlers/stem*",
    "Tavily": "prorl_trio/**/*search*",
    "QEMU": "prorl_trio/**/*qemu*",
    "gateway": "prorl_trio/**/*gateway*",
    "MCP": "prorl_trio/**/*mcp*",
    "TRL": "prorl_trio/integrations/*trl*",
    "verl": "prorl_trio/integrations/*verl*",
    "NeMo RL": "prorl_trio/integrations/*nemo*",
    "DAPO": "prorl_trio/sampling*",
    "Slurm": "launch/*/*slurm*",
    "joins several nodes": "prorl_trio/fleet/*",
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
    assert "What is not is named under\n[Limits](#limits-of-this-version)." in claim


def test_readme_is_short():
    assert len(README.splitlines()) <= 120


# ---------------------------------------------------------------- configuration

TOML = [block for block in blocks("toml") if "[project" not in block.text]
PROJECTS = [block for block in blocks("toml") if "[project" in block.text]


@pytest.mark.parametrize("block", TOML, ids=str)
def test_configurations_can_be_read(block, tmp_path):
    tables = tomllib.loads(block.text)
    assert msgspec.convert({"model": {"path": "/m"}, **tables}, NodeConfig).model.path
    if "model" in tables:
        (tmp_path / "node.toml").write_text(block.text)
        assert load_config(tmp_path / "node.toml").model.path


@pytest.mark.parametrize("block", PROJECTS, ids=str)
def test_entry_points_are_of_groups_that_are_read(block):
    groups = tomllib.loads(block.text)["project"]["entry-points"]
    assert groups
    for group in groups:
        assert f'"{group}"' in sources()


def test_the_example_of_serve_can_be_read(tmp_path):
    example = main.get_command(click.Context(main), "serve").help.partition("A minimal node.toml:")[2]
    (tmp_path / "minimal.toml").write_text(textwrap.dedent(example))
    assert load_config(tmp_path / "minimal.toml").model.path == "/models/Qwen3-8B"


def settings_named():
    """Each `table.field` that a document names of node.toml. What handlers call is `sandbox.NAME`, too."""
    tables = "|".join(field.name for field in msgspec.structs.fields(NodeConfig))
    for name, text in TEXTS.items():
        for path in re.findall(rf"`((?:{tables})(?:\.[a-z_]+)+)(?: = [^`]*)?`", text):
            if not path.endswith(".py") and not hasattr(Sandbox, path.removeprefix("sandbox.")):
                yield name, path


@pytest.mark.parametrize(("document", "path"), sorted(set(settings_named())))
def test_settings_exist(document, path):
    table = NodeConfig
    for name in path.split("."):
        fields = {field.name: field.type for field in msgspec.structs.fields(table)}
        assert name in fields, f"{document} names {path}"
        table = fields[name]


# ---------------------------------------------------------------- commands


def commands_shown():
    """Each `prorl-trio ...` of the documents' shell sessions and of their text."""
    lines = [line for block in blocks("sh") for line in block.text.splitlines()]
    for text in TEXTS.values():
        lines += re.findall(r"`(prorl-trio [^`]+)`", text.replace("\n", " "))
    for line in lines:
        command = line.partition("#")[0].strip().rstrip("&").strip()
        if command.startswith("prorl-trio "):
            yield command


@pytest.mark.parametrize("command", sorted(set(commands_shown())))
def test_commands_and_their_options_exist(command):
    found = main
    arguments = shlex.split(command)[1:]
    while arguments and isinstance(found, click.Group):
        name = arguments.pop(0)
        if name.startswith("--"):  # an option of the group, with its value
            assert name in {option for parameter in found.params for option in parameter.opts}
            del arguments[:1]
            continue
        found = found.get_command(click.Context(found), name)
        assert found is not None, name
    options = {option for parameter in found.params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= options | {"--help"}


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for block in blocks("sh") for line in block.text.splitlines() if line.startswith("make ")]
    for text in TEXTS.values():
        lines += re.findall(r"`(make [^`]+)`", text.replace("\n", " "))
    named = {word for line in lines for word in line.partition("#")[0].split()[1:] if "=" not in word}
    assert named <= targets


def test_modules_named_as_commands_exist():
    for document, text in TEXTS.items():
        for module in re.findall(r"python -m (perf(?:\.\w+)?)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (document, module)


def test_variables_of_the_environment_are_read_somewhere():
    scripts = "".join(path.read_text() for path in ROOT.glob("launch/*/*.sh"))
    named = {name for text in TEXTS.values() for name in re.findall(r"\bPRORL_[A-Z_]+\b", text)}
    shown = {name for block in blocks("sh") for name in re.findall(r"\b(PRORL_[A-Z_]+)=", block.text)}
    assert not {name for name in named - shown - {"PRORL_REST"} if name not in sources() + scripts}


# ---------------------------------------------------------------- names and links


def test_endpoints_exist():
    there = {
        (endpoint.method, endpoint.path) for endpoint in (*ENDPOINTS, *compat_endpoints(BackendConfig(), free=True))
    }
    named = {pair for text in TEXTS.values() for pair in re.findall(r"`(GET|POST|DELETE|PUT) (/[\w/{}.]+)", text)}
    engines = {("POST", "/generate")}  # of engines, not ours
    assert named - engines <= there


def anchors(path):
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_linked_or_named_as_a_file_is_there(document):
    text, folder = TEXTS[document], (ROOT / document).parent
    rooms = "|".join(sorted(path.name for path in (ROOT / "prorl_trio").iterdir() if path.is_dir()))
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = folder / name if name else ROOT / document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            missing.append(target)
    named = re.findall(r"`((?:tests|prorl_trio|launch|ipc|perf|sandbox_daemon|docs|examples)/[\w/.-]+)`", text)
    inside = [f"prorl_trio/{path}" for path in re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", text)]
    missing += [path for path in (*named, *inside) if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_names_of_code_are_names_of_the_code(document):
    """CamelCase, snake_case and dotted names in backquotes: what was renamed must not live on in a document.

    Rows of tables that begin with a link to elsewhere tell of other projects, and have their names.
    """
    ours = re.sub(r"^\| \[[^]]+\]\(https?://.*$", "", TEXTS[document], flags=re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", ours, flags=re.DOTALL))
    names = {name for code in inline if "/" not in code for name in re.findall(r"[A-Za-z]\w*", code)}
    names = {name for name in names if re.search(r"[a-z][A-Z]|[a-z]_[a-z]", name)}
    assert not {name for name in names if name not in sources() and not name.startswith(("prorl_", "my_"))}


def test_architecture_names_each_room():
    rooms = {path.parent.name for path in (ROOT / "prorl_trio").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", TEXTS["ARCHITECTURE.md"], re.MULTILINE)) >= rooms


def test_metrics_that_are_named_exist():
    named = {name for text in TEXTS.values() for name in re.findall(r"`prorl_((?!trio)\w+)", text)}
    for name in named:
        bare = re.sub(r"(_total|_seconds)$", "", name)
        part = bare.partition("_")[2]
        assert f'"{bare}"' in sources() or f"prorl_{name}" in sources() or (part and part in sources()), name


def test_shell_sessions_are_shell(tmp_path):
    for block in blocks("sh"):
        script = tmp_path / "block.sh"
        script.write_text(block.text)
        done = subprocess.run(["sh", "-n", script], capture_output=True, text=True, check=False, env=os.environ)
        assert done.returncode == 0, (str(block), done.stderr)
