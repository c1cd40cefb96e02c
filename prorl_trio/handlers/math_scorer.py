"""Whether two mathematical answers are equal, by math-verify. Runs in a scoring process (`prorl_trio.scoring`)."""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify

__all__ = ["score"]

MAX_ANSWER_CHARS = 2_000
_NUMBER_WITH_WORDS = re.compile(r"[A-Za-z ]*(-?\d[\d,]*(?:\.\d+)?)[A-Za-z ]*\.?")

# The pool's own time-out kills this process, so math-verify's alarms are off; it would warn about that at each call.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(payload: dict[str, Any]) -> dict[str, Any]:
    """Compare `payload["answer"]` with `payload["gold"]`, both final answers without surrounding prose.

    Each is parsed as LaTeX in a box first and, if that finds nothing, as a bare expression; a single number with words
    around it (`18 dollars`) counts as the number. Returns `equal` (bool) and both parses as text. An answer that
    cannot be parsed is not equal: that is the policy's doing. A gold answer that cannot be parsed is the task's fault
    and raises ValueError.
    """
    gold = _parse(payload["gold"])
    if not gold:
        raise ValueError(f"the gold answer {payload['gold']!r} is no mathematical expression")
    answer = _parse(payload["answer"][:MAX_ANSWER_CHARS])
    equal = bool(answer) and verify(gold, answer, timeout_seconds=None)
    return {"equal": equal, "parsed_gold": str(gold), "parsed_answer": str(answer)}


def _parse(text: str) -> list[Any]:
    cleaned = text.replace("\\$", "").replace("$", "").strip()
    if number := _NUMBER_WITH_WORDS.fullmatch(cleaned):
        cleaned = number[1].replace(",", "")
    parsed: list[Any] = parse(f"\\boxed{{{cleaned}}}", parsing_timeout=None) or parse(cleaned, parsing_timeout=None)
    return parsed
