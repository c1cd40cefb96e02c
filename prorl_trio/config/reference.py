"""The reference of node.toml, made from the tables and their docstrings.

`python -m prorl_trio.config.reference > docs/node-toml.md` writes it anew; a test compares.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import inspect as types

from prorl_trio.config.node import NodeConfig
from prorl_trio.config.quantities import YEAR_S

if TYPE_CHECKING:
    from collections.abc import Iterator


HEAD: Final = """\
# node.toml

Every table and field of a node's configuration, as `prorl-trio serve --config node.toml` reads it. Only `model.path`
and a token (`listen.token` or `listen.token_file`) are required. An unknown field or a wrong value is an error that
names it. A field marked *live* changes in a running node at SIGHUP; the others need a restart. A duration is finite:
366 days at most.

This page is made from the code: `python -m prorl_trio.config.reference > docs/node-toml.md`
"""
COLUMNS: Final = "| field | type | default | unit | meaning |\n|---|---|---|---|---|\n"
UNITS: Final = {"_s": "s", "_bytes": "bytes", "_tokens": "tokens", "_model_len": "tokens", "_chars": "characters"}
MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB
_ATTRIBUTE: Final = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", re.MULTILINE)

LIVE: Final = (
    "listen.token",
    "listen.token_file",
    "stages.init_workers",
    "stages.run_workers",
    "stages.eval_workers",
    "stages.init_queue",
    "stages.ready_queue",
    "stages.eval_queue",
    "admission",
    "budgets",
    "agent",
    "monitoring",
    "backends.max_tasks_per_backend",
    "backends.request_timeout_s",
    "backends.slice_tokens",
    "backends.lease_timeout_s",
    "backends.health",
    "backends.load",
    "drain_timeout_s",
    "stuck_after_s",
)
"""Fields, and tables with all their fields, that a running node takes over. Limits apply to what comes next: nothing
that was accepted is dropped, and a worker that is one too many finishes its job."""


def is_live(path: str) -> bool:
    """Return whether `path`, as `backends.health.interval_s`, changes in a running node when the file is read again."""
    return any(path == live or path.startswith(f"{live}.") for live in LIVE)


def make_reference() -> str:
    """Return the page.

    Raises:
        LookupError: a field is not described by the `Attributes` of its table's docstring, or one is that is not there.
    """
    return HEAD + "".join(_section(NodeConfig, ""))


def _section(table: type[msgspec.Struct], path: str) -> Iterator[str]:
    """The section of `table`, and those of the tables in it."""
    about, meanings = _described(table)
    below: list[tuple[type[msgspec.Struct], str]] = []
    rows = []
    info = types.type_info(table)
    assert isinstance(info, types.StructType)
    for field in info.fields:
        place = f"{path}.{field.name}" if path else field.name
        meaning = meanings.pop(field.name, "")
        if isinstance(field.type, types.StructType):
            below.append((field.type.cls, place))
        elif meaning:
            rows.append(_row(field, place, meaning))
        else:
            raise LookupError(f"{table.__name__} does not describe {field.name}")
    if meanings:
        raise LookupError(f"{table.__name__} describes what it does not have: {', '.join(meanings)}")
    yield f"\n## {f'[{path}]' if path else 'Fields outside tables'}\n\n{about}\n\n{COLUMNS}{''.join(rows)}"
    for inner, place in below:
        yield from _section(inner, place)


def _described(table: type[msgspec.Struct]) -> tuple[str, dict[str, str]]:
    """The prose of a table's docstring, and the meanings of its fields."""
    about, _, attributes = inspect.getdoc(table).partition("\nAttributes:\n")  # type: ignore[union-attr]
    meanings: dict[str, str] = {}
    for names, meaning in _ATTRIBUTE.findall(attributes):
        meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in about.split("\n\n")).strip(), meanings


def _row(field: types.Field, place: str, meaning: str) -> str:
    unit = next((unit for suffix, unit in UNITS.items() if field.name.endswith(suffix)), "")
    cells = [f"`{field.name}`", _type(field.type), _default(field, unit), unit, meaning[:1].upper() + meaning[1:]]
    if is_live(place):
        cells[-1] += " *live*"
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


def _type(found: types.Type) -> str:
    match found:
        case types.IntType():
            return f"integer{_bounds(found)}"
        case types.FloatType():
            return f"number{_bounds(found)}"
        case types.BoolType():
            return "boolean"
        case types.StrType():
            return "string"
        case types.LiteralType():
            return ", ".join(f'`"{value}"`' for value in found.values)
        case types.ListType() | types.VarTupleType():
            return f"array of {_type(found.item_type)}s"
        case types.DictType():
            return "table" if isinstance(found.value_type, types.UnionType) else f"table of {_type(found.value_type)}s"
        case types.UnionType():
            return " or ".join(_type(each) for each in found.types if not isinstance(each, types.NoneType))
    raise LookupError(f"there are no words for {found}")


def _bounds(number: types.IntType | types.FloatType) -> str:
    limits = {">": number.gt, "≥": number.ge, "≤": None if number.le == YEAR_S else number.le}
    said = [f"{sign} {_toml(limit)}" for sign, limit in limits.items() if limit is not None]
    return " " + ", ".join(said) if said else ""


def _default(field: types.Field, unit: str) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "none"
    size = ""
    if unit == "bytes" and value:
        size = f" ({value / GIB:g} GiB)" if value >= GIB else f" ({value / MIB:g} MiB)"
    return f"`{_toml(value)}`{size}"


def _toml(value: Any) -> str:
    """Write `value` as in a TOML file."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return f"{value:_.0f}" if value >= 10_000 else f"{value:g}"
        case dict():
            return f"{{ {', '.join(f'{key} = {_toml(inner)}' for key, inner in value.items())} }}" if value else "{}"
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            return f'"{value}"'


if __name__ == "__main__":
    sys.stdout.write(make_reference())
