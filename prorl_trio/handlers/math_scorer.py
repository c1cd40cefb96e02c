"""Compare two mathematical answers with math-verify. Runs in a scoring process (`prorl_trio.agent.scoring`)."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from math_verify import parse, verify

from prorl_trio.handlers.final_answer import FinalAnswer, find_final_answer, is_words, read_final_answer, words_of

__all__ = ["score"]

MAX_ANSWER_CHARS: Final = 2_000
MAX_SHOWN_CHARS: Final = 500
"""Characters of a parsed answer that a result shows."""
_DECIMAL: Final = re.compile(r"-?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})")
_NAMES: Final = re.compile(r"\\(?:begin|end)\s*\{[a-z]+\*?\}|\\[A-Za-z]+|sqrt")
_HALF: Final = re.compile(r"\s*(?:[<>]|\\(?:[lg]eq?|ne|neq)\b)")
_LETTERS: Final = re.compile(r"[A-Za-z]+")
_BRACKETS: Final = re.compile(r"\{[^{}]*\}|\([^()]*\)|\[[^\[\]]*\]")

# The pool's own limits end this process, so math-verify's alarms are off; it would warn about that at each call.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(payload: dict[str, Any]) -> dict[str, Any]:
    """Compare `payload["answer"]`, as an agent gave it, with `payload["gold"]`, the final answer alone.

    The answer is told apart from its prose first (`final_answer`). What a task answers in words is compared as words;
    all else by math-verify: numbers, formulas, sets, intervals, tuples, matrices. Returns `equal` (bool) and both as
    they were understood. An answer that cannot be parsed is not equal: that is the policy's doing. A gold answer
    that cannot be parsed is the task's fault and raises ValueError.
    """
    gold_text = payload["gold"]
    if is_words(gold_text):
        said = find_final_answer(payload["answer"][:MAX_ANSWER_CHARS])
        equal = bool(words_of(said)) and words_of(said) == words_of(gold_text)
        return {"equal": equal, "parsed_gold": words_of(gold_text), "parsed_answer": words_of(said)[:MAX_SHOWN_CHARS]}
    thousands = not re.search(r"[kK]", gold_text)
    gold = read_final_answer(gold_text, k_is_thousand=False)
    if gold is None or not (parsed_gold := _parse_gold(gold.text)):
        raise ValueError(f"the gold answer {gold_text!r} is no mathematical expression")
    said = find_final_answer(payload["answer"][:MAX_ANSWER_CHARS])
    answer = read_final_answer(said, k_is_thousand=thousands)
    equal, understood = (False, "") if answer is None else _compare(gold, parsed_gold, answer)
    return {"equal": equal, "parsed_gold": str(parsed_gold)[:MAX_SHOWN_CHARS], "parsed_answer": understood}


def _compare(gold: FinalAnswer, parsed_gold: list[Any], answer: FinalAnswer) -> tuple[bool, str]:
    """Return whether both are equal, and the answer as it was understood."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False, f"{answer.text} {answer.unit}"[:MAX_SHOWN_CHARS]
    if _DECIMAL.fullmatch(gold.text) and _DECIMAL.fullmatch(answer.text) and Decimal(gold.text) == Decimal(answer.text):
        return True, answer.text
    if not _could_be(gold.text, answer.text):
        return False, answer.text[:MAX_SHOWN_CHARS]
    parsed = _parse(answer.text)
    equal = bool(parsed) and bool(verify(parsed_gold, parsed, timeout_seconds=None))
    return equal, _shown(parsed)


def _could_be(gold: str, answer: str) -> bool:
    """Return whether `answer` may be a formula of the kind of `gold`.

    It is none if it is prose, which would be read as a product of its letters, a list where one thing is asked for, or
    half of a comparison.
    """
    if _HALF.match(answer):
        return False
    letters = set(_NAMES.sub(" ", gold))
    words = [word for word in _LETTERS.findall(_NAMES.sub(" ", answer)) if word not in ("and", "or")]
    if any(len(word) > 1 and not set(word) <= letters for word in words):
        return False
    return "," in gold or _is_list(gold) or not _is_list(answer)


def _is_list(text: str) -> bool:
    """Return whether `text` has a separator outside of brackets, or is the set of something."""
    before = ""
    while before != text:
        before, text = text, _BRACKETS.sub("", text)
    return "," in text or ";" in text or re.search(r"\b(?:and|or)\b", text) is not None


@lru_cache(maxsize=256)
def _parse_gold(text: str) -> list[Any]:
    return _parse(text)


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return parsed


def _shown(parsed: list[Any]) -> str:
    try:
        return str(parsed)[:MAX_SHOWN_CHARS]
    except Exception as exc:  # a number too long to be written, say: SymPy raises of many kinds
        return f"({type(exc).__name__})"
