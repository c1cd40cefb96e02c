"""Mining of tasks: pages of an index, archives, patches and hunks, statements, and which tests decide."""

import io
import json
import subprocess
import tarfile

import pytest
import trio
from click.testing import CliRunner

from prorl_launch.mining import environments
from prorl_launch.mining.candidates import Candidate, Release, candidates_of, changed_tests, refusal, source_folders
from prorl_launch.mining.changes import hunks_of, imports_patch, make_patch, merge_source, patch_size, without_hunk
from prorl_launch.mining.environments import packages_folder, seal_environment
from prorl_launch.mining.index import IndexFile, IndexSettings, download, read_page
from prorl_launch.mining.miner import find_leak, find_twin, functions_that_read_clocks
from prorl_launch.mining.nearest import apply_strictly
from prorl_launch.mining.rows import MinedTask, choose_tests, overlay_of, read_checks, write_lines
from prorl_launch.mining.sdist import Entry, Metadata, file_kind, read_metadata, read_sdist, write_tree
from prorl_launch.mining.statements import changelog_section, hunk_statement
from prorl_launch.mining.verification import message_of, verify_rows
from prorl_trio.cli import main
from prorl_trio.tasks.grading.verdict import TestResult
from prorl_trio.tasks.sets import open_task_set
from prorl_trio.tasks.sets.mined import MINED_ROWS, mined_set_folder
from prorl_trio.types.errors import ConfigError, SandboxUnavailable
from prorl_trio.types.models import TaskInstance
from support.own_cache import use_own_cache


def tree(**files):
    return {name.replace("__", "/").replace("_py", ".py"): Entry(text.encode()) for name, text in files.items()}


def release(version, files):
    file = IndexFile(f"calc-{version}.tar.gz", version, "", "")
    return Release("calc", file, "0" * 64, files, Metadata("MIT", ()))


OLD = "def add(a, b):\n    return a - b\n\n\n# 1\n# 2\n# 3\n# 4\n# 5\n# 6\n\n\ndef double(a):\n    return 3 * a\n"
NEW = OLD.replace("a - b", "a + b").replace("3 * a", "2 * a")


def changelog(version="1.1"):
    return (
        f"Changes\n=======\n\n{version}\n---\n\n* add adds now, and double doubles a number.\n\n1.0\n---\n\n* first\n"
    )


def pair(old=OLD, new=NEW, **more):
    tests = tree(tests__test_calc_py="def test():\n    assert True\n", tests__test_same_py="")
    before = tree(calc_py=old) | tests | tree(tests__test_calc_py="")
    after = tree(calc_py=new) | tests | {"CHANGES.rst": Entry(changelog().encode())} | tree(**more)
    return release("1.0", before), release("1.1", after)


# ---------------------------------------------------------------- the index


def test_pages_in_json_and_in_html_list_final_releases_in_their_order():
    names = ["calc-1.10.tar.gz", "calc-1.9.tar.gz", "calc-2.0rc1.tar.gz", "calc-1.9-py3-none-any.whl", "other-3.tar.gz"]
    files = [{"filename": name, "url": f"../{name}", "hashes": {"sha256": "ab"}} for name in names]
    files.append({"filename": "calc-3.0.tar.gz", "url": "x", "yanked": "broken"})
    found = read_page("calc", json.dumps({"files": files}).encode(), "application/x+json", "http://index/simple/calc/")
    assert [(file.version, file.url, file.sha256) for file in found] == [
        ("1.9", "http://index/simple/calc-1.9.tar.gz", "ab"),
        ("1.10", "http://index/simple/calc-1.10.tar.gz", "ab"),
    ]
    links = "".join(f'<a href="../{name}#sha256=ab">{name}</a>' for name in names)
    page = f'{links}<a href="calc-3.0.tar.gz" data-yanked="">calc</a>'
    assert read_page("calc", page.encode(), "text/html", "http://index/simple/calc/") == found


def test_an_archive_that_is_not_what_the_index_says_is_removed(tmp_path):
    (tmp_path / "calc-1.0.tar.gz").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="the index says ab"):
        download(IndexFile("calc-1.0.tar.gz", "1.0", "", "ab"), tmp_path, IndexSettings(()))
    assert not list(tmp_path.iterdir())


def test_archives_are_read_without_their_outer_folder_bytecode_and_ways_out(tmp_path):
    path = tmp_path / "calc-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("calc-1.0/calc.py", "calc-1.0/__pycache__/calc.pyc", "calc-1.0/../../out", "alone"):
            info = tarfile.TarInfo(name)
            info.size, info.mode = 1, 0o755
            tar.addfile(info, io.BytesIO(b"x"))
    assert read_sdist(path) == {"calc.py": Entry(b"x", True)}
    path.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"calc-1.0.tar.gz"):
        read_sdist(path)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("calc/core.py", "source"),
        ("calc/grammar.txt", "source"),
        ("calc/tests/data.bin", "test"),
        ("tests/conftest.py", "test"),
        ("pyproject.toml", "test"),
        ("test_calc.py", "test"),
        ("calc/contest.py", "source"),
        ("docs/conf.py", "documentation"),
        ("CHANGES.rst", "documentation"),
        ("PKG-INFO", "packaging"),
        ("src/calc.egg-info/SOURCES.txt", "packaging"),
    ],
)
def test_what_a_file_is_for(path, kind):
    assert file_kind(path) == kind


def test_requirements_are_those_of_the_package_and_of_its_tests_but_never_itself():
    lines = ["Metadata-Version: 2.1", "License: MIT", "Requires-Dist: six>=1", 'Requires-Dist: numpy; extra == "fast"']
    lines += ['Requires-Dist: attrs; python_version >= "3" and extra == "test"', "Requires-Dist: Calc[fast]"]
    found = read_metadata("calc", {"PKG-INFO": Entry("\n".join(lines).encode())})
    assert found == Metadata("MIT", ("six>=1", 'attrs; python_version >= "3"'))


# ---------------------------------------------------------------- patches


def test_the_gold_patch_is_of_sources_and_git_applies_it(tmp_path):
    old = tree(calc_py="a = 1", gone_py="x = 1\n", tests__test_a_py="1\n", README="old\n")
    new = tree(calc_py="a = 2", new__mod_py="y = 1\n", tests__test_a_py="2\n", README="new\n")
    new["blob"] = Entry(bytes(range(256)), executable=True)
    gold = make_patch(old, merge_source(old, new))
    write_tree(old, tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "-"], input=gold, cwd=tmp_path, check=True)
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = {path: content for path, content in found.items() if not path.startswith(".git/")}
    assert found == {
        "calc.py": b"a = 2",
        "new/mod.py": b"y = 1\n",
        "blob": bytes(range(256)),
        "tests/test_a.py": b"1\n",
        "README": b"old\n",
    }
    assert (tmp_path / "blob").stat().st_mode & 0o100
    assert patch_size(gold).files == 4
    assert make_patch(old, old) == b""


def test_a_hunk_is_a_patch_against_the_new_tree_without_it(tmp_path):
    old, new = pair()
    hunks = hunks_of(make_patch(old.tree, merge_source(old.tree, new.tree)))
    assert [hunk.number for hunk in hunks] == [1, 2]
    base = without_hunk(new.tree, hunks[1])
    assert base["calc.py"].content.decode() == NEW.replace("2 * a", "3 * a")
    write_tree(base, tmp_path)
    subprocess.run(["git", "apply", "-"], input=hunks[1].patch, cwd=tmp_path, check=True)
    assert (tmp_path / "calc.py").read_text() == NEW


def test_a_hunk_of_comments_docstrings_or_imports_or_without_which_nothing_compiles_is_none():
    old, new = pair('def f():\n    """Old."""\n    # old\n    return 1\n', 'def f():\n    """New."""\n    return 1\n')
    assert without_hunk(new.tree, hunks_of(make_patch(old.tree, new.tree))[0]) is None
    old, new = pair("a = 1\n", "import re\n\na = 1\n")
    assert without_hunk(new.tree, hunks_of(make_patch(old.tree, new.tree))[0]) is None
    old, new = pair("def f(\n", "def f():\n    pass\n")
    assert without_hunk(new.tree, hunks_of(make_patch(old.tree, new.tree))[0]) is None


def test_a_candidate_of_one_hunk_has_the_tests_of_the_release_before():
    old, new = pair(tests__test_calc_py="def test_new():\n    assert False\n")
    found = list(candidates_of(old, new))
    assert [each.instance_id for each in found] == ["calc__1.0-1.1", "calc__1.1-hunk-1", "calc__1.1-hunk-2"]
    assert all(b"test_new" not in each.base["tests/test_calc.py"].content for each in found)
    assert [refusal(each) for each in found] == ["", "", ""]
    assert [each.instance_id for each in candidates_of(old, new, hunks=1)][1:] == ["calc__1.1-hunk-1"]


def candidate(**fields):
    old, new = pair()
    return next(candidates_of(old, new))._replace(**fields)


def test_candidates_are_refused_for_what_they_are():
    assert "no source file" in refusal(candidate(gold=b""))
    old, new = pair(new="a = 1\n" * 401)
    assert "400" in refusal(next(candidates_of(old, new)))
    old, new = pair(**{f"m{number}_py": "a = 1\n" for number in range(11)})
    assert "12 files" in refusal(next(candidates_of(old, new)))
    assert "1.1" in refusal(candidate(section=""))
    assert refusal(candidate(section="", kind="hunk")) == ""
    bare = {path: entry for path, entry in new.tree.items() if "test_calc" not in path}
    assert "no module of tests" in refusal(candidate(new=release("1.1", bare)))
    assert changed_tests(candidate()) == ["tests/test_calc.py"]
    assert "no UTF-8" in refusal(candidate(gold=b"@@ -1 +1 @@\n-\xff\n+a\n"))
    assert "states no licence" in refusal(candidate(new=new._replace(metadata=Metadata("", ()))))


def test_where_modules_are_imported_from():
    assert source_folders(tree(src__calc__init_py="")) == ["src", "."]
    assert source_folders(tree(calc_py="")) == ["."]
    assert isinstance(candidate(), Candidate)


def test_a_published_patch_applies_where_it_says_or_not_at_all():
    old, new = pair()
    patch = make_patch(old.tree, merge_source(old.tree, new.tree))
    assert apply_strictly(old.tree, patch)["calc.py"].content.decode() == NEW
    other = old.tree | {"calc.py": Entry(OLD.replace("# 1", "# one").encode())}
    assert apply_strictly(other, patch) is None


# ---------------------------------------------------------------- statements


@pytest.mark.parametrize(
    "text",
    [
        changelog(),
        "# Changelog\n\n## [1.1] - 2024-01-01\n\n- add adds now, and double doubles a number.\n\n## 1.0\n\n- first\n",
        "Version 1.1\n\nadd adds now, and double doubles a number.\n\nVersion 1.0\n\nfirst\n",
    ],
)
def test_the_section_of_a_release_is_found_in_its_changelog(text):
    section = changelog_section({"CHANGES.rst": Entry(text.encode())}, "1.1.0")
    assert section.endswith("add adds now, and double doubles a number.")
    assert "first" not in section
    assert changelog_section({"CHANGES.rst": Entry(text.encode())}, "1.2") == ""


def test_the_statement_of_a_hunk_shows_how_tests_fail():
    messages = {f"t::{number}": f"    f({number}) # hidden\nE   assert {number} == 0" for number in range(5)}
    text = hunk_statement("calc", "1.1", "calc.py", messages)
    assert "calc.py" in text
    assert "    assert 2 == 0" in text
    assert text.endswith("These fail, too:\n\nt::3\nt::4")
    assert "hidden" not in text
    alike = {f"t::{number}": f"E   assert {min(number, 1)} == 2" for number in range(40)}
    text = hunk_statement("calc", "1.1", "calc.py", alike)
    assert "t::0\n\n    assert 0 == 2\n\nt::1\n\n    assert 1 == 2\n\nThese" in text
    assert text.endswith("\nt::21\n\nand 18 more.")
    objects = {f"t::{number}": f"E   assert <f at 0x7fdb8cee{number}> is None" for number in range(1000, 1002)}
    text = hunk_statement("calc", "1.1", "calc.py", objects)
    assert "    assert <f at 0x...> is None\n\nThese fail, too:\n\nt::1001" in text
    assert hunk_statement("calc", "1.1", "calc.py", {"t::1": "    f(1)  # hidden"}) == ""


@pytest.mark.parametrize(
    ("said", "says"),
    [
        *(("AssertionError", False), ("assert False", False), ("assert not True", False), ("KeyError", False)),
        *(("assert None", False), ("Failed", False), ("calc.errors.ParseError", False), ("", False)),
        *(("assert 1 == 2", True), ("KeyError: 'a'", True), ("NameError: name 'x' is not defined", True)),
        *(("Failed: DID NOT RAISE <class 'ValueError'>", True), ("assert False\nwhere False = ok(1)", True)),
    ],
)
def test_the_name_of_an_exception_says_nothing(said, says):
    lines = "\n".join(f"E   {line}" for line in said.splitlines())
    assert bool(hunk_statement("calc", "1.1", "calc.py", {"t::1": lines})) is says


def test_the_imports_of_a_gold_patch_are_a_patch_of_their_own():
    before = '"""Doc."""\nfrom __future__ import annotations\n\nimport os\n\nX = 1\n'
    after = before.replace("X = 1", "try:\n    import re\nexcept ImportError:\n    re = None\nfrom a import b\n\nX = 2")
    base, new = tree(calc_py=before), tree(calc_py=after)
    patch = imports_patch(base, new, make_patch(base, new)).decode()
    assert [line for line in patch.splitlines() if line[:1] == "+" and line[:3] != "+++"] == [
        "+import re",
        "+from a import b",
    ]
    assert imports_patch(base, tree(calc_py=before.replace("1", "2")), make_patch(base, new)) == b""


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("Traceback (most recent call last):\n  File x\nValueError: no\n", "ValueError: no"),
        ("ERROR\nE   a\nE   ImportError: b\n1 error\n", "ImportError: b"),
        ("", ""),
    ],
)
def test_a_refusal_has_the_message_and_not_the_way_to_it(said, message):
    assert message_of(said) == message


def test_a_mined_set_is_loaded_by_its_name(tmp_path, monkeypatch):
    use_own_cache(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="'mine-too' is neither a task set"):
        open_task_set("mine-too", check=False)
    row = mined("first").row
    write_lines(mined_set_folder("mine-too") / MINED_ROWS, [row])
    assert open_task_set("mine-too", check=False).instances == [row]


# ---------------------------------------------------------------- what must differ

LINES = ["    for each in numbers:", "        total = total + each * weight", "    return total"]
BLOCK = "".join(f"+{line}\n" for line in LINES)
GOLD = f"diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,4 @@\n def f():\n{BLOCK}-    pass\n"


def test_a_solution_that_can_be_read_off_is_found():
    copy = "\r\n".join(line.strip() for line in LINES).encode()
    assert find_leak(GOLD.encode(), "add numbers", {"calc.py": Entry(copy)}) == ""
    assert find_leak(GOLD.encode(), "add numbers", {"other.py": Entry(copy.replace(b"weight", b"1"))}) == ""
    found = find_leak(GOLD.encode(), "add numbers", {"calc.py": Entry(b""), "build/calc.py": Entry(b"  " + copy)})
    assert found == "build/calc.py has lines of the gold patch"
    assert "total + each" in find_leak(GOLD.encode(), f"Add this:\n\n{LINES[1]}\n", {})
    assert find_leak(GOLD.encode(), "it shall return total", {}) == ""


def mined(name, *, statement="", gold="", tests=("t.py::a",), release="1.1"):
    source = {"sha256": {f"calc-{release}.tar.gz": "0" * 64}}
    payload = {"problem_statement": statement or name, "tests": {"fail_to_pass": [*tests]}, "source": source}
    row = TaskInstance(instance_id=name, handler="swe", payload=payload)
    return MinedTask(instance_id=name, status="verified", row=row, gold=gold or f"+{name}\n")


def test_tasks_that_ask_for_the_same_are_twins():
    first = mined("first", gold=GOLD)
    others = [MinedTask(instance_id="no", status="refused"), first]
    assert find_twin(mined("second", tests=("t.py::b",)), others) == ""
    assert find_twin(mined("second", release="1.2"), others) == ""
    assert find_twin(mined("second"), others) == "first"  # the tests of one release
    moved = GOLD.replace("@@ -1,2 +1,4 @@", "@@ -7,2 +7,4 @@")
    assert find_twin(mined("second", gold=moved, release="1.2"), others) == "first"
    assert find_twin(mined("second", statement="first", release="1.2"), others) == "first"


# ---------------------------------------------------------------- tests that decide


def results(**statuses):
    return {
        f"tests/test_{name[0]}.py::{name}": TestResult(test_id=name, status=each) for name, each in statuses.items()
    }


def test_tests_decide_that_do_so_each_time():
    before = [results(a1="failed", a2="passed", a3="passed", a4="failed", b1="passed")] * 2
    gold = [
        results(a1="passed", a2="passed", a3="failed", a4="passed", b1="passed"),
        results(a1="passed", a2="passed", a3="passed", a4="failed", b1="passed"),
    ]
    chosen = choose_tests(before, gold)
    assert chosen.fail_to_pass == ["tests/test_a.py::a1"]
    assert chosen.pass_to_pass == ["tests/test_a.py::a2"]
    assert chosen.files == ["tests/test_a.py"]


def test_without_a_test_that_passes_still_there_is_no_task():
    """A before-run that hangs, or whose import fails, makes every test look as if the change mended it."""
    gold = [results(a1="passed", a2="passed")]
    assert choose_tests([results(a1="timed_out", a2="timed_out")], gold) is None
    assert choose_tests([{}], gold) is None
    beside = choose_tests([results(a1="failed", b1="passed")], [results(a1="passed", b1="passed")])
    assert beside.pass_to_pass == ["tests/test_b.py::b1"]


def test_names_that_are_so_by_chance_do_not_decide():
    names = ["t.py::ok", "t.py::still", "t.py::f[<object at 0x7f00aa11>]", "t.py::f[a\rb]", "t.py"]
    gold = {name: TestResult(test_id=name, status="passed") for name in names}
    before = {"t.py::still": TestResult(test_id="t.py::still", status="passed")}
    assert choose_tests([before], [gold]).fail_to_pass == ["t.py::ok"]


def test_tests_that_read_a_clock_do_not_decide():
    """`tests/perf_utils.py` of mistune 3.4.0 measures; its tests failed on a busy machine, with the gold patch."""
    helper = b"""
import time
def measure(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
def assert_near_linear(work):
    assert measure(work) < 1
"""
    module = b"""
from tests.perf_utils import assert_near_linear
@pytest.fixture
def stopwatch():
    return time()
@pytest.fixture
def clock():
    return time.time_ns
class TestLimits:
    def test_fast(self):
        def render():
            return measure(parse)
        assert_near_linear(render)
    def test_right(self):
        self.time = markdown.render(datetime.time(12), time(12))
    async def test_waits(stopwatch): ...
"""
    timed = functions_that_read_clocks([helper, module, b"print 'no Python of today'"])
    assert timed == {"measure", "assert_near_linear", "stopwatch", "clock", "test_fast", "test_waits"}
    names = [f"tests/t.py::TestLimits::{name}" for name in ("test_fast", "test_fast[20]", "test_right", "test_still")]
    gold = {name: TestResult(test_id=name, status="passed") for name in names}
    before = gold | {names[2]: TestResult(test_id=names[2], status="failed")}
    chosen = choose_tests([before], [gold], unsteady=timed)
    assert (chosen.fail_to_pass, chosen.pass_to_pass) == (names[2:3], names[3:])


def test_data_and_configuration_of_tests_are_the_evaluators():
    base = tree(tests__old_py="1", tests__same_py="1", calc_py="1")
    new = tree(tests__same_py="1", tests__new_py="2", calc_py="2")
    new |= {"tests/data.bin": Entry(b"\xff\xfe"), "pyproject.toml": Entry(b"[tool.pytest.ini_options]")}
    found = overlay_of(base, new)
    assert found.files == {"tests/new.py": "2", "pyproject.toml": "[tool.pytest.ini_options]"}
    assert found.removed == ["tests/old.py"]
    assert found.binary == {"tests/data.bin": b"\xff\xfe"}


# ---------------------------------------------------------------- ten rows, four at a time


async def verify_ten(tmp_path, refuse=()):
    """Verify rows that end in another order than they begin. Returns their checks, and which were run."""
    rows = [TaskInstance(instance_id=f"row-{number}", handler="swe", payload={}) for number in range(10)]
    ran, at_once, ended = [], [], []

    async def verify(row):
        ran.append(row.instance_id)
        at_once.append(row.instance_id)
        assert len(at_once) <= 4
        for _ in range(10 - int(row.instance_id[4:])):
            await trio.lowlevel.checkpoint()
        at_once.remove(row.instance_id)
        if row.instance_id in refuse:
            raise SandboxUnavailable("no sandbox")
        return {"gold": "right", "before": row.instance_id}

    results = tmp_path / "results.jsonl"
    found = await verify_rows(rows, verify, jobs=4, results=results, on_ended=lambda: ended.append(1))
    assert len(ended) == 10
    return found, ran


async def test_ten_rows_four_at_a_time_keep_every_result(tmp_path):
    refused = ("row-3", "row-7")
    found, ran = await verify_ten(tmp_path, refused)
    right = {f"row-{number}": {"gold": "right", "before": f"row-{number}"} for number in range(10)}
    assert found == right | {name: {"all": "no sandbox"} for name in refused}
    assert len(ran) == 10
    assert read_checks(tmp_path / "results.jsonl") == {name: right[name] for name in right if name not in refused}
    with (tmp_path / "results.jsonl").open("ab") as file:
        file.write(b'{"instance_id":"row-3","che')  # the power went
    found, ran = await verify_ten(tmp_path)
    assert found == right
    assert sorted(ran) == [*refused]
    assert read_checks(tmp_path / "results.jsonl") == right


def test_a_missing_uv_is_said_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(environments.sys, "executable", str(tmp_path / "python"))
    done = CliRunner().invoke(main, ["tasks", "mine", "some-set", "tomlkit"])
    assert done.exit_code == 1
    assert "pip install 'prorl-trio[mining]'" in done.output
    assert not list(tmp_path.rglob("*tomlkit*"))


def test_an_environment_that_has_the_package_itself_is_refused(tmp_path):
    record = packages_folder(tmp_path) / "Calc-2.0.dist-info" / "METADATA"
    record.parent.mkdir(parents=True)
    record.write_text("Metadata-Version: 2.1\nName: Calc\nVersion: 2.0\n")
    with pytest.raises(ConfigError, match="calc is needed by pytest"):
        seal_environment("calc", tmp_path)
