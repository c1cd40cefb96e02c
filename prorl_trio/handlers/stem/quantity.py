# ruff: noqa: RUF001, RUF002 - signs of many kinds are what this file is about
"""Numbers with units, out of an answer: the number and the text of its unit. Reading a number needs no package."""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from prorl_trio.handlers.final_answer import find_final_answer

__all__ = ["Quantity", "read_number", "read_quantity"]

MAX_UNIT_CHARS: Final = 80
MAX_QUANTITY_CHARS: Final = 300
_RAISED: Final = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺"
_LOWERED: Final = str.maketrans(_RAISED, "0123456789-+")
_SIGNS: Final = {
    "−": "-", "–": "-", "＋": "+", "⋅": "·", "∙": "·", "∗": "*", "∕": "/", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
    r"\times": "×", r"\cdot": "·", r"\mu": "µ", "μ": "µ", r"\Omega": "Ω", "\u2126": "Ω", "\u212b": "Å", r"\%": "%",
    r"\approx": "≈", r"\left": "", r"\right": "", r"\,": " ", r"\;": " ", r"\!": "", r"\ ": " ", "~": " ", "$": "",
    r"\(": "", r"\)": "", "℃": "degC", "℉": "degF", r"^\circ": "°", r"^{\circ}": "°", r"\degree": "°",
}  # fmt: skip
_TEXT: Final = re.compile(r"\\(?:text|mathrm|mathbf|operatorname|rm|unit|si)\s*\{([^{}]*)\}")
_FRACTION: Final = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_MANTISSA: Final = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,40})?(?:\.\d{0,40})?"
_QUANTITY: Final = re.compile(
    rf"(?:[^=≈0-9]{{0,40}}[=≈])?\s*(?:about|approximately|approx\.?|around|≈)?\s*"
    rf"(?P<mantissa>(?=[+-]?\.?\d){_MANTISSA})"
    r"(?:[eE](?P<e>[+-]?\d{1,3})(?![\d.])|\s*[×xX*·]\s*10\s*\^\s*\(?(?P<ten>[+-]?\d{1,3})\)?(?!\d)"
    r"|\s*/\s*(?P<below>\d{1,40}(?:\.\d{1,40})?)(?![\d.]))?"
    r"(?P<unit>(?![\d.,]).*)?",
    re.DOTALL,
)
_POWER_OF_TEN: Final = re.compile(r"([+-]?)10\s*\^\s*\(?([+-]?\d{1,3})\)?(?!\d)")
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<name>[A-Za-zµΩÅ°%]{1,40})(?P<power>(?:\^|\*\*)?\(?[+-]?\d{1,2}\)?(?!\d))?|(?P<one>1(?=\s*/))|(?P<sign>[*/()·]))"
)


class Quantity(NamedTuple):
    """A finite number, and a unit in the form that pint reads; empty for none."""

    value: float
    unit: str = ""


def read_number(text: str) -> float | None:
    """Return the number that all of a text is; None if it is none, or has a unit."""
    found = read_quantity(text)
    return found.value if found is not None and not found.unit else None


def read_quantity(text: str) -> Quantity | None:
    """Return the quantity that an answer is; None if it is none, or there is more to it.

    Decimals, thousands in groups, `1.2e-3`, `1.2 × 10^-3`, fractions `3/4`; LaTeX, `v = ...` and `about ...` before it;
    units as `m/s^2`, `m s⁻²`, `meters per second`, `\\text{kJ mol}^{-1}`, `°C`, `%`. Raises nothing.
    """
    text = find_final_answer(text)
    if len(text) > MAX_QUANTITY_CHARS:
        return None
    text = _plain(text)
    text = _POWER_OF_TEN.sub(r"\g<1>1e\2", text, count=1) if _POWER_OF_TEN.match(text) else text
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return None
    value = float(f"{found['mantissa'].replace(',', '')}e{found['e'] or found['ten'] or 0}")
    if found["below"] is not None:
        value = value / float(found["below"]) if float(found["below"]) else math.inf
    unit = _unit((found["unit"] or "").strip())
    return Quantity(value, unit) if unit is not None and math.isfinite(value) else None


def _plain(text: str) -> str:
    """Return a text without LaTeX and the signs that have a plain form."""
    text = re.sub(f"[{_RAISED}]+", lambda found: f"^{found[0].translate(_LOWERED)}", text)
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    text = _FRACTION.sub(r"\1/(\2)", _TEXT.sub(r" \1", text))
    text = re.sub(r"/\((\d+(?:\.\d+)?)\)", r"/\1", text)
    text = text.replace("{", "").replace("}", "").replace("°C", "degC").replace("°F", "degF")
    return text.strip().strip("*`").removesuffix(".").strip()


def _unit(text: str) -> str | None:
    """Return a unit in pint's form, of names, small powers, products and quotients alone; None for anything else."""
    if len(text) > MAX_UNIT_CHARS:
        return None
    text = re.sub(r"\bper\b", "/", text)
    parts: list[str] = []
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or found.end() == place:
            return None
        place = found.end()
        if found["name"]:
            name = found["name"].replace("°", "degree").replace("%", "percent")
            power = re.sub(r"[^0-9+-]", "", found["power"] or "")
            if parts and parts[-1] not in "*/(":
                parts.append("*")
            parts.append(f"{name}**{power}" if power else name)
        else:
            parts.append("1" if found["one"] else "*" if found["sign"] == "·" else found["sign"])
    return " ".join(parts)
