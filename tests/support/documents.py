"""Write the tables of docs/node-toml.md and ipc/PROTOCOL.md from the structs and their docstrings: `make docs`.

A table stands between `<!-- KIND MODULE NAME ... -->` and `<!-- end -->`. The meanings of fields are those of the
`Attributes` in the docstring of their struct, those of a closed set the comments behind its values.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import inspect as types

from prorl_trio.config.node import is_live
from prorl_trio.config.quantities import YEAR_S
from prorl_trio.edges.operations import TABLE

if TYPE_CHECKING:
    from types import ModuleType

ROOT: Final = Path(__file__).parents[2]
DOCUMENTS: Final = ("docs/node-toml.md", "ipc/PROTOCOL.md")
MARKED: Final = re.compile(r"(<!-- ([a-z]+) ([\w.]+)((?: \w+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
UNITS: Final = {"_s": "s", "_bytes": "bytes", "_tokens": "tokens", "_model_len": "tokens", "_chars": "characters"}
SIZES: Final = {"GiB": 1024**3, "MiB": 1024**2, "KiB": 1024}
MAX_VALUES_IN_A_TYPE: Final = 5
"""Longer closed sets have a table of their own."""
MAX_DEFAULT_CHARS: Final = 60
"""What a longer default is, the meaning says."""
_ATTRIBUTE: Final = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def written(text: str) -> str:
    """Return a document with its tables written anew.

    Raises:
        LookupError: a field or value has no words, or the words are about one that is not there.
    """

    def table(found: re.Match[str]) -> str:
        return found[1] + KINDS[found[2]](import_module(found[3]), *found[4].split()) + found[5]

    return MARKED.sub(table, text)


def described(struct: type[msgspec.Struct]) -> tuple[str, dict[str, str]]:
    """Return the prose of a struct's docstring, and the meanings of its fields."""
    about, _, attributes = inspect.getdoc(struct).partition("\nAttributes:\n")  # type: ignore[union-attr]
    meanings: dict[str, str] = {}
    for names, meaning in _ATTRIBUTE.findall(attributes.partition("\n\n")[0]):
        meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    gone = meanings.keys() - {*struct.__struct_encode_fields__}
    if gone:
        raise LookupError(f"{struct.__name__} describes what it does not have: {', '.join(gone)}")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in about.strip().split("\n\n")), meanings


def _table(heads: str, rows: list[list[str]]) -> str:
    lines = [heads.split(", "), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    head, *body = (f"| {' | '.join(line)} |\n" for line in lines)
    return f"{head}|{'---|' * len(rows[0])}\n{''.join(body)}"


def _fields_of(struct: type[msgspec.Struct]) -> tuple[types.Field, ...]:
    return types.type_info(struct).fields  # type: ignore[attr-defined,no-any-return]


def _value(field: types.Field) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


# ---------------------------------------------------------------- the wire


def _fields(module: ModuleType, name: str) -> str:
    """Each field of a struct, with its type, default and meaning."""
    struct = getattr(module, name)
    _, meanings = described(struct)
    rows = [[f"`{each.encode_name}`", _type(each), meanings.get(each.encode_name, "")] for each in _fields_of(struct)]
    return _nil(_table("field, type, meaning", rows))


def _frames(module: ModuleType, *names: str) -> str:
    """Several structs, each with its fields and the first paragraph of its docstring."""
    structs = [getattr(module, name) for name in names]
    rows = [[f"`{each.__name__}`", _signature(each), described(each)[0].split("\n")[0]] for each in structs]
    return _nil(_table("struct, fields, meaning", rows))


def _values(module: ModuleType, name: str) -> str:
    """A closed set, with the comment behind each value."""
    literal = re.search(rf"^{name} = Literal\[\n(.*?)^\]", inspect.getsource(module), re.MULTILINE | re.DOTALL)
    if literal is None or any('"' in line and "  # " not in line for line in literal[1].splitlines()):
        raise LookupError(f"{name} needs a line with a comment for each value")
    values = re.findall(r'"(\w+)",  # (.*)', literal[1])
    return _table("value, meaning", [[f"`{value}`", meaning] for value, meaning in values])


def _operations(_: ModuleType) -> str:
    """What may be asked of a node."""
    rows = []
    for operation in TABLE:
        asked = operation.request
        takes = f"`{asked.__name__}`: {_signature(asked) or 'none'}"
        rest = f"`{operation.method} {operation.path}`"
        rows.append([f"`{asked.operation}`", takes, f"`{asked.answer.__name__}`", rest])
    return _nil(_table("operation, `arguments`, `answer`, REST", rows))


def _signature(struct: type[msgspec.Struct]) -> str:
    return ", ".join(f"`{field.encode_name}` {_type(field)}" for field in _fields_of(struct))


def _type(field: types.Field) -> str:
    value = _value(field)
    if value is msgspec.NODEFAULT:
        return _words(field.type)
    if isinstance(value, msgspec.Raw):
        value = msgspec.msgpack.decode(value)
    elif isinstance(value, bytes | msgspec.Struct):
        value = value.decode() if isinstance(value, bytes) else {}
    default = "None" if value is None else json.dumps(value)
    return f"{_words(field.type)} = {default if len(default) <= MAX_DEFAULT_CHARS else '...'}"


def _words(shape: types.Type) -> str:
    """A type in terms of msgpack."""
    match shape:
        case types.UnionType(types=members):
            return " or ".join(map(_words, members))
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            return f"list of {_words(item)}"
        case types.DictType(value_type=types.AnyType()):
            return "map"
        case types.DictType(key_type=key, value_type=value):
            return f"map of {_words(key)} to {_words(value)}"
        case types.StructType(cls=struct):
            return f"`{struct.__name__}`"
        case types.LiteralType(values=values) if len(values) <= MAX_VALUES_IN_A_TYPE:
            return f"str ({', '.join(f'`{value}`' for value in values)})"
    plain = {types.LiteralType: "str", types.MemoryViewType: "bytes", types.NoneType: "nil"}
    return plain.get(type(shape), type(shape).__name__.removesuffix("Type").lower())


def _nil(table: str) -> str:
    """Write msgpack's names of values instead of Python's."""
    names = {"None": "nil", "True": "true", "False": "false"}
    return re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], table)


# ---------------------------------------------------------------- node.toml


def _settings(module: ModuleType, name: str) -> str:
    """Each table of the configuration, with its fields."""
    return _section(getattr(module, name), "")


def _section(table: type[msgspec.Struct], path: str) -> str:
    about, meanings = described(table)
    rows, below = [], []
    for field in _fields_of(table):
        place = f"{path}.{field.name}" if path else field.name
        if isinstance(field.type, types.StructType):
            below.append((field.type.cls, place))
        elif isinstance(field.type, types.DictType) and isinstance(field.type.value_type, types.StructType):
            below.append((field.type.value_type.cls, f"{place}.NAME"))
        elif field.name not in meanings:
            raise LookupError(f"{table.__name__} does not describe {field.name}")
        else:
            rows.append(_setting(field, meanings[field.name] + (" *live*" if is_live(place) else "")))
    heading = f"[{path}]" if path else "Fields outside tables"
    text = f"\n## {heading}\n\n{about}\n\n{_table('field, type, default, unit, meaning', rows)}"
    return text + "".join(_section(*each) for each in below)


def _setting(field: types.Field, meaning: str) -> list[str]:
    unit = next((unit for suffix, unit in UNITS.items() if field.name.endswith(suffix)), "")
    return [f"`{field.name}`", _toml_type(field.type), _default(field, unit), unit, meaning[:1].upper() + meaning[1:]]


def _toml_type(found: types.Type) -> str:
    match found:
        case types.IntType() | types.FloatType():
            return ("integer" if isinstance(found, types.IntType) else "number") + _bounds(found)
        case types.BoolType() | types.StrType():
            return "boolean" if isinstance(found, types.BoolType) else "string"
        case types.LiteralType():
            return ", ".join(f'`"{value}"`' for value in found.values)
        case types.ListType() | types.VarTupleType():
            return f"array of {_plural(found.item_type)}"
        case types.DictType():
            return "table" if isinstance(found.value_type, types.UnionType) else f"table of {_plural(found.value_type)}"
        case types.UnionType():
            return " or ".join(_toml_type(each) for each in found.types if not isinstance(each, types.NoneType))
    raise LookupError(f"there are no words for {found}")


def _plural(found: types.Type) -> str:
    return re.sub(r"^\w+", r"\g<0>s", _toml_type(found))


def _bounds(number: types.IntType | types.FloatType) -> str:
    limits = {">": number.gt, "≥": number.ge, "≤": None if number.le == YEAR_S else number.le}
    return ",".join(f" {sign} {_toml(limit)}" for sign, limit in limits.items() if limit is not None)


def _default(field: types.Field, unit: str) -> str:
    value = _value(field)
    if field.required or value is None:
        return "required" if field.required else "none"
    sizes = [f" ({value / size:g} {name})" for name, size in SIZES.items() if unit == "bytes" and value >= size]
    return f"`{_toml(value)}`{sizes[0] if sizes else ''}"


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


KINDS: Final = {kind.__name__[1:]: kind for kind in (_fields, _frames, _values, _operations, _settings)}

if __name__ == "__main__":
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(written(path.read_text()))
