"""Rows of each published form through a node, with the real change of a real repository; and without any.

Two rows are published ones, of SWE-Gym and SWE-rebench, as they are; the others have the second one's change in another
form. Their images are not fetched: others stand for them, with the release that is nearest to the row's commit.
"""

from __future__ import annotations

import json

import msgspec
import pytest

from prorl_launch.mining.changes import make_patch
from prorl_launch.mining.environments import ENVIRONMENT_DIR
from prorl_launch.mining.index import download, index_settings, list_sdists
from prorl_launch.mining.nearest import PUBLISHED_ROWS, apply_strictly, make_row, read_row
from prorl_launch.mining.sdist import read_sdist, write_tree
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.images.layers import store_layer
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.tasks.sets.wheels import WheelFile
from support.code_policy import fetch_wheel
from support.gold_runs import outcomes_of
from support.published_images import NOTHING, GoesOn, compose_testbed, store

pytestmark = pytest.mark.slow
DASK, PIPDEPTREE = PUBLISHED_ROWS
EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git checkout 6dddc85 tests/_models/test_dag.py
: '>>>>> Start Test Output'
pytest --no-header -rA -p no:cacheprovider tests/_models/test_dag.py tests/render/test_text.py
: '>>>>> End Test Output'
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


def make_image(published, name, scratch, tree=None, more=()):
    """Compose an image of a row's environment with its repository, or with a tree in place of that."""
    row, _ = make_row(published, index_settings())
    environment, repository = row.payload["layers"]
    if tree is not None:
        write_tree(tree, scratch / name)
        repository = store_layer(scratch / name, at="/testbed").record.digest
    paths = row.payload["env"]["PYTHONPATH"].split(":")
    return compose_testbed(name, scratch, environment, repository, paths, more)


def tree_of(published, *patches):
    """The repository's release with patches applied."""
    settings = index_settings()
    file = next(each for each in list_sdists(published.package, settings) if each.version == published.version)
    tree = read_sdist(download(file, cache_dir() / "mining" / "sdists", settings)[0])
    for patch in patches:
        tree = apply_strictly(tree, patch.encode())
        assert tree is not None
    return tree


def rows_of(scratch):
    """Return the rows, by form, what stands for their images, and the gold patches by statement."""
    fetch_wheel(WheelFile("nemo-gym", "0.7.0", "3.13.14", DASK.member))
    gym, rebench = read_row(DASK), read_row(PIPDEPTREE)
    base = tree_of(PIPDEPTREE)
    fixed = tree_of(PIPDEPTREE, rebench["patch"], rebench["test_patch"])
    bug = make_patch(tree_of(PIPDEPTREE, rebench["patch"]), base).decode()
    module = "tests/_models/test_dag.py"
    names = [test.split("::", 1)[1] for test in (*rebench["FAIL_TO_PASS"], *rebench["PASS_TO_PASS"]) if module in test]
    in_repository = {".venv": f"-> {ENVIRONMENT_DIR}", "run_tests.sh": "pytest r2e_tests\n"}
    hidden = [
        store(scratch / "r2e-repository", in_repository, "/testbed"),
        store(scratch / "r2e-tests", {"test_1.py": fixed[module].content.decode()}, "/r2e_tests"),
    ]
    smith = "tox-dev__pipdeptree.6dddc855"
    images = {
        "docker://xingyaoww/sweb.eval.x86_64.dask_s_dask-9378:latest": make_image(DASK, "stands-for-dask", scratch),
        f"docker://{rebench['image_name']}": make_image(PIPDEPTREE, "stands-for-pipdeptree", scratch),
        "docker://swebench/sweb.eval.x86_64.tox-dev_1776_pipdeptree-279:latest": "stands-for-pipdeptree",
        "docker://namanjain12/pipdeptree_final:6dddc85": make_image(
            PIPDEPTREE, "stands-for-pipdeptree-of-r2e", scratch, more=hidden
        ),
        f"docker://swebench/swesmith.x86_64.{smith.replace('__', '_1776_')}:latest": make_image(
            PIPDEPTREE, "stands-for-pipdeptree-fixed", scratch, fixed
        ),
    }
    rows = {
        "gym": gym,
        "rebench": rebench,
        "five": {
            **{key: value for key, value in rebench.items() if key not in ("image_name", "install_config")},
            "image": "swebench/sweb.eval.x86_64.tox-dev_1776_pipdeptree-279:latest",
            "eval_script": EVAL_SCRIPT,
            "log_parser": "parse_log_pytest",
            "eval_type": "pass_and_fail",
        },
        "smith": {
            "instance_id": f"{smith}.func_basic__7mvokbmd",
            "repo": f"swesmith/{smith}",
            "patch": bug,
            **{key: rebench[key] for key in ("problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")},
        },
        "r2e": {
            "repo_name": "pipdeptree",
            "docker_image": "namanjain12/pipdeptree_final:6dddc85",
            "commit_hash": "6dddc85",
            "problem_statement": f"[ISSUE]{rebench['problem_statement']}[/ISSUE]",
            "expected_output_json": json.dumps({name.replace("::", "."): "PASSED" for name in names}),
            "execution_result_content": json.dumps(
                {
                    "test_file_names": ["conftest.py", "test_1.py"],
                    "test_file_codes": [fixed[name].content.decode() for name in ("tests/conftest.py", module)],
                }
            ),
        },
    }
    return rows, images, {row["problem_statement"].strip(): row["patch"] for row in (gym, rebench)}


@pytest.fixture(scope="module")
def published(scratch):
    """The instances that the rows are read as, by form, and the gold patches by statement."""
    rows, images, gold = rows_of(scratch)
    lines = [f'"{name}" = "{image}"' for name, image in images.items()]
    (scratch / "images.toml").write_text("[images]\n" + "\n".join(lines))
    (scratch / "specs.json").write_text(json.dumps({"dask/dask": {"2022.8": {"test_cmd": "pytest -n0 -rA"}}}))
    instances = {}
    for form, row in rows.items():
        (scratch / f"{form}.jsonl").write_text(json.dumps(row))
        (read,) = load_task_set(str(scratch / f"{form}.jsonl"), specs=scratch / "specs.json")
        instances[form] = msgspec.structs.replace(read, instance_id=form)
    return instances, gold


async def test_the_gold_patch_resolves_each_form_and_no_change_resolves_none(published):
    instances, gold = published
    found = await outcomes_of(GoesOn(gold), [*instances.values()], timeout_s=900, context_tokens=60_000)
    assert {name: outcome.error or outcome.details for name, outcome in found.items() if outcome.reward != 1.0} == {}
    assert {outcome.details["applied_by"] for outcome in found.values()} == {"git apply"}
    assert {name: outcome.details["tests"] for name, outcome in found.items()} == {
        "gym": 137,
        "rebench": 28,
        "five": 28,
        "smith": 28,
        "r2e": 9,
    }
    assert all(len(outcome.trajectory.turns) == 4 for outcome in found.values())
    some = [instances[form] for form in ("rebench", "smith", "r2e")]
    found = await outcomes_of(GoesOn(dict.fromkeys(gold, NOTHING)), some, timeout_s=600, context_tokens=60_000)
    assert {(outcome.status, outcome.reward, outcome.details["applied_by"]) for outcome in found.values()} == {
        ("completed", 0.0, "git apply")
    }
    found = await outcomes_of(GoesOn({}), [*instances.values()], timeout_s=300, context_tokens=60_000)
    assert {(outcome.status, outcome.reward) for outcome in found.values()} == {("completed", 0.0)}
