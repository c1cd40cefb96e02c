"""The `prorl-trio` command. More commands come from the entry-point group `prorl_trio.commands` (demo, doctor)."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from functools import partial, wraps
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
import msgspec
import trio
from rich.text import Text

from ipc.nursery import leaves
from prorl_trio.chat.format import ChatFormat
from prorl_trio.cli.top import SORTS, TopOptions, run_top
from prorl_trio.client import connect
from prorl_trio.client.address import Address
from prorl_trio.client.collect import make_jobs
from prorl_trio.client.progress import console, page, run_jobs
from prorl_trio.client.recording import read_outcomes, read_run_info, run_folder
from prorl_trio.client.report import outcome_list, render_trajectory, timing_line, token_lines, turn_table
from prorl_trio.client.task_sets import load_task_set
from prorl_trio.config import OnHangup, load_config
from prorl_trio.node.garbage import rare_garbage_collection
from prorl_trio.node.node import serve_node
from prorl_trio.observe.logs import LOG_FORMATS, open_logging
from prorl_trio.service.endpoints import endpoint_url
from prorl_trio.simulation.command import simulate
from prorl_trio.types.errors import ConfigError, InternalError, ProrlError
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import TypeAlias

    from rich.console import RenderableType

    from prorl_trio.client import RolloutClient
    from prorl_trio.config import NodeConfig
    from prorl_trio.observe.logs import LogFormat

    Node: TypeAlias = Callable[[], AbstractAsyncContextManager[RolloutClient]]

__all__ = ["main"]

_Found = TypeVar("_Found")
EXIT_JOBS_CUT = 3
EXIT_INTERNAL = 70
"""EX_SOFTWARE of sysexits.h."""
EXIT_INTERRUPTED = 130
COMMANDS = "prorl_trio.commands"
ASKING = ("submit", "status", "top", "cancel", "show")
"""Commands whose own words say what happens, an error in the end: that a connection is tried again is no news."""


class _Commands(click.Group):
    """Says a `ProrlError`, or which file cannot be used, in one line instead of a traceback, and takes in the commands
    other packages declare."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=COMMANDS).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for entry in entry_points(group=COMMANDS, name=cmd_name):
            command: click.Command = entry.load()
            return command
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._invoke(ctx)
        except* ProrlError as group:
            errors = leaves(group)
            code = EXIT_INTERNAL if any(isinstance(error, InternalError) for error in errors) else 1
            if code == EXIT_INTERNAL:
                logging.getLogger(__name__).error("a bug of ours", exc_info=group)
            for handler in logging.getLogger().handlers:
                handler.flush()  # what ended the command is its last line
            for error in errors:
                click.secho(f"error: {error}", fg="red", err=True)
        except* KeyboardInterrupt:
            click.secho("interrupted", fg="yellow", err=True)
            code = EXIT_INTERRUPTED
        ctx.exit(code)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as exc:
            if exc.filename is None:
                raise
            raise ConfigError(f"{exc.filename}: {exc.strerror}") from exc


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="prorl-trio")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens inside, too; --log-level debug.")
@click.option(
    "--log-level",
    envvar="PRORL_LOG_LEVEL",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="What to log, on standard error; or PRORL_LOG_LEVEL. Default: info; warning for commands that ask a node.",
)
@click.option(
    "--log-format",
    envvar="PRORL_LOG_FORMAT",
    type=click.Choice(LOG_FORMATS),
    default="auto",
    show_default=True,
    help="json: one object a line; auto: colours on a terminal, text elsewhere; or PRORL_LOG_FORMAT.",
)
@click.pass_context
def main(context: click.Context, verbose: bool, log_level: str | None, log_format: LogFormat) -> None:
    """Rollout-as-a-service for RL training of multi-turn LLM agents.

    A node (`serve`) takes jobs from a trainer over a WebSocket, works on them with an LLM backend and a sandbox each,
    and streams token-exact trajectories with rewards back. Begin with `prorl-trio doctor` and `prorl-trio demo`.
    """
    default = "warning" if context.invoked_subcommand in ASKING else "info"
    level = logging.DEBUG if verbose else logging.getLevelNamesMapping()[(log_level or default).upper()]
    context.with_resource(open_logging(level, log_format))


def _weighted_urls(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for value in values:
        url, _, weight = value.partition(",weight=")
        try:
            weights[url] = float(weight or 1.0)
        except ValueError:
            raise click.BadParameter(f"{value}: the weight is not a number") from None
        if not 0 < weights[url] < float("inf"):
            raise click.BadParameter(f"{value}: the weight must be > 0")
    return weights


@main.command()
@click.option("--config", "config_path", required=True, type=click.Path(path_type=Path), help="The node's TOML file.")
@click.option("--token", envvar="PRORL_TOKEN", help="Overrules listen.token; better in PRORL_TOKEN than in sight.")
@click.option("--rest-port", type=click.IntRange(0, 65_535), help="Serve REST there (0: any free port), too.")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="URL[,weight=W]",
    callback=_weighted_urls,
    help="An LLM backend, instead of those of backends.urls; may be given again. Of weight 2, it gets twice as many "
    "rollouts as one of weight 1, which is the default.",
)
@click.option(
    "--on-hangup",
    type=click.Choice(get_args(OnHangup)),
    help="What SIGHUP means, instead of the file's on_hangup. auto, the default: drain if the node was started from a "
    "terminal, which is gone then; else reload.",
)
def serve(
    config_path: Path,
    token: str | None,
    rest_port: int | None,
    backends: dict[str, float],
    on_hangup: OnHangup | None,
) -> None:
    """Run a node until SIGTERM or Ctrl-C: the first drains it, the second cancels what is left, a third kills it.

    Exit code: 0 every job had its own outcome; 3 jobs were cut short (they end as `cancelled`); 1 it could not start
    or its configuration is wrong; 70 a bug of ours ended it.

    SIGHUP reads the file again: worker counts, queue limits, admission, weights of sessions, budgets, limits of agents
    and backends, how backends are watched, and monitoring change at once; the log says what needs a restart. Not so on
    a node that was started from a terminal: when that is lost, the node drains, as by SIGTERM (see --on-hangup).

    With listen.tls_cert and listen.tls_key, PEM files, the WebSocket is wss:// and REST https://.

    \b
    A minimal node.toml:
        [model]
        path = "/models/Qwen3-8B"           # tokenizer and chat template
        [listen]
        token_file = "/run/user/1000/token" # the trainer's password, mode 0600
        [backends]
        urls = ["http://127.0.0.1:8000"]    # vllm serve Qwen3-8B
    """

    def load() -> NodeConfig:
        config = load_config(config_path)
        if backends:
            chosen = msgspec.structs.replace(config.backends, urls=list(backends), weights=backends)
            config = msgspec.structs.replace(config, backends=chosen)
        if on_hangup is not None:
            config = msgspec.structs.replace(config, on_hangup=on_hangup)
        if rest_port is not None:
            rest = msgspec.structs.replace(config.rest, enabled=True, port=rest_port)
            config = msgspec.structs.replace(config, rest=rest)
        if not token:
            return config
        listen = msgspec.structs.replace(config.listen, token=token, token_file="")
        return msgspec.structs.replace(config, listen=listen)

    config = load()
    ready = _Ready(secure=bool(config.listen.tls_cert))
    with rare_garbage_collection():
        clean = trio.run(lambda: serve_node(config, load=load, task_status=ready))
    sys.exit(0 if clean else EXIT_JOBS_CUT)


class _Ready:
    """Tells on standard output that the node listens."""

    def __init__(self, *, secure: bool) -> None:
        self._secure = secure

    def started(self, value: Any = None) -> None:
        click.echo(f"READY {endpoint_url(value, secure=self._secure)}")


def _node_url(_context: click.Context, _parameter: click.Parameter, url: str) -> str:
    try:
        Address.parse(url)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from None
    return url


def _connection(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that talks to a node. It gets `node`, which connects to it."""

    @wraps(command)
    def with_node(url: str, endpoint_file: str | None, token: str, tls_ca: str | None, **options: Any) -> None:
        url_or_none = None if endpoint_file else url
        command(node=partial(connect, url_or_none, token, endpoint_file=endpoint_file, tls_ca=tls_ca), **options)

    decorated = click.option(
        "--token",
        envvar="PRORL_TOKEN",
        show_envvar=True,
        required=True,
        help="The node's token; better in the environment than on the command line.",
    )(with_node)
    decorated = click.option(
        "--tls-ca",
        envvar="PRORL_TLS_CA",
        type=click.Path(exists=True, dir_okay=False),
        help="For wss://: a PEM file with the certificates to believe; without, the system's.",
    )(decorated)
    decorated = click.option(
        "--endpoint-file",
        envvar="PRORL_ENDPOINT_FILE",
        type=click.Path(dir_okay=False),
        help="In place of --url: the file in which the node says where it listens, its listen.endpoint_file.",
    )(decorated)
    return click.option(
        "--url",
        envvar="PRORL_URL",
        default="ws://127.0.0.1:8700",
        show_default=True,
        callback=_node_url,
        help="The node, or PRORL_URL.",
    )(decorated)


def _tags(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    tags: dict[str, str] = {}
    for value in values:
        name, colon, wanted = value.partition(":")
        if not colon:
            raise click.BadParameter(f"{value!r} is no NAME:VALUE")
        if tags.setdefault(name, wanted) != wanted:
            raise click.BadParameter(f"no job has two values for the tag {name!r}")
    return tags


def _with_client(node: Node, work: Callable[[RolloutClient], Awaitable[_Found]]) -> _Found:
    async def run() -> _Found:
        async with node() as client:
            return await work(client)

    return trio.run(run)


@main.command()
@_connection
@click.option("--tasks", required=True, help="A named task set (gsm8k), or a JSONL file of task instances.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many instances.")
@click.option("--rollouts", type=click.IntRange(min=1), default=1, show_default=True, help="Rollouts per instance.")
@click.option("--max-turns", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--max-output-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Per turn.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True)
@click.option("--model", default="", help="Model folder, remembered for `show`.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where to record."
)
def submit(
    node: Node,
    tasks: str,
    limit: int | None,
    rollouts: int,
    max_turns: int,
    max_output_tokens: int,
    temperature: float,
    model: str,
    out: Path,
) -> None:
    """Submit rollouts to a node, wait for all of them, record them and print what came out.

    A task file with a bad line is refused as a whole, before anything is submitted. A task that only the node can
    judge, by its handler's rules, and that it rejects, is named; the others are run.

    Exit code: 0 all were completed, whatever their reward; 3 some were rejected or not completed, and it says why;
    1 the node or the task file cannot be used.

    \b
    Each line of a JSONL task file:
        {"instance_id": "1", "handler": "math", "payload": {"question": "1+1?", "answer": "2"}}
    """
    sampling = SamplingParams(temperature=temperature, max_output_tokens=max_output_tokens)
    specs = make_jobs(load_task_set(tasks)[:limit], rollouts=rollouts, sampling=sampling, max_turns=max_turns)
    summary = _with_client(node, lambda client: run_jobs(client, specs, run_folder(out), model=model, tasks=tasks))
    sys.exit(0 if summary.completed == summary.jobs and not summary.rejected else EXIT_JOBS_CUT)


@main.command()
@_connection
def status(node: Node) -> None:
    """Print a node's live state as JSON: jobs by stage, backends, sandboxes."""

    async def work(client: RolloutClient) -> None:
        report = await client.status()
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))

    _with_client(node, work)


@main.command()
@_connection
@click.option("--once", is_flag=True, help="One report, then end.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON a report: what `status` prints.")
@click.option("--sort", type=click.Choice(SORTS), default="progress", show_default=True, help="Order of the jobs.")
@click.option("--stuck", "only_stuck", is_flag=True, help="Only jobs to which nothing happened for stuck_after_s.")
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="In s.")
def top(node: Node, **options: Any) -> None:
    """Watch a node: stages, backends, sandboxes, sessions, and what every job waits for. Ctrl-C ends it.

    Jobs that are stuck come first, marked with `!`, then those at work, then those in the queue. `quiet` is how long
    nothing happened to a job.
    """
    chosen = TopOptions(**options)
    with suppress(KeyboardInterrupt):
        _with_client(node, lambda client: run_top(client.status, console, chosen))


@main.command()
@_connection
@click.argument("job_ids", nargs=-1, metavar="[JOB_ID]...")
@click.option("--group", metavar="ID", help="The jobs of this group.")
@click.option("--tag", "tags", multiple=True, metavar="NAME:VALUE", callback=_tags, help="The jobs with this tag.")
@click.option("--session", metavar="ID", help="The jobs of this session; `top` lists sessions.")
@click.option("--all", "everything", is_flag=True, help="All jobs of the node.")
@click.option("--reason", default="cancelled by an operator", show_default=True, help="Becomes the outcomes' error.")
def cancel(
    node: Node,
    job_ids: tuple[str, ...],
    group: str | None,
    tags: dict[str, str],
    session: str | None,
    everything: bool,
    reason: str,
) -> None:
    """Cancel jobs of a node, whoever submitted them; returns when nothing of them is left there.

    Each cancelled job still has its outcome, `cancelled` and without a reward, which goes to the trainer that
    submitted it. Say which jobs by their ids, or by --group, --tag and --session (of several, all must hold; a tag may
    be given again), or --all. `prorl-trio top` shows what is live. What has ended is left alone, and said to have.

    Exit code: 0 done, also where no job was live; 1 an id is unknown to the node (the others are cancelled all the
    same), or the node cannot be reached.

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
        answer = await client.cancel_on_node(
            job_ids, reason, group_id=group, session_id=session, tags=tags, everything=everything
        )
        for job_id in answer.cancelled:
            click.echo(f"cancelled {job_id}")
        for job_id in answer.ended:
            click.echo(f"had ended {job_id}")
        if answer.unknown:
            raise ConfigError(f"unknown to this node (over, or never submitted): {', '.join(answer.unknown)}")
        if not answer.cancelled and not answer.ended:
            click.echo("no such job is live", err=True)

    _with_client(node, work)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("job_id", required=False)
@click.option("--model", type=click.Path(path_type=Path), help="Model folder; default: the one the run remembers.")
@click.option("--logprobs", is_flag=True, help="Besides, each sampled token with its id and log-probability.")
@click.option("--pager/--no-pager", default=None, help="Show it in $PAGER, or less; default: where it is too long.")
def show(file: Path, job_id: str | None, model: Path | None, logprobs: bool, pager: bool | None) -> None:
    """Show one recorded trajectory with its kinds of tokens in colours, the seconds of each stage, and of each turn the
    seconds and log-probabilities; or without JOB_ID the list of all.

    JOB_ID may be any unique part of a job's id.
    """
    outcomes = read_outcomes(file)
    if job_id is None:
        page([outcome_list(outcomes)], pager=pager)
        return
    exact = [outcome for outcome in outcomes if outcome.job_id == job_id]
    matches = exact or [outcome for outcome in outcomes if job_id in outcome.job_id]
    if len(matches) != 1:
        some = ", ".join(outcome.job_id for outcome in matches[:5])
        raise ConfigError(f"{len(matches)} outcomes in {file} match {job_id!r}" + (f": {some} ..." if some else ""))
    (outcome,) = matches
    chat_format = _chat_format(file, model)
    parts: list[RenderableType] = [render_trajectory(outcome, chat_format), Text(timing_line(outcome))]
    if outcome.trajectory is not None:
        parts.append(turn_table(outcome.trajectory))
        if logprobs:
            parts.append(token_lines(outcome.trajectory, chat_format))
    page(parts, pager=pager)


def _chat_format(file: Path, model: Path | None) -> ChatFormat | None:
    """The model the run was made with, if it is still where it was; an explicit one must be there."""
    if model is not None:
        return ChatFormat.load(model)
    info = read_run_info(file.parent)
    if info is None or not info.model or not Path(info.model).is_dir():
        click.echo("the run's model folder is not known: no tokens, but each turn's text; name it by --model", err=True)
        return None
    return ChatFormat.load(Path(info.model))


main.add_command(simulate)

if __name__ == "__main__":
    main()
