"""The fields of a published row: found under any spelling, and never dropped if they could change the question."""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn

HARMLESS: Final = frozenset({
    "__index_level_0__", "answer_source", "answer_type", "author", "author_name", "canary", "canary_string",
    "category", "chain_of_thought", "choice_type", "citation", "class", "competition", "contest", "correctness_llama",
    "correctness_math_verify", "cot", "cot_content", "created_at", "data_source", "dataset", "date", "difficulty",
    "discipline", "domain", "equation_solution", "error", "error_type", "exam", "exp", "explanation", "family",
    "field", "finish_reasons", "generated_solution", "generation", "generations", "grade", "grade_level", "id", "idx",
    "index", "is_calculation", "is_reasoning_complete", "label_type", "lang", "language", "level", "license", "link",
    "meta", "meta_info", "metadata", "metamap_phrases", "metrics", "modality_type", "model_answer", "name", "origin",
    "original_solution", "part", "platform", "potential_reason", "prediction", "problem_number", "problem_type",
    "problem_url", "provenance", "question_concept", "question_id", "question_source", "question_type",
    "question_url", "r1_solution_1", "r1_solution_2", "r1_solution_3", "rationale", "raw_subject", "reasoning",
    "record_id", "reference_solution", "solution", "solution_source", "solutions", "source", "source_file",
    "source_url", "split", "src", "steps", "sub_field", "subdomain", "subfield", "subject", "subject_name", "subset",
    "tag", "tags", "title", "topic", "topic_name", "type", "uid", "unnamed:_0", "url", "uuid", "version",
    "worked_solution", "year",
})  # fmt: skip
"""Fields about a question's origin or solution, in the published sets of `docs/tasks.md`."""
_HARMLESS_FORM: Final = re.compile(
    r".*_(?:ids?|idx|index|rate|count|score|difficulty|level|solutions?|domain|date|valid|metrics)|(?:is|has|num|n)_.*"
)
_STATISTIC: Final = re.compile(
    r"(?:pass|avg|mean|average|max|min|std|acc|reward|prob|iter)[a-z]*(?:_.*)?"
    r"|.*(?:rate|count|score|pass|mean|avg|acc|accuracy|reward|prob|len|length|chars|words|tokens|votes|views|likes|rank"
    r"|seed|order|position|number|hash|time|rating|size|page|round|id|idx|index)(?:_\d+)?"
)
"""A number with such a name is a statistic about the row."""
_MATERIAL: Final = re.compile(
    r"image|img|picture|photo|figure|diagram|chart|audio|video|media|file|attachment|document|passage|context|article"
    r"|paragraph|evidence|table|body|tool|tolerance|precision"
)
"""A field with such a name belongs to the question, whatever it contains."""
NOTHING: Final = frozenset({"nan", "none", "null", "n/a", "#n/a", "...", "<na>", "undefined"})
"""Words that programs write for a missing text."""
_PICTURE: Final = re.compile(
    r"<(?:image|video|audio)(?:[ _]?\d+)?>|<img\b|!\[[^\]]*\]\([^)]*\)|\\includegraphics", re.IGNORECASE
)


class RowError(ValueError):
    """A row cannot be used. `field` is the row's field as spelled there; empty for the row as a whole."""

    def __init__(self, problem: str, field: str = "") -> None:
        super().__init__(f"field `{field}`: {problem}" if field else problem)
        self.problem = problem
        self.field = field


class Fields:
    """A row whose fields are accessed by lower-case names, with `_` for blanks, and consumed one by one."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self._names: dict[str, str] = {}
        self._used: set[str] = set()
        for name in row:
            key = _key(name)
            if key in self._names:
                raise RowError(f"it differs from `{self._names[key]}` in its spelling only", name)
            self._names[key] = name

    def __contains__(self, name: str) -> bool:
        """Return whether the row has a non-empty field of that name."""
        return name in self._names and not _is_empty(self.row[self._names[name]])

    def has(self, name: str) -> bool:
        """Return whether the row has a field of that name, possibly empty."""
        return name in self._names

    def spelled(self, name: str) -> str:
        """Return a field's name as the row spells it."""
        return self._names.get(name, name)

    def take(self, name: str) -> Any:
        """Return a field's value; None if it is missing. The field counts as used."""
        self._used.add(name)
        return self.row.get(self._names.get(name, ""))

    def text(self, *names: str) -> str:
        """Return the text of the only field among `names` that has one.

        Raises:
            RowError: none has a text, two texts differ, or a value is not a text.
        """
        there = [name for name in names if name in self]
        values = {name: self.take(name) for name in there}
        if not there:
            empty = next(filter(self.has, names), names[0])
            others = tuple(name for name in names if name != empty)
            self.refuse(f"there is none; a text is needed{_or(others)}", empty)
        for name, value in values.items():
            if not isinstance(value, str):
                self.refuse(f"it is {kind_of(value)}, where a text is needed", name)
            if value.strip().lower() in NOTHING:
                self.refuse(
                    f"it says {value!r}, as a missing value is written; give the text, or leave the row out", name
                )
        if len(set(values.values())) > 1:
            self.refuse(f"it differs from `{self.spelled(there[0])}`: keep the one that is meant", there[1])
        return str(values[there[0]])

    def label(self, *names: str) -> str:
        """Return the first of `names` that is a text or a number, as a text; empty if there is none."""
        for name in names:
            value = self.take(name)
            if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
                return str(value)
        return ""

    def refuse(self, problem: str, name: str) -> NoReturn:
        """Raise RowError about a field."""
        raise RowError(problem, self.spelled(name))

    def ignore(self, *names: str) -> None:
        """Mark fields as irrelevant."""
        self._used.update(names)

    def ignore_rest(self) -> None:
        """Mark every field as irrelevant: the form is known, and no other field belongs to the question."""
        self._used.update(self._names)

    def finish(self, *texts: str) -> None:
        """Check that no field that could change the question is lost.

        `texts` are the texts shown to the policy. A field refuses the row unless it is used, empty, a boolean, a
        statistic about the row, or known to be harmless.
        """
        for key, name in self._names.items():
            if key not in self._used and not _is_harmless(key, self.row[name]):
                self.refuse(
                    "this form has no use for it, and leaving it out could change the question; put it into the "
                    "question's text, delete it, or write the row as a task instance",
                    key,
                )
        for text in texts:
            if found := _PICTURE.search(text):
                raise RowError(f"the question shows a picture or a recording ({found[0]}), which the policy cannot see")


def kind_of(value: Any) -> str:
    """Return the type of a JSON value in words."""
    if value is None:
        return "null"
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return next((word for kind, word in kinds.items() if isinstance(value, kind)), f"a {type(value).__name__}")


def _key(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _or(names: tuple[str, ...]) -> str:
    others = ", ".join(f"`{name}`" for name in names)
    return f" (or in {others})" if others else ""


def _is_empty(value: Any) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _is_harmless(key: str, value: Any) -> bool:
    if _is_empty(value) or key in HARMLESS:
        return True
    if _MATERIAL.search(key):
        return value in (False, 0)
    if isinstance(value, bool) or _HARMLESS_FORM.fullmatch(key):
        return True
    return isinstance(value, int | float) and _STATISTIC.fullmatch(key) is not None
