"""The supported families of reasoning-gym, and the answers that may be passed to their verifiers.

Some verifiers evaluate the answer as Python. These get only answers that cannot execute anything: a literal, or a
formula of plain names and operators. Families whose verifier accepts wrong answers are refused.
"""

from __future__ import annotations

import ast
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final

CHECKED_VERSIONS: Final = frozenset({"0.1.25"})
"""Versions whose verifiers were reviewed for their treatment of answers."""
SOLVED: Final = 1.0 - 1e-6
"""The minimal score that counts as solved."""
ANEW: Final = "its generator does not make the same task of a seed each time"
REFUSED: Final = {
    "coin_flip": "its verifier takes the beginning of the right number, a lone 0, for all of it",
    "codeio": "it runs programs of its data file on this machine",
    "composite": "it is made of other families: name those",
    "game_of_life_halting": "its verifier takes text that is no answer for a right one",
    "isomorphic_strings": ANEW,
    "knight_swap": ANEW,
    "list_functions": ANEW,
    "polynomial_multiplication": ANEW,
    "puzzle24": "its verifier does not look at which numbers were asked for",
    "ransom_note": ANEW,
    "word_ladder": ANEW,
}
_LITERALS: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Families whose verifiers call `eval` on an answer."""
_FORMULAS: Final = frozenset({"intermediate_integration", "simple_integration"})
_SUMS: Final = frozenset({"countdown"})
"""Families whose verifiers pass an answer to SymPy's parser, which evaluates it."""
MAX_EVALUATED_CHARS: Final = 1_000
_FORMULA: Final = re.compile(r"(?:[A-Za-z]+|\d+(?:\.\d+)?|\*\*|[-+*/^()]|\s)*+")
_NO_NUMBER: Final = re.compile(r"(?<![a-z])(?:nan|inf(?:inity)?)[ij]?(?![a-z])", re.IGNORECASE)
_FUNCTIONS: Final = frozenset({"sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "pi"})


def check_family(family: str) -> None:
    """Raise ValueError, with the reason, if this family or the installed reasoning-gym is not supported."""
    if family in REFUSED:
        raise ValueError(f"reasoning-gym's family {family} is refused: {REFUSED[family]}")
    try:
        installed = version("reasoning-gym")
    except PackageNotFoundError:
        raise ValueError("reasoning-gym is not installed: pip install 'prorl-trio[reasoning-gym]'") from None
    if installed not in CHECKED_VERSIONS:
        raise ValueError(
            f"reasoning-gym is {installed}; its verifiers are known for "
            f"{', '.join(sorted(CHECKED_VERSIONS))}: install that"
        )


def may_be_evaluated(family: str, answer: str) -> bool:
    """Return whether an answer may be passed to a family's verifier. Verifiers that evaluate nothing get any answer."""
    if family in _LITERALS:
        return len(answer) <= MAX_EVALUATED_CHARS and _is_plain(answer)
    if family in _SUMS:
        return (
            len(answer) <= MAX_EVALUATED_CHARS and re.fullmatch(r"(?!.*(?:\*\*|//))[-+*/() \d]*+", answer) is not None
        )
    if family in _FORMULAS:
        names = set(re.findall(r"[A-Za-z]+", answer))
        known = all(len(name) == 1 or name in _FUNCTIONS for name in names)
        return len(answer) <= MAX_EVALUATED_CHARS and known and _FORMULA.fullmatch(answer) is not None
    return True


def is_no_number(answer: str) -> bool:
    """Return whether an answer contains Python's NaN or infinity, which defeat comparisons of distances."""
    return _NO_NUMBER.search(answer) is not None


def _is_plain(answer: str) -> bool:
    """Return whether Python would parse an answer as a literal, or as nothing executable."""
    if re.fullmatch(r"[\w\s]*+", answer) and not answer.strip().isidentifier():
        return True  # a sequence of words or numbers
    try:
        ast.literal_eval(answer.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False
    return True
