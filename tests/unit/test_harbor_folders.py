"""Folders of Harbor tasks, read into instances; and what is refused, by its file and key or line."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from prorl_trio.tasks.handlers.shell import payload
from prorl_trio.tasks.handlers.shell.payload import read_payload
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.types.errors import ConfigError, MalformedJob


@pytest.fixture
def load(tmp_path):
    def read(toml="", dockerfile="FROM host\n", files=None):
        written = {
            "task.toml": toml,
            "instruction.md": "Do it.",
            "environment/Dockerfile": dockerfile,
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
            "solution/solve.sh": "true # the solution",
        }
        for name, content in (written | (files or {})).items():
            path = tmp_path / "one" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return load_task_set(str(tmp_path))

    return read


def test_a_task_is_its_folder_without_its_solution(load):
    [instance] = load(
        'version = "1.0"\nartifacts = ["/app/a", {source = "b"}]\n[metadata]\nauthor = "x"\n'
        '[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 30.0\nenv = {A = "1"}\n'
        '[environment]\nmemory_mb = 512\nstorage_mb = 64\ncpus = 2\nnetwork_mode = "no-network"\n',
        files={"tests/cases/a.txt": "a"},
    )
    task = read_payload(instance.payload)
    [step] = task.steps
    assert (instance.instance_id, instance.handler, step.instruction) == ("one", "shell", "Do it.")
    assert task.environment.image == "host"
    assert (task.environment.memory_bytes, task.environment.disk_bytes) == (512 * 1024**2, 64 * 1024**2)
    assert (task.environment.network, task.agent_timeout_s, step.verifier.timeout_s) == (False, 60, 30)
    assert step.verifier.artifacts == ["/app/a", "b"]
    assert sorted(step.verifier.files) == ["/tests/cases/a.txt", "/tests/test.sh"]
    assert "solution" not in str(instance.payload)
    assert base64.b64encode(b"true # the solution").decode() not in str(instance.payload)


STEPS = """\
artifacts = ["a"]
multi_step_reward_strategy = "final"
[agent]
timeout_sec = 10
[verifier]
timeout_sec = 30
env = {A = "1", B = "1"}
[environment]
workdir = "/work"
[[steps]]
name = "first"
min_reward = 0.5
artifacts = ["b"]
[steps.verifier]
environment_mode = "separate"
env = {B = "2"}
[[steps]]
name = "second"
min_reward = {speed = 1, reward = 0.5}
[steps.agent]
timeout_sec = 20
[steps.verifier]
timeout_sec = 5
"""
STEP_FILES = {
    "steps/first/instruction.md": "<!-- a canary 1 -->\n# canary 2\n\nDo this.",
    "steps/first/tests/case": "first",
    "steps/second/instruction.md": "Do that.",
    "steps/second/tests/test.sh": "exit 1",
    "steps/second/workdir/setup.sh": "touch made",
    "steps/second/workdir/in/it": "x",
}


def test_steps_have_their_own_files_and_what_the_task_says(load):
    [instance] = load(STEPS, files=STEP_FILES)
    task = read_payload(instance.payload)
    assert (task.reward_strategy, task.agent_timeout_s) == ("final", 30)
    first, second = task.steps
    assert (first.name, first.instruction, first.min_reward) == ("first", "Do this.", {"reward": 0.5})
    assert (second.name, second.instruction, second.min_reward) == ("second", "Do that.", {"speed": 1, "reward": 0.5})
    assert set(first.verifier.files) == {"/tests/test.sh", "/tests/case"}
    assert first.verifier.files["/tests/test.sh"].content.startswith(b"echo 1")  # the task's, where the step has none
    assert second.verifier.files["/tests/test.sh"].content == b"exit 1"
    assert (first.verifier.separate, second.verifier.separate) == (True, False)
    assert (first.verifier.timeout_s, second.verifier.timeout_s) == (30, 5)
    assert (first.verifier.env, second.verifier.env) == ({"A": "1", "B": "2"}, {"A": "1", "B": "1"})
    assert (first.verifier.artifacts, second.verifier.artifacts) == (["a", "b"], ["a"])
    assert (first.setup.command, dict(first.setup.files)) == ("", {})
    assert (second.setup.command, second.setup.cwd) == ("bash setup.sh", "/work")
    assert set(second.setup.files) == {"/work/setup.sh", "/work/in/it"}


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("python:3.12", "docker://python:3.12"),
        ("ghcr.io/some/image", "docker://ghcr.io/some/image"),
        ("docker://a/b:1", "docker://a/b:1"),
        ("built-here", "built-here"),
        ("mapped:1", "host"),
    ],
)
def test_an_image_is_pulled_unless_the_node_has_another_for_it(load, tmp_path, name, image):
    (tmp_path / "images.toml").write_text('[images]\n"mapped:1" = "host"\n')
    for toml, dockerfile in ((f'[environment]\ndocker_image = "{name}"\n', "FROM x\n"), ("", f"FROM {name}\n")):
        [instance] = load(toml, dockerfile=dockerfile)
        assert read_payload(instance.payload).environment.image == image


def test_the_steps_of_the_guide_are_read(load):
    guide = (Path(__file__).parents[2] / "docs" / "harbor.md").read_text()
    [toml] = [block for block in re.findall(r"```ini\n(.*?)```", guide, re.DOTALL) if "[[steps]]" in block]
    [instance] = load(toml, files={f"steps/{name}/instruction.md": "Do it." for name in ("parse", "report")})
    parse, report = read_payload(instance.payload).steps
    assert (parse.min_reward, parse.verifier.separate, report.verifier.separate) == ({"reward": 0.5}, True, False)


def test_solutions_travel_where_they_are_asked_for(load, tmp_path):
    load(STEPS + '[solution]\nenv = {KEY = "1"}\n', files=STEP_FILES | {"steps/second/solution/solve.sh": "echo own"})
    [instance] = load_task_set(str(tmp_path), solutions=True)
    found = [step.solution for step in read_payload(instance.payload).steps]
    assert [each.files[each.script].content for each in found] == [b"true # the solution", b"echo own"]
    assert [each.env for each in found] == [{"KEY": "1"}] * 2
    (tmp_path / "one/solution/solve.sh").unlink()
    with pytest.raises(ConfigError, match=r"one/solution/solve.sh is not there"):
        load_task_set(str(tmp_path), solutions=True)


def test_a_verifier_of_its_own_is_made_of_what_its_tests_bring(load):
    def environment(toml, files):
        [instance] = load(f"{toml}\n[environment]\nmemory_mb = 512\n", files=files)
        return read_payload(instance.payload).steps[0].verifier.environment

    separate = '[verifier]\nenvironment_mode = "separate"\n'
    assert environment(separate, {}) is None
    assert environment(f"{separate}[verifier.environment]\nmemory_mb = 64\n", {}).image == "host"
    made = environment(separate, {"tests/Dockerfile": "FROM other:1\n"})
    assert (made.image, made.memory_bytes) == ("docker://other:1", 512 * 1024**2)
    named = f'{separate}[verifier.environment]\ndocker_image = "named:1"\n'
    assert environment(named, {}).image == "docker://named:1"


def test_a_dockerfile_is_made_step_by_step(load):
    [instance] = load(
        dockerfile='# a comment\nFROM docker.io/library/debian:12 AS base\nENV A=1 B="two words"\nWORKDIR /srv\n'
        'WORKDIR app\nCOPY a.txt copied/\nRUN ["touch", "a b"]\nRUN echo \\\n  joined\n',
        files={"environment/a.txt": "content"},
    )
    made = read_payload(instance.payload).environment
    assert (made.image, made.workdir, made.env) == (
        "docker://docker.io/library/debian:12",
        "/srv/app",
        {"A": "1", "B": "two words"},
    )
    assert [(list(step.files), step.command.rpartition("; ")[2], step.cwd) for step in made.build] == [
        ([], "", "/srv"),
        ([], "", "/srv/app"),
        (["/srv/app/copied/a.txt"], "", ""),
        ([], "touch 'a b'", "/srv/app"),
        ([], "echo   joined", "/srv/app"),
    ]


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[agnt]\n", "task.toml: Object contains unknown field `agnt`"),
        ("[agent]\ntimeout = 3\n", r"unknown field `timeout` - at `\$.agent`"),
        ('[verifier]\ntimeout_sec = "3"\n', r"Expected `float \| null`, got `str` - at `\$.verifier.timeout_sec`"),
        ("[verifier]\ntimeout_sec = -1\n", r"\$.verifier.timeout_sec"),
        ("[environment\n", "task.toml: Expected"),
        ('[environment]\nmemory = "2 GiB"\n', "memory = '2 GiB' is no size such as"),
        ('[environment]\nmemory = "2G"\nmemory_mb = 1024\n', "are not the same size"),
        ("[environment]\nmemory = 2048\n", r"Expected `str \| null`, got `int` - at `\$.environment.memory`"),
        ('schema_version = "2.0"\n', "schema_version is '2.0'"),
        ('[agent]\nuser = "alice"\n', "agent.user: 'alice'"),
        ('[environment]\nnetwork_mode = "allowlist"\n', "environment.network_mode: allowlist"),
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ('[environment]\nenv = {TOKEN = "${TOKEN}"}\n', "environment.env.TOKEN"),
        ('[[environment.mcp_servers]]\nname = "x"\n', "environment.mcp_servers"),
        ('[[verifier.collect]]\ncommand = "x"\n', "verifier.collect"),
        ('[[steps]]\nname = "../one"\n', r"'../one' is no plain name of a folder - at `\$.steps"),
        ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"\n', r"steps\[1\].name: 'A': another step has it"),
        ('[[steps]]\nname = "a"\nverifier = {user = "bob"}\n', r"steps\[0\].verifier.user: 'bob'"),
        ('[[steps]]\nname = "a"\nhealthcheck = {command = "x"}\n', r"steps\[0\].healthcheck"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\n', "environment_mode is shared"),
    ],
)
def test_a_task_toml_is_refused_by_file_and_key(load, toml, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load(toml)
    assert "one/task.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("VOLUME /data", "line 2: VOLUME /data: cannot be converted"),
        ('ENTRYPOINT ["/start.sh"]', "line 2: ENTRYPOINT"),
        ("HEALTHCHECK CMD true", "line 2: HEALTHCHECK"),
        ("ADD https://example.org/x /", "line 2: ADD"),
        ("ARG A=$B", "without variables"),
        ("RUN --mount=type=cache true", "line 2: RUN --mount"),
        ("RUN cat <<END", "a here-document"),
        ("COPY nothing.txt /", "there is no"),
        ("COPY *.txt /", "without patterns"),
        ("COPY ../tests/test.sh /", "is outside of"),
        ("ENV PATH=/x:$PATH", "without variables"),
        ("FROM other", "several stages"),
        ("USER alice", "FROM, RUN, COPY, WORKDIR and ENV"),
    ],
)
def test_a_dockerfile_is_refused_by_file_and_line(load, line, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load(dockerfile=f"FROM host\n{line}\n")
    assert "environment/" in str(caught.value)


def test_what_has_no_effect_on_a_task_is_left_out_of_a_dockerfile(load):
    dockerfile = (
        "ARG VERSION=3.12\nARG NOTHING\nFROM python:${VERSION}-slim AS base\nMAINTAINER ada\nLABEL a=b c=d\n"
        "ARG DEBIAN_FRONTEND=noninteractive VERSION\nARG OTHER\nENV OTHER=env\nUSER root\n"
        'RUN echo $VERSION | cat\nRUN ["true", "x y"]\n'
        'EXPOSE 80/tcp 443\nSTOPSIGNAL SIGINT\nCMD ["python3"]\n'
    )
    environment = load(dockerfile=dockerfile)[0].payload["environment"]
    assert environment["image"] == "docker://python:3.12-slim"
    assert environment["env"] == {"OTHER": "env"}
    exports = "export DEBIAN_FRONTEND=noninteractive; export VERSION=3.12; export OTHER=env; "
    assert [step["command"] for step in environment["build"]] == [
        f"{exports}echo $VERSION | cat",
        f"{exports}true 'x y'",
    ]


@pytest.mark.parametrize(
    ("lines", "memory_mb", "storage_mb"),
    [
        ('memory = "2G"\nstorage = "10G"', 2048, 10240),
        ('memory = "512m"', 512, None),
        ('memory = " 1.5 g "', 1536, None),
        ('storage = "2097152K"', None, 2048),
        ('memory = "2G"\nmemory_mb = 2048', 2048, None),
        ("memory_mb = 100\nstorage_mb = 200", 100, 200),
        ("", None, None),
    ],
)
@pytest.mark.parametrize("version", ["version", "schema_version"])
def test_sizes_of_every_schema_are_read(load, version, lines, memory_mb, storage_mb):
    environment = load(f'{version} = "1.0"\n[environment]\ncpus = 1\n{lines}\n')[0].payload["environment"]
    sizes = (environment["memory_bytes"], environment["disk_bytes"])
    assert sizes == tuple(size and size * 1024 * 1024 for size in (memory_mb, storage_mb))


def test_tasks_of_the_first_terminal_bench_are_refused_by_their_name(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "task.yaml").write_text("instruction: do it\n")
    for folder in (tmp_path, tmp_path / "one"):
        with pytest.raises(
            ConfigError, match=r"one/task.yaml: tasks of the first Terminal-Bench .*harbor task migrate"
        ):
            load_task_set(str(folder))


def test_more_than_travels_is_refused_by_the_file(load, monkeypatch):
    monkeypatch.setattr("prorl_trio.tasks.sets.harbor.MAX_TASK_BYTES", 50)
    with pytest.raises(ConfigError, match=r"tests/a-large: with it the task's files have \d+ bytes; the limit is 50"):
        load(files={"tests/a-large": "x" * 90})


def test_a_link_out_of_its_folder_does_not_travel(load, tmp_path):
    load()
    (tmp_path / "one" / "tests" / "link").symlink_to("../solution/solve.sh")
    with pytest.raises(ConfigError, match=r"tests/link leads out of .*tests"):
        load()


def test_the_node_refuses_more_than_travels_too(load, monkeypatch):
    [instance] = load()
    monkeypatch.setattr(payload, "MAX_TASK_BYTES", 10)
    with pytest.raises(MalformedJob, match=r"/tests/test.sh its files have \d+ bytes; the limit is 10"):
        read_payload(instance.payload)
