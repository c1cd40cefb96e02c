"""Rows with a question and its choices: MMLU, MMLU-Pro, ARC, GPQA, MedQA and their relatives."""

from __future__ import annotations

import ast
import json
import re
from random import Random
from typing import Any, Final, NamedTuple

from prorl_trio.tasks.handlers.stem.choice import LETTERS
from prorl_trio.tasks.sets.fields import Fields, RowError, kind_of
from prorl_trio.tasks.sets.math_rows import check_marks
from prorl_trio.types.models import TaskInstance

QUESTION: Final = ("question", "question_stem", "input", "problem")
LISTS: Final = ("options", "choices", "endings")
GOLDS: Final = (
    "answer_letter", "answerkey", "answer_key", "answer_idx", "answer_index", "answer", "cop", "target",
    "correct_answer", "correct_option", "correct", "gold", "label",
)  # fmt: skip
NAME: Final = ("uuid", "question_id", "record_id", "id")
FAMILY: Final = ("family", "high_level_domain", "discipline", "category", "subject", "subject_name")
GPQA: Final = ("incorrect_answer_1", "incorrect_answer_2", "incorrect_answer_3")
SCIQ: Final = ("distractor1", "distractor2", "distractor3")
MEDMCQA: Final = ("opa", "opb", "opc", "opd")
_OWN_LABEL: Final = re.compile(r"\s*(?:\(([A-Za-z]|\d\d?)\)|([A-Za-z])[.):]|(\d\d?)(?:\)|\.(?=\s)))\s*")
_RUN_TOGETHER: Final = re.compile(r"""['"]\s+['"]""")
_DRESSED: Final = re.compile(r"\s*\(?([A-Za-z0-9])[.)]?\s*")
_LABELLED: Final = re.compile(r"\s*\(?([A-Za-z0-9])[.):]\s*(\S.*)", re.DOTALL)


class _Choices(NamedTuple):
    """The texts of the choices in order, and their labels in the row's answer."""

    texts: list[str]
    labels: list[str]


def has_choices(fields: Fields) -> bool:
    """Return whether a row has choices in any published form."""
    lettered = all(name in fields for name in "abc")
    return lettered or any(name in fields for name in (*LISTS, MEDMCQA[0], GPQA[0], SCIQ[0]))


def read_choice_row(fields: Fields, name: str) -> TaskInstance:
    """Return the instance of the handler `stem` for a row with a question and its choices.

    The choices are a list of texts or of objects, an object by letter, `{"text": [...], "label": [...]}`, the fields
    `A` to `J` or `opa` to `opd`, or the correct answer with the wrong ones (GPQA, SciQ: shuffled, with a fixed order
    for each question). The answer is a letter, a label, an index from 0, or the text of a choice. All fields with an
    answer must name the same choice.

    Raises:
        RowError: there is not exactly one correct choice, or data would be lost.
    """
    question = fields.text(*QUESTION)
    family, found = fields.label(*FAMILY), fields.label(*NAME)
    wrong = next((names for names in (GPQA, SCIQ) if fields.has(names[0])), None)
    if wrong is not None:
        texts = [_text_of(fields.take(each), fields.spelled(each)) for each in ("correct_answer", *wrong)]
        right = texts[0]
        Random(question).shuffle(texts)
        place = texts.index(right)
        if wrong is GPQA:  # about sixty fields on how the question was written and reviewed
            fields.ignore_rest()
    else:
        choices = _choices(fields)
        place = _place(fields, choices)
        texts = choices.texts
    check_marks(fields)
    fields.finish(question, *texts)
    return choice_instance(found or name, question, texts, LETTERS[place], family)


def choice_instance(name: str, question: str, choices: list[str], letter: str, family: str) -> TaskInstance:
    """Return an instance of the handler `stem` with choices."""
    grader = {"kind": "choice", "choices": choices, "answer": letter}
    return TaskInstance(
        instance_id=name, handler="stem", payload={"question": question, "grader": grader}, family=family
    )


def flat_question(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with `question: {stem, choices}`, as in ARC's own files, as two fields."""
    question = row.get("question")
    if isinstance(question, dict) and {"stem", "choices"} <= question.keys() and "choices" not in row:
        rest = {key: value for key, value in question.items() if key != "stem"}
        return {**row, "question": question["stem"], **rest}
    return row


def _choices(fields: Fields) -> _Choices:
    there = [each for each in LISTS if each in fields]
    if len(there) > 1:
        fields.refuse(f"there is `{fields.spelled(there[0])}` as well: keep the one that is meant", there[1])
    if not there:
        keys = MEDMCQA if fields.has(MEDMCQA[0]) else tuple(each for each in LETTERS[:10].lower() if fields.has(each))
        texts = [_text_of(fields.take(key), fields.spelled(key)) for key in keys if key in fields]
        if not texts:
            fields.refuse("there are none; a list of at least two texts is needed", "choices")
        return _Choices(texts, list(LETTERS[: len(texts)]))
    field = fields.spelled(there[0])
    value = _decoded(fields.take(there[0]))
    if isinstance(value, dict) and {"text", "label"} == value.keys() and isinstance(value["text"], list):
        texts, labels = value["text"], value["label"]
        if not isinstance(labels, list) or len(labels) != len(texts):
            raise RowError("it needs as many labels as texts", field)
    elif isinstance(value, dict):
        there_too = {label: text for label, text in value.items() if text is not None}  # Parquet fills gaps with nulls
        texts, labels = list(there_too.values()), list(there_too)
        if any(len(str(label)) != 1 for label in labels):
            raise RowError(f"its keys are {', '.join(map(repr, labels[:5]))}, where letters are needed", field)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        texts = [each.get("text", each.get("value")) for each in value]
        labels = [each.get("label", each.get("key")) for each in value]
    elif isinstance(value, list):
        texts, labels = value, list(LETTERS[: len(value)])
    else:
        raise RowError(f"it is {kind_of(value)}, where a list of choices is needed", field)
    if not 2 <= len(texts) <= len(LETTERS):
        raise RowError(f"it has {len(texts)} choices; from 2 to {len(LETTERS)} can be asked for", field)
    names = [str(each) for each in labels]
    if len(set(names)) < len(names):
        raise RowError(f"two of its labels are alike ({', '.join(names[:8])})", field)
    return _without_labels(_Choices([_text_of(each, field) for each in texts], names))


def _decoded(value: Any) -> Any:
    """Parse a list or an object stored as text, in JSON or Python (as in CSV files)."""
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list) and _RUN_TOGETHER.search(value):
            return value  # a printed numpy array, which Python would join into one long text
        return found
    return value


def _text_of(value: Any, field: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise RowError(f"a choice is {kind_of(value) if value != '' else 'empty'}, where a text is needed", field)
    return str(value)


def _without_labels(choices: _Choices) -> _Choices:
    """Convert prefixes such as `(A)`, `A.`, `1)` to labels if every choice begins with its own letter or number."""
    texts, places = choices.texts, range(len(choices.texts))
    found = [_OWN_LABEL.match(text) for text in texts]
    said = [each and (each[1] or each[2] or each[3]) for each in found]
    for labels in ([LETTERS[place] for place in places], [str(place + 1) for place in places]):
        if [each and each.upper() for each in said] == labels and choices.labels in (
            labels,
            list(LETTERS[: len(texts)]),
        ):
            return _Choices([text[each.end() :] for text, each in zip(texts, found, strict=True) if each], labels)
    return choices


def _place(fields: Fields, choices: _Choices) -> int:
    """Return the index of the correct choice, on which all fields with an answer must agree."""
    places = set(range(len(choices.texts)))
    named = [each for each in GOLDS if each in fields]
    if not named:
        fields.refuse("there is none: a letter, an index from 0 or the text of the right choice is needed", "answer")
    for key in named:
        value = fields.take(key)
        found = _named(value, choices, is_letter=key not in ("answer", "target", "correct_answer", "gold"))
        if not found:
            fields.refuse(
                f"{str(value)[:80]!r} names none of the {len(choices.texts)} choices; write the letter of the right "
                "one",
                key,
            )
        if not places & found:
            fields.refuse(f"{str(value)[:80]!r} names another choice than `{fields.spelled(named[0])}`", key)
        places &= found
    if len(places) > 1:
        fields.refuse(
            "it names two choices (by its letter and by its text, or two alike): write a task instance", named[0]
        )
    return places.pop()


def _named(value: Any, choices: _Choices, *, is_letter: bool) -> set[int]:
    """Return the indices of the choices that a value may name."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool):
        return set()
    if isinstance(value, float) and value.is_integer():  # pandas writes integers of a column with gaps like this
        value = int(value)
    if isinstance(value, int):
        if str(value) in choices.labels:
            return {choices.labels.index(str(value))}
        return {value} if 0 <= value < len(choices.texts) else set()
    if not isinstance(value, str):
        return set()
    said = value.strip()
    if said in choices.labels:
        by_label = {choices.labels.index(said)}
    elif (found := _DRESSED.fullmatch(value)) and found[1].upper() in choices.labels:
        by_label = {choices.labels.index(found[1].upper())}
    elif is_letter and said.isascii() and said.isdigit() and int(said) < len(choices.texts):
        by_label = {int(said)}
    else:
        by_label = set()
    by_text = _places_of(said, choices)
    if by_text and not by_label and said.isascii() and said.isdigit() and int(said) < len(choices.texts):
        return by_text | {int(said)}  # `"1"` may be a text, or an index in a file of texts
    if not by_label and not by_text:
        if (found := _LABELLED.fullmatch(value)) and found[1].upper() in choices.labels:  # its letter and its text
            return {choices.labels.index(found[1].upper())} & _places_of(found[2].strip(), choices)
        if (
            said.isascii() and said.isdigit() and not any(said in text for text in choices.texts)
        ):  # an index in a CSV file
            return {int(said)} if int(said) < len(choices.texts) else set()
    return by_label if is_letter and by_label else by_label | by_text


def _places_of(said: str, choices: _Choices) -> set[int]:
    """Return the choices with this text: an exact match, or else ignoring case and a full stop."""
    exact = {place for place, text in enumerate(choices.texts) if text.strip() == said}
    plain = said.casefold().removesuffix(".")
    return exact or {
        place for place, text in enumerate(choices.texts) if text.strip().casefold().removesuffix(".") == plain
    }
