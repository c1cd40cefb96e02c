"""Jinja as chat templates expect it: what `transformers` gives them, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.parser import Parser

TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError
)  # fmt: skip
"""Exceptions that rendering may raise through a fault of the template or of the messages."""


class _GenerationTag(Extension):
    """`{% generation %}..{% endgeneration %}` marks what a model said; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return a new environment; templates compiled in it may be rendered in several threads.

    It has nothing that draws lots, as there would be no telling what a template that does so writes.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def template_literals(source: str) -> set[str | int]:
    """Return the strings and whole numbers that expressions in `source` contain: what it may compare messages with."""
    constants = template_environment().parse(source).find_all(nodes.Const)
    return {each.value for each in constants if type(each.value) in (str, int)}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
