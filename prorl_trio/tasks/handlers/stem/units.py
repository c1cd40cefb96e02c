# ruff: noqa: RUF001 - unusual signs are the subject of this module
"""Parse units as people write them, and convert them with pint. Gold and answer share one table of spellings.

A text is a unit only if it is completely understood. Pint is imported on first use.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final, NamedTuple

from prorl_trio.tasks.handlers.stem.plain_text import plain

Unit = tuple[tuple[str, float], ...]
"""Pint's names, each with its power, sorted."""
MAX_UNIT_CHARS: Final = 120
MAX_POWER: Final = 12.0
_SPELLINGS: Final = {
    # abbreviations that pint lacks or interprets differently from science
    "gm": "gram", "gms": "gram", "gr.": "gram", "kgs": "kilogram", "kms": "kilometer", "cms": "centimeter",
    "mms": "millimeter", "mls": "milliliter", "lbs": "pound", "hrs": "hour", "secs": "second", "mins": "minute",
    "yrs": "year", "wk": "week", "wks": "week", "mo": "month", "amps": "ampere", "mols": "mole",
    "AU": "astronomical_unit",
    "A.U.": "astronomical_unit", "amu": "unified_atomic_mass_unit", "rev": "turn", "revs": "turn", "revolution": "turn",
    "rps": "turn second^-1", "kph": "kilometer hour^-1", "kmph": "kilometer hour^-1", "kmh": "kilometer hour^-1",
    "mps": "meter second^-1", "fps": "foot second^-1", "Cal": "kilocalorie", "Cals": "kilocalorie",
    "C°": "degree_Celsius",
    "F°": "degree_Fahrenheit", "degs": "degree", "deg": "degree", "°": "degree", "′": "arcminute", "″": "arcsecond",
    "micron": "micrometer", "microns": "micrometer", "henries": "henry", "henrys": "henry", "centuries": "century",
    "micros": "microsecond", "centigrade": "degree_Celsius", "degF": "degree_Fahrenheit", "degC": "degree_Celsius",
    "ftlb": "foot force_pound", "ftlbs": "foot force_pound", "ftlbf": "foot force_pound", "inHg": "inch_Hg",
    "sqm": "meter^2", "sqft": "foot^2", "ccm": "centimeter^3", "cbm": "meter^3", "kcals": "kilocalorie",
    "mcg": "microgram", "kilohm": "kiloohm", "kilohms": "kiloohm", "megohm": "megaohm", "megohms": "megaohm",
     "mcgs": "microgram", "BTUs": "british_thermal_unit", "Btus": "british_thermal_unit",
    "G": "field_gauss", "gauss": "field_gauss", "kG": "kilofield_gauss", "mG": "millifield_gauss",
    "Gauss": "field_gauss", "kilogauss": "kilofield_gauss", "milligauss": "millifield_gauss",
    # dimensionless
    "ppm": "ppm", "ppb": "part_per_billion", "ppt": "part_per_trillion", "pct": "percent", "‰": "permille",
    "unitless": "", "dimensionless": "", "atom": "", "atoms": "", "molecule": "", "molecules": "", "electron": "",
    "electrons": "", "photon": "", "photons": "", "proton": "", "protons": "", "neutron": "", "neutrons": "",
    "particle": "", "particles": "", "ion": "", "ions": "", "nuclei": "", "nucleus": "", "event": "", "events": "",
    "decay": "", "decays": "", "disintegration": "", "disintegrations": "", "cell": "", "cells": "", "fringe": "",
    "fringes": "", "line": "", "lines": "", "wave": "", "waves": "", "bond": "", "bonds": "", "formula_unit": "",
    "formula_units": "",
    # case differs from pint's, where this is unambiguous
    "hz": "hertz", "HZ": "hertz", "khz": "kilohertz", "KHZ": "kilohertz", "Khz": "kilohertz", "ghz": "gigahertz",
    "GHZ": "gigahertz", "thz": "terahertz", "kj": "kilojoule", "KJ": "kilojoule", "kpa": "kilopascal",
    "KPA": "kilopascal", "hpa": "hectopascal", "gpa": "gigapascal", "kw": "kilowatt", "KW": "kilowatt",
    "kwh": "kilowatt hour", "KWH": "kilowatt hour", "KWh": "kilowatt hour", "kWhr": "kilowatt hour",
    "kwhr": "kilowatt hour", "kv": "kilovolt", "ev": "electron_volt", "EV": "electron_volt", "kev": "kiloelectron_volt",
    "KEV": "kiloelectron_volt", "KeV": "kiloelectron_volt", "gev": "gigaelectron_volt", "KG": "kilogram",
    "KM": "kilometer", "CM": "centimeter", "SEC": "second", "Sec": "second", "MIN": "minute", "HR": "hour",
    "Hr": "hour", "Hrs": "hour", "HRS": "hour", "FT": "foot", "Ft": "foot", "LB": "pound", "LBS": "pound",
    "Lbs": "pound",
    "RPM": "revolutions_per_minute", "Rpm": "revolutions_per_minute", "MPH": "mile hour^-1", "Mph": "mile hour^-1",
    "KPH": "kilometer hour^-1", "PSI": "psi", "Psi": "psi", "ATM": "standard_atmosphere", "Atm": "standard_atmosphere",
    "BAR": "bar", "Bar": "bar", "mM": "millimolar", "PPM": "ppm", "PPB": "part_per_billion", "Mol": "mole",
    "MOL": "mole",
    "Rad": "radian", "RAD": "radian", "OHM": "ohm", "MEV": "megaelectron_volt", "DB": "decibel", "db": "decibel",
    "CC": "cubic_centimeter", "Deg": "degree", "DEG": "degree", "Torr": "torr", "Day": "day", "Days": "day",
    "Amp": "ampere", "Amps": "ampere", "Mile": "mile", "Year": "year", "Yr": "year", "Inch": "inch", "Feet": "foot",
}  # fmt: skip
"""A spelling and the factors it stands for. Everything else is a name known to pint, with or without prefix."""
_TEMPERATURES: Final = {
    "c": "degree_Celsius", "f": "degree_Fahrenheit", "k": "kelvin", "r": "degree_Rankine", "celsius": "degree_Celsius",
    "centigrade": "degree_Celsius", "fahrenheit": "degree_Fahrenheit", "kelvin": "kelvin", "kelvins": "kelvin",
    "rankine": "degree_Rankine",
}  # fmt: skip
_TEMPERATURE: Final = re.compile(
    r"(?:°|(?<![A-Za-z])deg(?:rees?|s)?(?![A-Za-z])\.?)[ -]?"
    r"(celsius|centigrade|fahrenheit|kelvins?|rankine|[CFKR](?![A-Za-z]))",
    re.IGNORECASE,
)
_PHRASES: Final = tuple(
    (re.compile(phrase), by)
    for phrase, by in (
        (r"[\[\]]", lambda found: "(" if found[0] == "[" else ")"),
        (r"\b(mm|cm|in)[ .](?:of )?Hg\b", r"\1Hg"),
        (r"\b[Pp]arts? per (million|billion|trillion)\b", lambda found: f"pp{found[1][0]}"),
        (r"\bper cent\b", "percent"),
        (r"\bW/mK\b", "W/(m K)"),  # in a conductivity; millikelvins are written differently
        (r"\b(?:pounds?|lbs?)\s*(?=(?:per|/) ?(?:square inch|sq\.? in|in\^?2))", "force_pound "),
        (r"\b(?:ft|foot|feet)[ ·*-]{1,3}(?:lbs?|pounds?)\b", "foot force_pound"),
        (r"\b(?:lbs?|pounds?)[ ·*-]{1,3}(?:ft|foot|feet)\b", "force_pound foot"),
    )
)
"""Several words or symbols that mean something else than their product."""
_PREFIXES: Final[tuple[str, ...]] = tuple(
    re.findall(
        r"\S+",
        "quetta ronna yotta zetta exa peta tera giga mega kilo hecto deca deka deci centi milli micro nano pico femto "
        "atto zepto yocto kibi mebi gibi tebi pebi Q R Y Z E P T G M k h da d c m µ u n p f a z y Ki Mi Gi Ti Pi",
    )
)
_PREFIX_WORDS: Final = frozenset(prefix for prefix in _PREFIXES if len(prefix) > 2)
_NAME: Final = r"(?:[^\W\d_]|[°%‰′″Å])+(?:_[a-zA-Z]\w*)?"
_TOKEN: Final = re.compile(
    rf"\s*(?:\\?(?P<name>{_NAME})(?P<dot>\.(?=\s|$))?|(?P<root>√)"
    r"|(?P<power>(?:\^|\*\*)\s*(?:\(\s*(?P<r>[+-]?\d+(?:\.\d+)?(?:/\d)?)\s*\)|(?P<p>[+-]?\d+(?:\.\d+)?))|(?<=[^\W\d_])(?P<q>[+-]?\d)(?![\d.]))"
    r"|(?P<sign>[/()]|[*·×])|(?P<join>[-.])(?=[^\W\d_]|√)|(?P<one>1(?=\s*/))|(?P<space>$))"
)
_WORK: Final = re.compile(r"([kMGmµn]?(?:N|J|V|W|A|C|Pa|eV))(m|s|h)")
"""Two symbols that are written together more often than pint's unit of that name (`Nm`, `Js`)."""
_JOINED: Final = re.compile(r"(kg|g|mol|cm|L|[kMGmµn]?(?:N|J|V|W|A|C|Pa|eV))(K|m|s|h|mol|kg)")
_SQUARES: Final = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SQUARED: Final = {"squared": 2, "cubed": 3}
_INVERSE: Final = frozenset({"inverse", "reciprocal"})


class _Factor(NamedTuple):
    unit: dict[str, float]
    joined: bool
    """Only a space or a hyphen precedes it, as between words of one name."""


@cache
def _registry() -> Any:
    import pint  # imported late, because the package is an extra and takes half a second

    registry: Any = pint.UnitRegistry(autoconvert_offset_to_baseunit=True)
    registry.define("field_gauss = 1e-4 * tesla")  # pint uses the Gaussian system, where a tesla has other dimensions
    registry.define("part_per_billion = 1e-9")
    registry.define("part_per_trillion = 1e-12")
    return registry


@cache
def _names() -> tuple[frozenset[str], dict[str, str]]:
    """Return pint's names without prefixes, and its words by their case-folded form."""
    names = frozenset(_registry())
    words: dict[str, set[str]] = {}
    for name in names:
        if len(name) > 2 and name.replace("_", "").isalpha():
            words.setdefault(name.casefold(), set()).add(str(_registry().get_name(name)))
    return names, {word: found.pop() for word, found in words.items() if len(found) == 1}


def _prefixed(name: str) -> str | None:
    """Return pint's full name of a name or symbol, with or without prefix; None if pint does not know it."""
    names, _ = _names()
    if name in names or any(name.startswith(prefix) and name[len(prefix) :] in names for prefix in _PREFIXES):
        return str(_registry().get_name(name))
    return None


def _word(name: str) -> str | None:
    """Return pint's full name of a word in any case, in the singular or plural."""
    _, words = _names()
    for form in _singulars(name.casefold()):
        if form in words:
            return words[form]
        for prefix in _PREFIX_WORDS:
            if form.startswith(prefix) and form[len(prefix) :] in words:
                return prefix + words[form[len(prefix) :]]
    return None


def _singulars(name: str) -> list[str]:
    return [name, *([name[:-1]] if name.endswith("s") else []), *([name[:-2]] if name.endswith("es") else [])]


@cache
def _resolve(name: str) -> tuple[tuple[str, float], ...] | None:
    """Return the factors that a name stands for; None if it is unknown. Symbols are case-sensitive."""
    name = name.replace("µ", "µ")
    if name in _SPELLINGS:
        return _factors_of(_SPELLINGS[name])
    if (product := _product(_WORK, name)) is not None:
        return product
    if (found := _prefixed(name)) is not None:
        return ((found, 1.0),)
    if name[0] == "K" and len(name) > 1 and (found := _prefixed("k" + name[1:])) is not None:
        return ((found, 1.0),)
    if name.casefold() in _SPELLINGS and len(name) > 3:
        return _factors_of(_SPELLINGS[name.casefold()])
    if len(name) > 2 and (found := _word(name)) is not None:
        return ((found, 1.0),)
    return _product(_JOINED, name)


def _product(pattern: re.Pattern[str], name: str) -> tuple[tuple[str, float], ...] | None:
    """Return the two factors in a name without a sign between them."""
    if (found := pattern.fullmatch(name)) is None:
        return None
    factors = [_prefixed(found[1]), _prefixed(found[2])]
    return tuple((factor, 1.0) for factor in factors if factor) if all(factors) else None


def _factors_of(spelling: str) -> tuple[tuple[str, float], ...]:
    parts = [part.partition("^") for part in spelling.split()]
    return tuple((name, float(power or 1)) for name, _, power in parts)


_GLUED: Final = re.compile(
    r"(?<![A-Za-zµ])(?!mm)(k?J|k?W|V|k?N|m|k?g|mol|rad|C|A|k?Pa)(mol|[cdk]?m|k?g|s|K|L|C)(?=\^\(?-)"
)
"""Two adjacent units, of which the second has a negative power."""


def read_unit(text: str) -> list[Unit]:
    """Return the units that a text may mean, most likely first; empty if it is not completely understood.

    Parses words (`meters per second squared`), symbols, LaTeX, siunitx, powers, products and quotients. In `J/mol·K`
    the K is in the denominator by convention, but not by arithmetic: both units are returned. The same applies to
    `ms^-1`, which may be m/s. Empty text is the unit `()`.
    """
    text = plain(text)
    if len(text) > MAX_UNIT_CHARS:
        return []
    text = _TEMPERATURE.sub(lambda found: f" {_TEMPERATURES[found[1].casefold()]}", text)
    for phrase, by in _PHRASES:
        text = phrase.sub(by, text)
    found: list[Unit] = []
    for form, by_custom in ((text, True), (text, False), (_GLUED.sub(r"\1 \2", text), True)):
        unit = _Reader(form, by_custom=by_custom).whole()
        if unit is not None and (normal := _normal(unit)) not in found:
            found.append(normal)
    return found


def _normal(unit: dict[str, float]) -> Unit:
    return tuple(sorted((name, power) for name, power in unit.items() if power))


class _Reader:
    """A parser of one unit that must consume the whole text."""

    def __init__(self, text: str, *, by_custom: bool) -> None:
        self._by_custom = by_custom
        self._tokens: list[tuple[str, str]] = []
        self._at = 0
        self._is_whole = self._tokenise(text)

    def _tokenise(self, text: str) -> bool:
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None or found.end() == place:
                return False
            if found["name"]:
                name = found["name"]
                self._tokens.append(("sign", "/") if name.casefold() == "per" else ("name", name))
            elif found["power"]:
                self._tokens.append(("power", found["p"] or found["q"] or found["r"]))
            else:
                kind = next((k for k in ("root", "sign", "join", "one") if found[k]), "")
                if kind:
                    self._tokens.append((kind, found[kind]))
            place = found.end()
        return True

    def whole(self) -> dict[str, float] | None:
        if not self._is_whole:
            return None
        try:
            unit = self._product(0)
        except ValueError:
            return None
        return unit if self._at == len(self._tokens) else None

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _product(self, depth: int) -> dict[str, float]:
        """Parse factors up to a closing bracket or the end. Raises ValueError for anything else."""
        unit: dict[str, float] = {}
        sign, dangling, count = 1.0, False, 0
        while True:
            kind, value = self._peek()
            if kind == "end" or (kind, value) == ("sign", ")"):
                if dangling:
                    raise ValueError("it ends with a sign")
                return unit
            if kind == "one" or (kind in ("sign", "join") and value != "("):
                if dangling or (kind != "one" and value != "/" and not count):
                    raise ValueError("two signs")
                self._at += 1
                if kind == "one":
                    count += 1
                    continue
                dangling = True
                if value == "/":
                    sign = -1.0
                elif not self._by_custom:
                    sign = 1.0
                continue
            if not dangling and not self._by_custom:
                sign = 1.0
            for name, power in self._factor(depth).items():
                unit[name] = unit.get(name, 0.0) + sign * power
            dangling, count = False, count + 1

    def _factor(self, depth: int) -> dict[str, float]:
        kind, value = self._peek()
        self._at += 1
        if kind == "root":
            return {name: power / 2 for name, power in self._factor(depth).items()}
        if (kind, value) == ("sign", "("):
            if depth > 5:
                raise ValueError("too deep")
            unit = self._product(depth + 1)
            if self._peek() != ("sign", ")"):
                raise ValueError("a bracket is open")
            self._at += 1
        elif kind == "name":
            word = value.casefold()
            if word in _INVERSE:
                return {name: -power for name, power in self._factor(depth).items()}
            if word in _SQUARES and self._peek()[0] == "name":
                return {name: power * _SQUARES[word] for name, power in self._factor(depth).items()}
            unit = self._name(value)
        else:
            raise ValueError(f"no unit begins with {value!r}")
        return self._raised(unit)

    def _raised(self, unit: dict[str, float]) -> dict[str, float]:
        kind, value = self._peek()
        power = 1.0
        if kind == "power":
            above, _, below = value.partition("/")
            power = float(above) / float(below or 1) if float(below or 1) else MAX_POWER + 1
            self._at += 1
        elif kind == "name" and value.casefold() in _SQUARED:
            power = _SQUARED[value.casefold()]
            self._at += 1
        if abs(power) > MAX_POWER:
            raise ValueError("a power that no unit has")
        return {name: each * power for name, each in unit.items()}

    def _name(self, first: str) -> dict[str, float]:
        """Parse a name of several words (`light years`), or else of one."""
        words, ends = [first], [self._at]
        at = self._at
        while len(words) < 4:
            if at < len(self._tokens) and self._tokens[at] == ("join", "-"):
                at += 1
            if at >= len(self._tokens) or self._tokens[at][0] != "name":
                break
            words.append(self._tokens[at][1])
            at += 1
            ends.append(at)
        for count in range(len(words), 1, -1):
            if all(len(word) > 1 for word in words[:count]):
                found = _compound(words[:count])
                if found is not None:
                    self._at = ends[count - 1]
                    return found
        single = _resolve(first)
        if single is None:
            raise ValueError(f"no unit {first!r}")
        return dict(single)


def _compound(words: list[str]) -> dict[str, float] | None:
    """Return the unit formed by several words: `electron volts`, `kilo gram`, `pounds force`."""
    if len(words) == 2 and words[0].casefold() in _PREFIX_WORDS | {"µ"}:
        joined = words[0].casefold() + words[1]
        found = _prefixed(joined) or _word(joined)
        return None if found is None else {found: 1.0}
    names, folded = _names()
    for form in _singulars("_".join(words)):
        if form in names:
            return {str(_registry().get_name(form)): 1.0}
        if form in _SPELLINGS:
            return dict(_factors_of(_SPELLINGS[form]))
        if form.casefold() in folded:
            return {folded[form.casefold()]: 1.0}
    folded_words = [word.casefold().removesuffix("s") for word in words]
    for form in ("_".join(folded_words), "_".join(reversed(folded_words))):
        if form in folded:
            return {folded[form]: 1.0}
    if folded_words == ["atomic", "mas", "unit"]:
        return {"unified_atomic_mass_unit": 1.0}
    return None


@cache
def _pint_unit(unit: Unit) -> Any:
    """Return pint's unit. A temperature among other factors is a temperature difference."""
    registry = _registry()
    powers = dict(unit)
    if len(powers) > 1 or any(power != 1 for power in powers.values()):
        powers = {
            f"delta_{name}" if name in ("degree_Celsius", "degree_Fahrenheit") else name: power
            for name, power in powers.items()
        }
    return registry.Unit(registry.UnitsContainer(powers))


def have_same_dimension(first: Unit, second: Unit) -> bool:
    """Return whether one can be converted into the other."""
    return bool(_pint_unit(first).dimensionality == _pint_unit(second).dimensionality)


def convert(value: float, unit: Unit, wanted: Unit) -> float | None:
    """Return a quantity in the unit `wanted`; None if it has another dimension or overflows a float."""
    if unit == wanted:
        return value
    unit, wanted = _cycles(unit, wanted), _cycles(wanted, unit)
    try:
        if not have_same_dimension(unit, wanted):
            return None
        found = float(_registry().Quantity(value, _pint_unit(unit)).to(_pint_unit(wanted)).magnitude)
    except (ArithmeticError, ValueError, TypeError):
        return None
    return found if abs(found) < float("inf") else None


_ANGLES: Final = frozenset({"turn", "radian", "degree", "revolutions_per_minute"})


def _cycles(unit: Unit, other: Unit) -> Unit:
    """Return `unit` with hertz as turns per second if `other` counts angles, because pint equates both."""
    if not any(name in _ANGLES for name, _ in other) or not any(name.endswith("hertz") for name, _ in unit):
        return unit
    powers: dict[str, float] = {}
    for name, power in unit:
        if name.endswith("hertz"):
            powers[name.replace("hertz", "turn")] = power
            powers["second"] = powers.get("second", 0.0) - power
        else:
            powers[name] = powers.get(name, 0.0) + power
    return _normal(powers)
