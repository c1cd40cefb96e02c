"""An answer in mathematics as plain text, independent of its markup. Pure."""

# ruff: noqa: RUF001 - look-alike signs are the subject of this module
from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Final

from prorl_trio.tasks.handlers.stem.plain_text import GREEK, LOOK_ALIKES

_SIGNS: Final = {
    **{sign: rf"\{name} " for name, sign in reversed(GREEK.items())},
    "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "∖": r"\backslash ",
    "∞": r"\infty ", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ", "√": r"\sqrt ", "∨": " or ", "∧": " and ",
    "∴": r"\therefore ", "⇒": r"\Rightarrow ", "→": r"\to ", "∠": r"\angle ", "△": r"\triangle ",
    "∛": r"\sqrt[3]", "≡": r"\equiv ", "≈": r"\approx ", "ℝ": r"\mathbb{R}",
    "≦": r"\le ", "≧": r"\ge ", "¢": " cents", "円": " yen", "元": " yuan", "°C": "^\\circ C",
}  # fmt: skip
_SIGN: Final = re.compile("|".join(sorted(_SIGNS, key=len, reverse=True)))
_RAISED: Final = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_LOWERED: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SYNONYMS: Final = {
    **dict.fromkeys((r"\leq", r"\leqslant", r"\leqq"), r"\le"),
    **dict.fromkeys((r"\geq", r"\geqslant", r"\geqq"), r"\ge"),
    **dict.fromkeys((r"\neq", r"\not="), r"\ne"), r"\lt": "<", r"\gt": ">", r"\varnothing": r"\emptyset",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lparen": "(", r"\rparen": ")", r"\lbrack": "[",
    r"\rbrack": "]", **dict.fromkeys((r"\dots", r"\cdots", r"\dotsc", r"\dotsb", "..."), r"\ldots"),
    r"\surd": r"\sqrt", r"\Bbb": r"\mathbb", r"\vert": "|", r"\mid": "|", "{:}": ":",
    "{-}": "-", "+/-": r"\pm", "plus or minus": r"\pm", r"\land": " and ", r"\wedge": " and ",
    r"\lor": " or ", r"\vee": " or ", r"\colon": ":",
    r"\langle": "(", r"\rangle": ")", r"\setminus": r"\backslash", r"\R": r"\mathbb{R}", r"\simeq": r"\approx",
    r"\infin": r"\infty", r"\degree": r"^\circ", r"\iff": " or ", r"\dfrac": r"\frac", r"\tfrac": r"\frac",
}  # fmt: skip
_SYNONYM: Final = re.compile(
    "|".join(re.escape(key) + ("(?![A-Za-z])" if key[-1].isalpha() else "") for key in _SYNONYMS)
)
_FONT: Final = (
    r"\\(?:text(?:bf|it|rm|normal|sf|tt|color\s*\{[a-z]+\})?|math(?:rm|bf|it|sf)|bf|rm|it|sf|bm|boldsymbol|[mh]box"
    r"|operatorname\*?|underline(?=\s*\{[-\d.,\s]*\})|tiny|small|[lL]arge|LARGE|[hH]uge|color\s*\{[a-z]+\}|boxed|fbox)(?![A-Za-z])"
)
_FONT_GROUP: Final = re.compile(rf"(?P<script>[\^_]\s*)?{_FONT}\s*\{{(?P<text>[^{{}}]*)\}}")
_BOLD_SET: Final = re.compile(r"\\(?:mathbf|boldsymbol|bm)\s*\{\s*([RQZ])\s*\}|\{\s*\\bf\s+([RQZ])\s*\}")
_FONT_ALONE: Final = re.compile(_FONT)
_MATH_MODE: Final = re.compile(
    r"(?<!\\)\\[()\[\]]|(?<!\\)\$|\\(?:left|right)\s*\.|\\(?:displaystyle|textstyle|limits|left|right|mathopen|mathclose"
    r"|middle|[bB]igg?[lrm]?)(?![A-Za-z])|(?<!\\)\\[!;:>]|\\phantom\s*\{[^{}]*\}"
)
_PRICE: Final = re.compile(r"\$\s*-?[\d.]")
_SPACE: Final = re.compile(r"(?:\\,|(?<!\\)\\(?=\s)|~(?!~)|\s)+")
_QUAD: Final = re.compile(r"(?:\s*[,;]\s*)?(?:\\q?quad(?![A-Za-z])\s*)+(?:[,;]\s*)?")
_MARKDOWN: Final = re.compile(
    r"(?<![\w)}\]*])(\*\*\*|\*\*|__|``?|~~|\*)(?=[^\s*_`~])(.{1,300}?)(?<=\S)\1(?![\w({\[*])", re.DOTALL
)
_LEADING: Final = re.compile(
    r"^(?:(?:\\(?:therefore|Rightarrow|implies|Longrightarrow|rightarrow|to)(?![A-Za-z])|=>|->)\s*)?(?:(?:so|thus|hence|therefore|then|finally),?\s+)?(?:there\s+(?:is|are)\s+(?=no\b))?(?:it(?:'s|\s+is)\s+)?(?:we\s+(?:get|have|find|obtain)\s+)?"
    r"(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is\b|\s*:)\s*:?\s*)?(?:(?:option|choice)\s+(?=\(?[A-Z]\)?$))?"
    r"(?:(?:=|\\approx|\\sim|≈|~|is|are|approximately|about|exactly|roughly|equals?|equal to)\s+|=|\\approx"
    r"|both\s+|(?:at|on)\s+(?=[\d(\\]|[a-z]+day\b)|(?:solution|result|total|ans)\.?\s*:\s*"
    r"|(?:the\s+|an?\s+)?(?:ordered\s+|open\s+|closed\s+)?(?:points?|coordinates?|pairs?|triples?|vectors?|intervals?(?!\()|sets?"
    r"|solutions?|roots?|matrix|values?|numbers?|ratio|time|no\.(?=\s*\d))\s*(?:(?:is|are|of)\s+)?:?\s*(?=[^\s,.a-z])|)",
    re.IGNORECASE,
)
_CASES: Final = re.compile(
    r"(?:\\\{\s*)?\\begin\s*\{(cases|aligned|gathered|(?<=\\\{\\begin\{)array)\}(?:\s*\{[lcr]\})?([^&]{0,2000}?)(?:\\\\\s*)?"
    r"\\end\s*\{\1\}"
)
_CROSS: Final = re.compile(r"(\\(?:mathbf|vec|boldsymbol|bm)\s*(?:\{\w\}|\w)\s*)\\times")
_FIGURE: Final = re.compile(r"(\\(?:angle|triangle))\s*\{([A-Z]+)\}")
_NOTHING: Final = re.compile(r"(?<=\\)([A-Za-z]+)(?<!frac)(?<!sqrt)(?<!binom)(?<!box)(?<!boxed)\{\}")
_UNION: Final = re.compile(r"(?<=[)\]])\s*[Uu]\s*(?=[(\[])")
_HAT: Final = re.compile(r"\\hat\s*\{?\s*\\?([ijk])(?:math)?\s*\}?(?![A-Za-z])")
_WITHOUT: Final = re.compile(r"(?<=[})\]])\s*-\s*(?=\\\{)")
_REMARK: Final = re.compile(
    r"\s+is\s+(?:the|my|our)\s+(?:final |correct |right )?answer$"
    r"|\s*(?:\\(?:checkmark|blacksquare|square|qed)|[✓✔✅\ufe0f]{1,4})$"
    r"|\s+\((?:approximately|approx\.?|rounded[^()]*|exactly|about|in \w+)\)$"
)
_EQUIVALENT: Final = re.compile(r",?\s+(?:or\s+(equivalently|approximately|about)|i\.e\.|that is),?\s+(?=[^\sA-Za-z])")
_NAMED_UNIT: Final = re.compile(r"(?<=\d)\s*[(\[]\s*(?!in\s)([A-Za-z]{2,}(?:\s[A-Za-z]+)?)\s*[)\]]$")
_DEGREES: Final = re.compile(r"(?<=\d)\s*\^\s*(?:o|\{\s*o\s*\})(?![A-Za-z])")
_LINES: Final = re.compile(r"(?:[-*•]\s|\d+[.)]\s)?\s*(\$?[A-Za-z](?:_\w)?\s*=[^=]*)")
"""A line that defines an unknown."""
_ALSO: Final = re.compile(r"\s+\(\s*(or|=|\\approx|i\.e\.,?|that is,?|equivalently,?)\s+([^()]*)\)$")
_LATEX_GROUPED: Final = re.compile(r"(?<=\d)(?:\{,\}|\\,|,\\!\s*|\\!,)(?=\d{3}(?!\d))")
_GROUPED: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_ODDLY_GROUPED: Final = re.compile(r"(?<![\w.])\d{1,3}(?:_\d{3})+(?!\w)|(?<![\w.])\d{1,3}(?:'\d{3})+(?![\w'])")
_OUT_OF: Final = re.compile(r"(\d+)\s+out\s+of\s+(\d+)")
_SPACE_GROUPED: Final = re.compile(r"(?<![\d.,])-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED: Final = re.compile(
    r"(?<![\w.)}/^_])(\d+)\s*(?:\\frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))|\s(\d+)\s*/\s*(\d+)(?![\w.]))"
)
_TIMES_TEN: Final = re.compile(r"(?<=[\d.])\s*[xX*]\s*10\s*(?=\^|\*\*)")
_REPEATING: Final = re.compile(
    r"(?<![\w.])(\d*)\.(\d*?)(?:\\(?:overline|bar|dot|overset\{\.\})\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\))(?:(\d*)\\dot\s*(?:\{(\d)\}|(\d)))?(?![\w.(\\])"
)
_GOES_ON: Final = re.compile(r"(?<![\w.])(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,}?)\4+)\s*\\ldots\s*$")
_BASED: Final = re.compile(r"(?<![\w.}\\^])\(?(\d[\dA-Fa-f]*)\)?\s*_\s*(?:\{\s*\(?(\d{1,2})\)?\s*\}|(\d))(?!\w)")
_MODULE: Final = re.compile(r"(?<![A-Za-z.])(?:math|cmath|np|numpy|sympy|sp)\.(?=[A-Za-z])")
_EULER: Final = re.compile(r"(?<![A-Za-z\\])E(?=\s*\*)|(?<=\*)E(?![A-Za-z])")
_COMPLEX: Final = re.compile(r"(\(?[-+\d.eE ]*\d)j(\)?)")
_TO: Final = re.compile(r"(?<=[\d})])\s+to\s+(?=[\d({\\])")
_SYMPY: Final = (
    (re.compile(r"Interval\.open\(([^(),]+,[^(),]+)\)"), r"(\1)"),
    (re.compile(r"Interval\.Lopen\(([^(),]+,[^(),]+)\)"), r"(\1]"),
    (re.compile(r"Interval\.Ropen\(([^(),]+,[^(),]+)\)"), r"[\1)"),
    (re.compile(r"Interval\(([^(),]+,[^(),]+)\)"), r"[\1]"),
    (re.compile(r"^FiniteSet\((.*)\)$", re.DOTALL), r"\\{\1\\}"),
    (re.compile(r"^(?:Matrix|array)\((\[.*\])\)$", re.DOTALL), r"\1"),
)
_SYMPY_NAME: Final = re.compile(r"(?:Interval|Union|FiniteSet|Matrix|array)[.(]")
_SYMPY_UNION: Final = re.compile(r"Union\((.*)\)")
_SYMPY_INTEGER: Final = re.compile(r"(?<![A-Za-z\\])S\((-?\d+)\)")
_LOG_BASE: Final = re.compile(r"(?<![A-Za-z\\])\\?log_?\{?(2|10)\}?\s*(?=\()")


@lru_cache(maxsize=256)
def normalised(text: str) -> str:
    """Return `text` in ASCII and plain LaTeX, without math mode, fonts, markdown or redundant spaces."""
    if not text.isascii():
        text = _SIGN.sub(lambda found: _SIGNS[found[0]], text.translate(LOOK_ALIKES))
        text = _RAISED.sub(lambda found: f"^{{{found[0].translate(_LOWERED)}}}", text)
    before = None
    if "\n" in text or ("\\\\" in text and "\\begin" not in text):
        lines = [line for line in re.split(r"\n|\\\\(?![A-Za-z]{2})", text) if line.strip()]
        items = list(map(_LINES.fullmatch, lines))
        text = ", ".join(item[1].strip(" $,.;") for item in items if item) if len(items) > 1 and all(items) else text
    if "\\" in text or "{" in text:
        text = _BOLD_SET.sub(lambda found: rf"\mathbb{{{found[1] or found[2]}}}", text)
        text = _CROSS.sub(r"\1\\cross ", _QUAD.sub(", ", _LATEX_GROUPED.sub("", text)))
        while before != text:
            before, text = text, _FONT_GROUP.sub(_without_font, text)
        text = _FONT_ALONE.sub(" ", text)
    before = None
    while before != text:
        before, text = text, _MARKDOWN.sub(r"\2", text.strip())
    prices = text.count("$") % 2 == 1  # some do not enclose a formula
    text = _MATH_MODE.sub(lambda found: "$" if prices and _PRICE.match(text, found.start()) else "", text)
    text = _SYNONYM.sub(lambda found: _SYNONYMS[found[0]] + (" " if found[0][-1].isalpha() else ""), text)
    text = _CASES.sub(lambda found: found[2].replace("\\\\", ", "), text)
    text = _UNION.sub(r"\\cup ", _HAT.sub(r" \1 ", text))
    text = _FIGURE.sub(r"\1 \2", _NOTHING.sub(r"\1 ", text))
    text = _WITHOUT.sub(r"\\backslash ", text)
    text = text.replace("\\%", "%").replace("\\$", "$").replace("\\#", "#").replace("\\&", "&").replace("\\_", "_")
    text = re.sub(r"^#+\s+|(?<=[\w\s])\\+$", "", _SPACE.sub(" ", text).strip("*_` "))
    text = re.sub(r"^[\"'“”‘]+(.*?)[\"'“”’]+\.?$", r"\1", text).strip()
    text = re.sub(r"(?<![\\.])[.,;:]$|(?<![\w)}\]!\s])!$", "", text).rstrip()
    text = _EQUIVALENT.sub(
        lambda found: r" \approx " if found[1] in ("approximately", "about") else " = ", _ALSO.sub(_also, text)
    )
    text = _NAMED_UNIT.sub(r" \1", text) if text.endswith((")", "]")) else text
    text = _DEGREES.sub(r"^\\circ", text) if "^" in text else text
    return _REMARK.sub("", _LEADING.sub("", text)).strip()


def _also(found: re.Match[str]) -> str:
    return f" {found[1] if found[1] in ('or', '=', chr(92) + 'approx') else '='} {found[2]}"


def _without_font(found: re.Match[str]) -> str:
    return f"{found['script']}{{{found['text']}}}" if found["script"] else f" {found['text']} "


def with_plain_numbers(text: str) -> str:
    """Return a normalised text with its numbers in the form used in formulas: `1,000`, `0.(3)`, `52_8`, `1 1/2`."""
    text = _SYMPY_INTEGER.sub(r"(\1)", _EULER.sub("e", _MODULE.sub("", text)))
    if _SYMPY_NAME.match(text):
        for pattern, plain in _SYMPY:
            text = pattern.sub(plain, text)
        if (union := _SYMPY_UNION.fullmatch(text)) is not None:
            text = re.sub(r"(?<=[)\]}])\s*,\s*(?=[(\[\\])", r"\\cup ", union[1])
    text = _OUT_OF.sub(r"\1/\2", _ODDLY_GROUPED.sub(lambda found: re.sub("[_']", "", found[0]), _TO.sub(":", text)))
    text = _COMPLEX.sub(r"\1i\2", text) if _COMPLEX.fullmatch(text) else text
    text = _REPEATING.sub(_repeating, text)
    text = _BASED.sub(_based, text)
    text = _GOES_ON.sub(lambda m: _fraction(m[1], m[2], m[3] or m[4]), text)
    if not re.search(r"[(\[{]", text):  # in brackets it would be a list
        text = _GROUPED.sub(lambda found: found[0].replace(",", ""), text)
    text = _SPACE_GROUPED.sub(lambda found: found[0].replace(" ", ""), text)
    text = _TIMES_TEN.sub(r"\\times 10", text)
    text = _LOG_BASE.sub(r"\\log_{\1}", text)
    return _MIXED.sub(_mixed, text)


def _based(found: re.Match[str]) -> str:
    try:
        return str(int(found[1], int(found[2] or found[3])))
    except ValueError:  # digits that do not exist in the base
        return found[0]


def _mixed(found: re.Match[str]) -> str:
    over, under = next((a, b) for a, b in (found.group(2, 3), found.group(4, 5), found.group(6, 7)) if a)
    return f"({found[1]}+{over}/{under})" if int(over) < int(under) else found[0]


def _repeating(found: re.Match[str]) -> str:
    period = next(filter(None, found.group(3, 4, 5)))
    return _fraction(found[1], found[2], period + (found[6] or "") + (found[7] or found[8] or ""))


def _fraction(whole: str, fixed: str, period: str) -> str:
    value = Fraction(int((whole + fixed) or 0)) + Fraction(int(period), 10 ** len(period) - 1)
    value /= 10 ** len(fixed)
    return f"({value.numerator}/{value.denominator})"
