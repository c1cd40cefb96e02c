"""Mining of a made-up package: from two archives on an index to verified rows, in real sandboxes."""

import http.server
import io
import json
import tarfile
import threading

import pytest
import trio
from click.testing import CliRunner

from prorl_launch.mining import commands, verification
from prorl_launch.mining.environments import LocalBench
from prorl_launch.mining.index import IndexSettings
from prorl_launch.mining.miner import Wanted
from prorl_launch.mining.rows import read_rows
from prorl_launch.mining.verification import CHECKS, HACKS, verify_row
from prorl_trio.config import SandboxConfig
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.images.layers import CONTENT_NAME, find_layer
from prorl_trio.sandbox.images.store import find_image
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.tasks.sets import load_task_set
from support.mining_rig import mine
from support.own_cache import use_own_cache

GAP = "\n".join(f"# {number}" for number in range(9))
OLD = f"def add(a, b):\n    return a - b\n\n\n{GAP}\n\n\ndef double(a):\n    return 3 * a\n"
OLD += f"\n\n{GAP}\n\n\ndef same(a):\n    return a\n"
NEW = OLD.replace("a - b", "a + b").replace("3 * a", "2 * a")
OLD_TESTS = "from calc import same\n\n\ndef test_same():\n    assert same(1) == 1\n"
NEW_TESTS = f"""\
import pytest
from calc import add, double

{OLD_TESTS}

@pytest.mark.parametrize("text", ["a b", "it's", 'say "x"'])
def test_words(text):
    assert add(text, "") == text


def test_double():
    assert double(2) == 4
"""
CHANGES = "1.1\n---\n\n* add adds now, and double doubles what it is given.\n\n1.0\n---\n\n* first\n"


def make_index(folder):
    """An index with two releases of `calc`."""
    page = []
    for version, source, tests in (("1.0", OLD, OLD_TESTS), ("1.1", NEW, NEW_TESTS)):
        name = f"calc-{version}"
        content = {"src/calc/__init__.py": source, "tests/test_calc.py": tests, "CHANGES.rst": CHANGES}
        content |= {"PKG-INFO": f"Metadata-Version: 2.1\nName: calc\nVersion: {version}\nLicense: MIT\n"}
        content |= {"src/calc/__pycache__/calc.pyc": "", "setup.cfg": "[tool:pytest]\naddopts = --no-such-option\n"}
        with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as tar:
            for path, text in content.items():
                info = tarfile.TarInfo(f"{name}/{path}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
        page.append(f'<a href="../{name}.tar.gz">{name}.tar.gz</a>')
    (folder / "calc").mkdir()
    (folder / "calc/index.html").write_text("\n".join(page))


@pytest.fixture
def settings(tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    make_index(folder)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield IndexSettings((f"http://127.0.0.1:{server.server_port}",))
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    use_own_cache(tmp_path, monkeypatch)


@pytest.mark.timeout(600)
async def test_a_pair_of_releases_becomes_verified_rows(settings, tmp_path, monkeypatch):
    wanted = [Wanted("calc", 1), Wanted("nowhere", 1)]
    with trio.fail_after(500):
        ended, problems = await mine("calc", wanted, settings, tmp_path, hunks=1)
    assert len(problems) == 1
    assert problems[0].startswith("nowhere: ")
    assert [(task.instance_id, task.status, task.reason) for task in ended] == [
        ("calc__1.0-1.1", "verified", ""),
        ("calc__1.1-hunk-1", "verified", ""),
    ]
    whole, hunk = ended
    assert whole.checks == dict.fromkeys(CHECKS, "right")
    tests = whole.row.payload["tests"]
    names = ["test_double", "test_words[a b]", "test_words[it's]", 'test_words[say "x"]']
    assert tests["fail_to_pass"] == [f"tests/test_calc.py::{name}" for name in names]
    assert tests["pass_to_pass"] == ["tests/test_calc.py::test_same"]
    assert "add adds now" in whole.row.payload["problem_statement"]
    assert hunk.row.payload["tests"]["fail_to_pass"] == [f"tests/test_calc.py::{name}" for name in names[1:]]
    assert "TypeError" in hunk.row.payload["problem_statement"]
    source = whole.row.payload["source"]
    assert (source["licence"], source["base"]) == ("MIT", "calc-1.0.tar.gz")
    assert all(len(value) == 64 for value in source["sha256"].values())
    assert find_image("calc__1.0-1.1").record.layers == tuple(whole.row.payload["layers"])
    for task in ended:
        assert_nothing_tells(task)

    monkeypatch.setattr(verification, "TIMES", 1)
    monkeypatch.setattr(verification, "HACKS", {})  # each was tried above
    monkeypatch.setattr(verification, "CHECKS", CHECKS[: -len(HACKS)])
    monkeypatch.setattr(verification, "hack_patches", lambda _files: {})
    config = SandboxConfig()
    async with open_sandbox_host(await choose_provider(config)) as host:
        found = await verify_row(LocalBench(host, config), hunk.row, b"")
    assert found["gold"].endswith("does not pass (failed); 3 such tests")
    assert {verdict for check, verdict in found.items() if check != "gold"} == {"right"}

    again, _ = await mine("calc", wanted, settings, tmp_path, hunks=1)
    assert again == []  # each was tried before

    exported = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(commands.tasks, ["export", "calc", "--to", str(exported)])
    assert done.exit_code == 0, done.output
    assert all(layer in done.output for layer in whole.row.payload["layers"])
    assert load_task_set(str(exported)) == [task.row for task in ended] == read_rows(exported)


def assert_nothing_tells(task):
    """In the sandboxes' layers and in the row there is no gold patch, no new test, no bytecode."""
    environment, repository = (find_layer(digest).folder / CONTENT_NAME for digest in task.row.payload["layers"])
    assert not list(environment.rglob("*.pyc")) + list(repository.rglob("*.pyc"))
    assert not list(environment.rglob("calc*"))
    assert "test_double" not in (repository / "testbed/tests/test_calc.py").read_text()
    assert task.gold not in json.dumps(task.row.payload)
    assert (repository / "testbed/src/calc/__init__.py").read_text() != NEW
