"""The `prorl-trio` command. Each subcommand is a module that is imported when the subcommand runs.

Other packages add commands through the entry-point group `prorl_trio.commands`.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

import click

from prorl_ipc.portable_text import printable
from prorl_trio.cli.exit_codes import EXIT_INTERNAL, EXIT_INTERRUPTED
from prorl_trio.cli.lazy_group import LazyGroup
from prorl_trio.observe.logs import LOG_FORMATS, open_logging
from prorl_trio.types.errors import ConfigError, InternalError, ProrlError

if TYPE_CHECKING:
    from types import TracebackType

    from prorl_trio.observe.logs import LogFormat

__all__ = ["main"]

COMMANDS: Final = (
    "backends",
    "cancel",
    "eval",
    "fleet",
    "regrade",
    "run",
    "serve",
    "show",
    "simulate",
    "status",
    "submit",
    "top",
    "view",
)
"""Each command is the function of the same name in the module of the same name."""
PLUGINS: Final = "prorl_trio.commands"
STDERR: Final = 2
ASKING: Final = ("backends", "eval", "regrade", "run", "submit", "status", "top", "cancel", "show", "view")
"""Commands that report errors themselves. They log only warnings by default, so reconnects are not shown."""


class _Commands(LazyGroup):
    """The commands. A `ProrlError` or an unusable file is reported in one line instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._invoke(ctx)
        except* ProrlError as group:
            from prorl_ipc.nursery import (
                leaves,  # this needs trio: the failed command has already loaded it, `--help` has not
            )

            errors = leaves(group)
            code = EXIT_INTERNAL if any(isinstance(error, InternalError) for error in errors) else 1
            if code == EXIT_INTERNAL:
                logging.getLogger(__name__).error("a bug of ours", exc_info=group)
            for handler in logging.getLogger().handlers:
                handler.flush()  # print the reason for the exit last
            for error in errors:
                click.secho(printable(f"error: {error}"), fg="red", err=True)
        except* KeyboardInterrupt:
            click.secho("interrupted", fg="yellow", err=True)
            code = EXIT_INTERRUPTED
        ctx.exit(code)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as exc:
            raise click.UsageError(printable(exc.format_message()), ctx=exc.ctx) from exc
        except click.ClickException as exc:
            raise click.ClickException(printable(exc.message)) from exc
        except OSError as exc:
            if exc.filename is None:
                raise
            raise ConfigError(f"{exc.filename}: {exc.strerror}") from exc


def _open_standard_streams() -> None:
    """Open standard input, output and error if they are closed, so that no other file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - Python has None for one that was closed
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected exception. Control codes are escaped, because its message may quote untrusted text."""
    del kind
    sys.stderr.write(printable("".join(traceback.format_exception(error.with_traceback(trace)))))


@click.group(
    cls=_Commands,
    modules={name: f"prorl_trio.cli.{name}:{name}" for name in COMMANDS},
    plugins=PLUGINS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="prorl-trio")
@click.option("-v", "--verbose", is_flag=True, help="Log everything. The same as --log-level debug.")
@click.option(
    "--log-level",
    envvar="PRORL_LOG_LEVEL",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="What to log, on standard error; or PRORL_LOG_LEVEL. Default: info; warning for backends, eval, regrade, run, "
    "submit, status, top, cancel, show and view.",
)
@click.option(
    "--log-format",
    envvar="PRORL_LOG_FORMAT",
    type=click.Choice(LOG_FORMATS),
    default="auto",
    show_default=True,
    help="`json` writes one object per line; `auto` writes colours on a terminal and text "
    "elsewhere; or PRORL_LOG_FORMAT.",
)
@click.pass_context
def main(context: click.Context, verbose: bool, log_level: str | None, log_format: LogFormat) -> None:
    """Rollout-as-a-service for RL training of multi-turn LLM agents.

    A node (`serve`) accepts jobs from a trainer over a WebSocket. An agent works on each job with an LLM backend, in a
    sandbox of its own. The node returns the tokens exactly as they were sampled, and the reward. Start with `prorl-trio
    doctor` and `prorl-trio demo`.
    """
    _open_standard_streams()
    default = "warning" if context.invoked_subcommand in ASKING else "info"
    level = logging.DEBUG if verbose else logging.getLevelNamesMapping()[(log_level or default).upper()]
    context.with_resource(open_logging(level, log_format))
    sys.excepthook = _print_traceback
