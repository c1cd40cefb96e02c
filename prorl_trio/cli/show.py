"""`prorl-trio show`: print recorded trajectories token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from prorl_trio.chat.format import ChatFormat
from prorl_trio.client.terminal import say
from prorl_trio.runs.progress import page
from prorl_trio.runs.recording import read_outcomes, read_run_info, trajectories_in
from prorl_trio.runs.report import outcome_list, timing_line, token_lines, turn_table
from prorl_trio.runs.transcript import render_trajectory
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("job_id", required=False)
@click.option("--model", type=click.Path(path_type=Path), help="Model folder. Default: the run's own.")
@click.option(
    "--sides", is_flag=True, help="Also show the messages before each turn, beside the tokens that the engine received."
)
@click.option("--logprobs", is_flag=True, help="Also show each sampled token with its id and log-probability.")
@click.option(
    "--pager/--no-pager", default=None, help="Use $PAGER or less. Default: for output longer than the screen."
)
def show(run: Path, job_id: str | None, model: Path | None, sides: bool, logprobs: bool, pager: bool | None) -> None:
    """Show one recorded trajectory, or list all of a run.

    RUN is the folder of a run, or its trajectories.msgpack. With JOB_ID, the command prints the job's segments, with a
    mark and a colour for each kind of token, and sub-agents indented. It also prints the seconds of each stage, and the
    seconds and log-probabilities of each turn. JOB_ID may be any unique part of a job id.
    """
    file = trajectories_in(run)
    outcomes = read_outcomes(file)
    if job_id is None:
        page([outcome_list(outcomes)], pager=pager)
        return
    exact = [outcome for outcome in outcomes if outcome.job_id == job_id]
    matches = exact or [outcome for outcome in outcomes if job_id in outcome.job_id]
    if len(matches) != 1:
        some = ", ".join(outcome.job_id for outcome in (matches or outcomes)[:5]) + ", ..."
        there = some if matches else f"it has {some}; without JOB_ID all are listed"
        raise ConfigError(f"{len(matches)} outcomes in {file} match {job_id!r}: {there}")
    (outcome,) = matches
    chat_format = _chat_format(file, model)
    parts: list[RenderableType] = [
        render_trajectory(outcome, chat_format, sides=sides),
        Text(timing_line(outcome)),
    ]
    if outcome.trajectory is not None:
        parts.append(turn_table(outcome.trajectory))
        if logprobs:
            parts.append(token_lines(outcome.trajectory, chat_format))
    page(parts, pager=pager)


def _chat_format(file: Path, model: Path | None) -> ChatFormat | None:
    """Return the format of the run's own model if it is still on disk. An explicitly given model must exist."""
    if model is not None:
        return ChatFormat.load(model)
    info = read_run_info(file.parent)
    if info is None or not info.model or not Path(info.model).is_dir():
        say("the run's model folder is not known: no tokens, but each turn's text; name it by --model", err=True)
        return None
    return ChatFormat.load(Path(info.model))
