"""The one way to a terminal: text from others, such as ids or a policy's output, cannot send it control codes."""

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
    """A console of rich's that prints only what is `printable`, whatever it is given; styles are its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object into segments, of which the text is printable."""
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
    """Print `value` as indented JSON; what a terminal would not show is escaped in it."""
    encoded = value if isinstance(value, bytes) else msgspec.json.format(msgspec.json.encode(value), indent=2)
    click.echo(printable_json(encoded.decode()))
