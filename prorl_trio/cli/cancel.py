"""`prorl-trio cancel`: cancel jobs of any session on a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from prorl_trio.cli.connection import connection_options, with_client
from prorl_trio.client.terminal import say
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorl_trio.cli.connection import Node
    from prorl_trio.client import RolloutClient


def _tags(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    tags: dict[str, str] = {}
    for value in values:
        name, colon, wanted = value.partition(":")
        if not colon:
            raise click.BadParameter(f"{value!r} is no NAME:VALUE")
        if tags.setdefault(name, wanted) != wanted:
            raise click.BadParameter(f"no job has two values for the tag {name!r}")
    return tags


@click.command()
@connection_options
@click.argument("job_ids", nargs=-1, metavar="[JOB_ID]...")
@click.option("--group", metavar="ID", help="Cancel the jobs of this group.")
@click.option(
    "--tag", "tags", multiple=True, metavar="NAME:VALUE", callback=_tags, help="Cancel the jobs with this tag."
)
@click.option("--session", metavar="ID", help="Cancel the jobs of this session; `top` lists sessions.")
@click.option("--all", "everything", is_flag=True, help="Cancel all jobs of the node.")
@click.option(
    "--reason", default="cancelled by an operator", show_default=True, help="Reason, recorded as the outcomes' error."
)
def cancel(
    node: Node,
    job_ids: tuple[str, ...],
    group: str | None,
    tags: dict[str, str],
    session: str | None,
    everything: bool,
    reason: str,
) -> None:
    """Cancel jobs of any session on a node. Wait until they have ended.

    Each cancelled job still produces an outcome, with status `cancelled` and without a reward. It goes to the trainer
    that submitted the job. Select jobs by id, by --group, --tag and --session, or with --all. If several filters are
    given, a job must match every filter. --tag is repeatable. `prorl-trio top` lists live jobs. Jobs that had already
    ended are reported and left unchanged.

    \b
    Exit codes:
        0  success, even if no matching job was live
        1  the node does not know some ids (all other jobs were cancelled), or
           cannot be reached

    \b
        prorl-trio cancel 7f3a-q1-0 7f3a-q1-1
        prorl-trio cancel --group 7f3a-q1
        prorl-trio cancel --tag run:ablation-3 --reason "wrong reward"
        prorl-trio cancel --all
    """
    filtered = group is not None or session is not None or bool(tags)
    if not (job_ids or filtered or everything):
        raise click.UsageError("say which jobs: by JOB_ID, --group, --tag, --session or --all")
    if everything and (job_ids or filtered):
        raise click.UsageError("--all is all jobs of the node: leave it out, or the rest")

    async def work(client: RolloutClient) -> None:
        answer = await client.cancel(
            job_ids, reason, group_id=group, tags=tags, on_node=True, session_id=session, everything=everything
        )
        for job_id in answer.cancelled:
            say(f"cancelled {job_id}")
        for job_id in answer.ended:
            say(f"had ended {job_id}")
        if answer.unknown:
            raise ConfigError(f"unknown to this node (over, or never submitted): {', '.join(answer.unknown)}")
        if not answer.cancelled and not answer.ended:
            say("no such job is live", err=True)

    with_client(node, work)
