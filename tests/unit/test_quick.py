"""`make quick`: which tests it takes for a change."""

from __future__ import annotations

from support.quick import near_tests

SOURCES = {
    "ipc/prorl_ipc/frames.py": "",
    "prorl_trio/node/__init__.py": "",
    "prorl_trio/node/serve.py": "from prorl_ipc import frames",
    "prorl_trio/cli.py": "from prorl_trio.node.serve import serve",
    "tests/support/rig.py": "import prorl_trio.cli",
    "tests/unit/test_frames.py": "from prorl_ipc.frames import Frame",
    "tests/unit/test_serve.py": "from prorl_trio.node import serve",
    "tests/component/test_rig.py": "from support.rig import open_rig",
    "tests/component/test_started.py": 'run("python", "-m", "prorl_trio.cli")',
    "tests/integration/test_all.py": "import prorl_ipc.frames",
    "tests/unit/test_alone.py": "read('table.toml')",
}


def test_tests_that_reach_a_change_come_nearest_first():
    near = near_tests({"ipc/prorl_ipc/frames.py"}, SOURCES)
    assert near[0] == "tests/unit/test_frames.py"
    assert near.index("tests/unit/test_serve.py") < near.index("tests/component/test_rig.py")
    assert "tests/component/test_started.py" in near
    assert not {"tests/integration/test_all.py", "tests/unit/test_alone.py"} & {*near}


def test_a_test_that_changed_is_taken_itself_and_so_is_one_that_names_a_file():
    assert near_tests({"tests/unit/test_alone.py"}, SOURCES) == ["tests/unit/test_alone.py"]
    assert near_tests({"docs/table.toml"}, SOURCES) == ["tests/unit/test_alone.py"]
    assert near_tests({"docs/other.md"}, SOURCES) == []
