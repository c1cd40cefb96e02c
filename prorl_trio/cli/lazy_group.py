"""A click group that imports a command only to run it. The group's help and errors import none."""

from __future__ import annotations

import ast
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.abc import InspectLoader


class LazyGroup(click.Group):
    """A group of the commands in `modules` and of the commands that other packages declare as entry points.

    Args:
        modules: `package.module:function` by the name of the command.
        plugins: the entry-point group. Plugins cannot override a name in `modules`.
    """

    def __init__(self, name: str | None = None, *, modules: Mapping[str, str], plugins: str, **options: Any) -> None:
        # click suggests corrections for mistyped names from `commands`; these placeholders provide the names.
        super().__init__(name, {each: click.Command(each) for each in modules}, **options)
        self._own = {each: EntryPoint(each, target, plugins) for each, target in modules.items()}
        self._plugins = plugins

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._entries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._own.get(cmd_name) or self._entries().get(cmd_name)
        if entry is None:
            return None
        try:
            command: click.Command = entry.load()
        except (ImportError, AttributeError) as exc:
            raise click.ClickException(f"the command {cmd_name!r} ({entry.value}) cannot be loaded: {exc}") from exc
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        described = {name: click.Command(name, help=_docstring(entry)) for name, entry in self._entries().items()}
        click.Group(commands=described).format_commands(ctx, formatter)

    def _entries(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self._plugins)} | self._own


def _docstring(entry: EntryPoint) -> str:
    """Return a command's docstring from its source. An import would load everything that the command uses."""
    source = None
    with suppress(ImportError):
        spec = find_spec(entry.module)
        loader: InspectLoader | None = None if spec is None else spec.loader  # type: ignore[assignment]
        source = None if loader is None else loader.get_source(entry.module)
    for statement in ast.parse(source or "").body:
        if isinstance(statement, ast.FunctionDef) and statement.name == entry.attr:
            return ast.get_docstring(statement) or ""
    return ""
