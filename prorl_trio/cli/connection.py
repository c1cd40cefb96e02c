"""The connection options that commands share, and the connection that the options describe."""

from __future__ import annotations

from functools import partial, reduce, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click
import trio

from prorl_trio.client import connect
from prorl_trio.client.address import Address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from typing import TypeAlias

    from prorl_trio.client import RolloutClient

    Node: TypeAlias = Callable[..., AbstractAsyncContextManager[RolloutClient]]

_Found = TypeVar("_Found")


def _node_url(_context: click.Context, _parameter: click.Parameter, url: str) -> str:
    try:
        Address.parse(url)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from None
    return url


_OPTIONS = (
    click.option(
        "--url",
        envvar="PRORL_URL",
        default="ws://127.0.0.1:8700",
        show_default=True,
        callback=_node_url,
        help="URL of the node; or PRORL_URL.",
    ),
    click.option(
        "--endpoint-file",
        envvar="PRORL_ENDPOINT_FILE",
        type=click.Path(dir_okay=False),
        help="Instead of --url: the node's listen.endpoint_file, which contains its address.",
    ),
    click.option(
        "--fleet",
        envvar="PRORL_FLEET",
        type=click.Path(file_okay=False),
        help="Instead of --url: the fleet's folder (fleet.dir of its nodes). Uses the fleet's head "
        "and needs no --token.",
    ),
    click.option(
        "--tls-ca",
        envvar="PRORL_TLS_CA",
        type=click.Path(exists=True, dir_okay=False),
        help="For wss://: PEM file of trusted certificates. Default: the system's.",
    ),
    click.option(
        "--token",
        envvar="PRORL_TOKEN",
        show_envvar=True,
        help="The node's token. Prefer PRORL_TOKEN, because other users can read command lines.",
    ),
)


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for the node's address and token. `command` receives `node`, which opens the connection."""

    @wraps(command)
    def with_node(
        url: str,
        endpoint_file: str | None,
        fleet: str | None,
        token: str | None,
        tls_ca: str | None,
        **options: Any,
    ) -> None:
        if fleet and endpoint_file:
            raise click.UsageError("--fleet and --endpoint-file are two places: leave one out")
        if not token and not fleet:
            raise click.MissingParameter(param_hint="'--token' (env var: 'PRORL_TOKEN')", param_type="option")
        url_or_none = None if endpoint_file or fleet else url
        command(
            node=partial(connect, url_or_none, token or "", tls_ca=tls_ca, endpoint_file=endpoint_file, fleet=fleet),
            **options,
        )

    return reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), with_node)


def with_client(
    node: Node, work: Callable[[RolloutClient], Awaitable[_Found]], session_id: str | None = None
) -> _Found:
    """Connect to `node`, in a new session or in the session `session_id`, and return the result of `work`."""

    async def run() -> _Found:
        async with node(session_id=session_id) as client:
            return await work(client)

    return trio.run(run)
