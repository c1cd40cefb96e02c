"""The only output path to a terminal. It escapes control codes in untrusted text such as ids or a policy's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec
import rich.console
from rich.segment import Segment
from rich.text import Text

from prorl_ipc.portable_text import printable, printable_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType


class Console(rich.console.Console):
    """A rich console that prints only `printable` text, whatever its input. Its own styles remain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object into segments with printable text."""
        for segment in super().render(renderable, options):
            if segment.control or (segment.text.isascii() and segment.text.isprintable()):
                yield segment
            else:
                yield Segment(printable(segment.text, keep="\n"), segment.style)


def one_line(text: object) -> Text:
    """Return `text`, made printable, as one line: newlines and tabs are escaped, too. Markup stays literal."""
    return Text(printable(str(text), keep=""))


def say(text: object, *, err: bool = False, color: str | None = None) -> None:
    """Print a line, made printable, to standard output or standard error."""
    click.secho(printable(str(text)), err=err, fg=color)


def say_json(value: Any) -> None:
    """Print `value` as indented JSON, with unprintable characters escaped."""
    encoded = value if isinstance(value, bytes) else msgspec.json.format(msgspec.json.encode(value), indent=2)
    click.echo(printable_json(encoded.decode()))
