# ruff: noqa: RUF001, RUF002 - unusual signs are the subject of this module
"""Convert LaTeX, markdown and Unicode to plain text, so that texts that look the same are equal. Pure, in linear time.

Gold answers, units, choices and the policy's answers all pass through `plain`.
"""

from __future__ import annotations

import re
from typing import Final

MAX_DEPTH: Final = 30
"""Nested groups beyond this depth are left unchanged."""
LOOK_ALIKES: Final = str.maketrans({
    **dict.fromkeys("−﹣－‐‑", "-"), **dict.fromkeys("–—―", "–"), **dict.fromkeys("⋅∙•‧", "·"), "∗": "*",
    **dict.fromkeys("∕⁄", "/"), **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u202f\u205f\u3000", " "), **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u200e\u200f", ""),
    "μ": "µ", "Ω": "Ω", "Å": "Å", "º": "°", "˚": "°", "℃": "°C", "℉": "°F", "ℓ": "ℓ", "ϕ": "φ", "ϵ": "ε", "ϑ": "θ",
    **dict.fromkeys("“”„«»", '"'), **dict.fromkeys("‘’‚", "'"), "″": "″", "≃": "≈", "≅": "≈", "∼": "≈", "＜": "<",
    "¼": " 1/4", "½": " 1/2", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "⅛": " 1/8", "⅜": " 3/8", "⅝": " 5/8",
    "⅞": " 7/8", "⅕": " 1/5", "⅖": " 2/5", "⅗": " 3/5", "⅘": " 4/5", "⅙": " 1/6", "⅚": " 5/6", "…": "...",
    "（": "(", "）": ")", "［": "[", "］": "]", "：": ":", "∶": ":", "，": ",", "。": ".", "；": ";", "％": "%",
    "＝": "=", "￥": "¥",
    **{chr(0xFF21 + n): chr(0x41 + n) for n in range(26)}, **{chr(0xFF41 + n): chr(0x61 + n) for n in range(26)},
    **{chr(0xFF10 + n): chr(0x30 + n) for n in range(10)},
})  # fmt: skip
"""Signs that look alike; also used by the parser of formulas."""
_RAISED: Final = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ"
_LOWERED: Final = "₀₁₂₃₄₅₆₇₈₉₋₊ₙ"
_LEVEL: Final = str.maketrans(_RAISED + _LOWERED, "0123456789-+n" * 2)
_LATEX: Final = ("\\", "$", "^{", "_{", "{,}")
"""Signs of LaTeX. Without them braces are literal: `{1, 2}` is a set."""
_TIE: Final = re.compile(r"(?<=[\w})])~(?=[\w\\{(])|(?<=\{)~(?=[A-Za-z\\])")
_SMALL: Final = re.compile(f"[{_RAISED}]+|[{_LOWERED}]+")
_MARKDOWN: Final = re.compile(
    r"""(?:(?<![^\s(\["':.])|(?<=</)|(?<=<))(\*\*\*|\*\*|``?|\*)(?=[^\s*`])([^*`\n]{0,300}?[^\s*`])\1(?=[\s.,;:!?)\]"']|$)"""
)
GREEK: Final = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "varepsilon": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "vartheta": "θ", "iota": "ι", "kappa": "κ", "lambda": "λ", "mu": "µ", "nu": "ν", "xi": "ξ", "pi": "π",
    "rho": "ρ", "varrho": "ρ", "sigma": "σ", "tau": "τ", "upsilon": "υ", "phi": "φ", "varphi": "φ", "chi": "χ",
    "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Xi": "Ξ", "Pi": "Π",
    "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω",
}  # fmt: skip
_SYMBOLS: Final = {
    **GREEK,
    "times": "×", "cdot": "·", "div": "÷", "pm": "±", "mp": "∓", "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥",
    "geq": "≥", "geqslant": "≥", "ne": "≠", "neq": "≠", "lt": "<", "gt": ">", "approx": "≈", "sim": "≈", "simeq": "≈",
    "cong": "≈", "infty": "∞", "cup": "∪", "cap": "∩", "in": "∈", "notin": "∉", "subset": "⊂", "subseteq": "⊆",
    "emptyset": "∅", "varnothing": "∅", "to": "→", "rightarrow": "→", "longrightarrow": "→", "leftarrow": "←",
    "Rightarrow": "⇒", "implies": "⇒", "leftrightarrow": "↔", "rightleftharpoons": "⇌", "partial": "∂", "nabla": "∇",
    "int": "∫", "sum": "∑", "prod": "∏", "forall": "∀", "exists": "∃", "neg": "¬", "lnot": "¬", "land": "∧",
    "wedge": "∧", "lor": "∨", "vee": "∨", "circ": "°", "degree": "°", "prime": "′", "ldots": "...", "dots": "...",
    "cdots": "...", "ell": "ℓ", "hbar": "ħ", "AA": "Å", "angstrom": "Å", "ohm": "Ω", "degreeCelsius": "°C",
    "celsius": "°C", "textmu": "µ", "textdegree": "°", "textohm": "Ω", "percent": "%", "langle": "⟨", "rangle": "⟩",
    "lbrace": "{", "rbrace": "}", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|",
}  # fmt: skip
_DROPPED: Final = frozenset({
    "left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "displaystyle", "textstyle",
    "limits", "text", "textbf", "textit", "textrm", "textsf", "textnormal", "textup", "mathrm", "mathbf", "mathit",
    "mathsf", "mathnormal", "operatorname", "mbox", "hbox", "rm", "bf", "it", "sf", "boldsymbol", "bm", "emph",
    "ensuremath", "unit", "si", "num", "ce", "boxed", "fbox",
})  # fmt: skip
_SPACES: Final = frozenset({"quad", "qquad", "thinspace", "enspace", "space", "nobreakspace"})
_FRACTIONS: Final = frozenset({"frac", "dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"})
_ESCAPED: Final = {",": " ", ";": " ", ":": " ", " ": " ", "!": "", "(": "", ")": "", "[": "", "]": "", "\\": " "}
_TOKEN: Final = re.compile(r"\\([A-Za-z]+)\*?[ \t]?|\\(.)|([{}^_])|([^\\{}^_]+)|(.)", re.DOTALL)
_SIMPLE: Final = re.compile(r"[+-]?(?:\d+(?:\.\d+)?|[^\W\d_])")


def plain(text: str) -> str:
    """Return `text` as plain text, without display markup. Raises nothing.

    `\\text{...}`, dollar signs in pairs, spacing and markdown's emphasis are removed. Commands with a sign of their own
    become that sign (`\\times` is `×`, `\\mu` is `µ`), fractions become `a/b`, roots `√(a)`. Superscripts and
    subscripts become `^a`, `^(ab)`, `_a`, `_(ab)`, whether in LaTeX or Unicode. Unknown commands are left unchanged.
    """
    text = text.translate(LOOK_ALIKES)
    text = _SMALL.sub(_small, text)
    text = _TIE.sub(" ", text)
    if any(sign in text for sign in _LATEX):
        text = text.replace("\\$", "\ue000")
        if text.count("$") % 2 == 0:
            text = text.replace("$", "\ue001")  # invisible, but still ends a command before it
        text = _Translator(text).whole()
        text = text.replace("\ue001", "").replace("\ue000", "$")
    if "*" in text or "`" in text:
        for _ in range(3):
            text = _MARKDOWN.sub(r"\2", text)
    return " ".join(text.split())


def _small(found: re.Match[str]) -> str:
    run = found[0].translate(_LEVEL)
    mark = "^" if found[0][0] in _RAISED else "_"
    return f"{mark}{run}" if len(run) == 1 else f"{mark}({run})"


class _Translator:
    """A one-pass translator over the tokens of a text with LaTeX."""

    def __init__(self, text: str) -> None:
        self._tokens = [found.groups() for found in _TOKEN.finditer(text)]
        self._text = text
        self._at = 0

    def whole(self) -> str:
        parts: list[str] = []
        while self._at < len(self._tokens):
            parts.append(self._until_close(0))
            if self._at < len(self._tokens):  # an unmatched closing brace
                parts.append("}")
                self._at += 1
        return "".join(parts)

    def _until_close(self, depth: int) -> str:
        parts: list[str] = []
        while self._at < len(self._tokens) and self._tokens[self._at][2] != "}":
            parts.append(self._next(depth, parts))
        return "".join(parts)

    def _next(self, depth: int, before: list[str]) -> str:
        command, escaped, mark, run, other = self._tokens[self._at]
        self._at += 1
        if depth > MAX_DEPTH and run is None:
            return f"\\{command} " if command else str(mark or other or f"\\{escaped}")
        if run is not None or other is not None:
            return str(run or other)
        if escaped is not None:
            return _ESCAPED.get(escaped, escaped)
        if mark == "{":
            return self._group(depth)
        if mark is not None:
            return self._moved(mark, depth)
        assert command is not None
        if command in _FRACTIONS:
            return self._fraction(depth, before)
        if command == "sqrt":
            return self._root(depth)
        if command in ("SI", "qty"):
            return f"{self._argument(depth)} {self._argument(depth)}"
        if command in _SPACES:
            return " "
        if command in ("mathring", "r"):
            ringed = self._argument(depth)
            return "Å" if ringed == "A" else f"\\{command} {ringed}"
        if command == "ang":
            return self._argument(depth) + "°"
        if command in _DROPPED:
            return ""
        sign = _SYMBOLS.get(command)
        return f"\\{command} " if sign is None else sign

    def _group(self, depth: int) -> str:
        """Return the content of the group that was just opened; unchanged if it is nested too deep or unclosed."""
        content = self._until_close(depth + 1)
        if self._at < len(self._tokens):
            self._at += 1
            return content
        return "{" + content

    def _argument(self, depth: int) -> str:
        """Return the next group, command or character; empty at the end."""
        while self._at < len(self._tokens):
            command, run = self._tokens[self._at][0], self._tokens[self._at][3]
            if run is None and command not in _DROPPED:
                break
            if run is None:
                self._at += 1
                continue
            rest = run.lstrip()
            if rest:
                self._tokens[self._at] = (None, None, None, rest[1:], None)
                if not rest[1:]:
                    self._at += 1
                return rest[0]
            self._at += 1
        if self._at >= len(self._tokens) or self._tokens[self._at][2] == "}":
            return ""
        return self._next(depth + 1, [])

    def _moved(self, mark: str, depth: int) -> str:
        content = self._argument(depth).strip()
        if content in ("°", "′"):
            return content
        return mark + content if len(content) <= 1 else f"{mark}({content})"

    def _fraction(self, depth: int, before: list[str]) -> str:
        above, below = self._argument(depth).strip(), self._argument(depth).strip()
        simple = _SIMPLE.fullmatch(above) and _SIMPLE.fullmatch(below)
        fraction = f"{above}/{below}" if simple else f"({above})/({below})"
        previous = before[-1] if before else ""
        if simple and above.isdigit() and below.isdigit() and previous[-1:].isdigit():
            return f" {fraction}"  # a mixed number
        run = self._tokens[self._at][3] if self._at < len(self._tokens) else " "
        alone = (not previous or not previous[-1].isalnum()) and (run is not None and not (run[:1].isalnum()))
        return fraction if alone and simple else f"({fraction})"

    def _root(self, depth: int) -> str:
        degree = ""
        run = self._tokens[self._at][3] if self._at < len(self._tokens) else None
        if run is not None and (found := re.match(r"\[(\d)\]", run)):
            degree = found[1]
            self._tokens[self._at] = (None, None, None, run[3:], None)
        content = self._argument(depth).strip()
        return f"({content})^(1/{degree})" if degree else f"√({content})"
