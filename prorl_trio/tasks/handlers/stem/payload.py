"""The payload of a science question, and the ways of grading its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from prorl_trio.tasks.handlers.stem.choice import LETTERS
from prorl_trio.tasks.handlers.stem.quantity import read_number
from prorl_trio.types.errors import malformed_job

if TYPE_CHECKING:
    from collections.abc import Mapping

ToolName = Literal["search", "bash", "ipython"]

SYSTEM_PROMPT: Final = "You answer questions of science and engineering. You look up what you do not know, and compute."

INSTRUCTION: Final = """\
When you know the answer, call finish with it, or write it as \\boxed{answer}: nothing but the answer."""
FOR_PROGRAMS: Final = """\
When you know the answer, write it as \\boxed{answer} in your last message: nothing but the answer."""

Tolerance = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Graded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """The base of the graders; `kind` selects the grader."""


class Choice(_Graded, frozen=True, tag="choice"):
    """A choice among several, listed in the question's message as A, B, C and so on; `answer` is the correct letter."""

    choices: Annotated[list[str], msgspec.Meta(min_length=2, max_length=len(LETTERS))]
    answer: str

    def __post_init__(self) -> None:
        if self.answer not in self.letters:
            raise ValueError(f"answer must be one of {', '.join(self.letters)}, got {self.answer[:20]!r}")

    @property
    def letters(self) -> str:
        return LETTERS[: len(self.choices)]


class Number(_Graded, frozen=True, tag="number"):
    """A number, with or without a unit.

    `answer` is the number in `unit`. The unit may be any unit known to the package pint, in the same forms as in
    answers (`m/s^2`, `kJ/mol`, `degC`, `degrees Celsius`); empty for none. An answer may use another unit of the same
    dimension. It is correct within the larger of the two tolerances: the relative one refers to `answer`, and the
    absolute one is in `unit`. An answer without a unit is taken to be in `unit`, unless `unit_required` is set.
    """

    answer: float | str
    unit: Annotated[str, msgspec.Meta(max_length=80)] = ""
    relative_tolerance: Tolerance = 0.01
    absolute_tolerance: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    unit_required: bool = False

    def __post_init__(self) -> None:
        if read_number(str(self.answer)) is None:
            raise ValueError(f"answer {str(self.answer)[:40]!r} is no finite number")


class ShortAnswer(_Graded, frozen=True, tag="text"):
    """A few words: `answer`, or any element of a list. With `case_sensitive`, `CO` and `Co` are different answers."""

    answer: str | list[str]
    case_sensitive: bool = False

    def __post_init__(self) -> None:
        if not self.golds or not all(map(str.strip, self.golds)):
            raise ValueError("answer is empty")

    @property
    def golds(self) -> list[str]:
        """Return all accepted answers."""
        return [self.answer] if isinstance(self.answer, str) else self.answer


class Generated(_Graded, frozen=True, tag="reasoning_gym"):
    """A task of reasoning-gym: the first task of `family` with the generator's `seed`, verified by its own code.

    `version` is the version of the package that generated the question. The reward is 1 if the verifier counts the task
    as solved, else 0; with `partial_credit` it is the verifier's score.
    """

    family: str
    seed: Annotated[int, msgspec.Meta(ge=0)]
    version: str
    partial_credit: bool = False


Grader = Choice | Number | ShortAnswer | Generated


class StemPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`TaskInstance.payload` of a science question.

    `tools` are the agent's tools in addition to `finish`; None: bash, IPython, and search if the node offers it.
    Without bash and IPython no sandbox is opened. `system_prompt` and `instruction` (which follows the question in the
    user's message) replace the handler's own. Without `describe_tools` the prompt does not list the tools.
    """

    question: str
    grader: Grader
    tools: list[ToolName] | None = None
    system_prompt: str = SYSTEM_PROMPT
    instruction: str = INSTRUCTION
    describe_tools: bool = True

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ValueError("question is empty")

    def prompt(self, instruction: str) -> str:
        """Return the user's message: the question, its choices, and the instruction."""
        parts = [self.question]
        if isinstance(self.grader, Choice):
            choices = zip(self.grader.letters, self.grader.choices, strict=True)
            parts.append("\n".join(f"{letter}. {text}" for letter, text in choices))
        return "\n\n".join([*parts, instruction]).strip()


def read_payload(payload: Mapping[str, Any]) -> StemPayload:
    """Return the payload. Raises MalformedJob with the path of the invalid field."""
    try:
        return msgspec.convert(payload, StemPayload)
    except msgspec.ValidationError as exc:
        raise malformed_job(exc, prefix="$.instance.payload") from exc
