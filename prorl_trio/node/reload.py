"""Reload at SIGHUP: apply the fields of node.toml that can change live; log the others, which need a restart."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from prorl_trio.config import NodeConfig
from prorl_trio.config.live import is_live
from prorl_trio.config.secrets import load_token
from prorl_trio.node.descriptors import check_descriptors
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prorl_trio.service.auth import Door

logger = logging.getLogger(__name__)

SECRET: Final = ("listen.token",)


class Change(msgspec.Struct, frozen=True):
    """A field that differs. As a string it is `path: old -> new`; the values of a secret are not shown."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.path in SECRET:
            return f"{self.path} (not shown)"
        return f"{self.path}: {self.old!r} -> {self.new!r}"


class ReloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between a running node's configuration and its file.

    Attributes:
        config: the new configuration to apply: the old one with the `live` changes.
        live: the changes to apply.
        fixed: the changes that need a restart, and are not in `config`.
    """

    config: NodeConfig
    live: list[Change]
    fixed: list[Change]


def plan_reload(old: NodeConfig, new: NodeConfig) -> ReloadPlan:
    """Compare two configurations and return the plan; changes nothing.

    Raises:
        ConfigError: a value that would change live cannot be used.
    """
    changes = list(_changes(old, new))
    live = [change for change in changes if is_live(change.path)]
    config = old
    for change in live:
        config = _replaced(config, change.path.split("."), change.new)
    try:
        msgspec.convert(msgspec.to_builtins(config), NodeConfig)  # also where no file was read
    except msgspec.ValidationError as exc:
        raise ConfigError(str(exc)) from exc
    check_descriptors(config)
    return ReloadPlan(config=config, live=live, fixed=[change for change in changes if change not in live])


async def serve_reloads(
    load: Callable[[], NodeConfig],
    current: Callable[[], NodeConfig],
    apply: Callable[[NodeConfig], None],
    door: Door,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """At each SIGHUP, call `load` in a thread, and `apply` with the fields that can change live.

    `door` gets the token that the configuration has now, also if it is a file whose content alone has changed. The rest
    stays as `current` returns it, and is logged. A file that cannot be used changes nothing, and is logged as
    an error. Runs until cancelled, in the main thread.
    """
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            try:
                config, token = await run_sync(_load_with_token, load)
                plan = plan_reload(current(), config)
            except (ConfigError, OSError) as exc:  # an OSError: a file that goes, or changes, while it is read
                logger.error("reload: the configuration stays as it is: %s", exc)
                continue
            apply(plan.config)
            changes = [*map(str, plan.live)]
            if door.replace_token(token):
                changes.append("the token is replaced; connections that showed the former one end, their jobs go on")
            logger.info("reload: %s", "; ".join(changes) or "nothing has changed that can change live")
            if plan.fixed:
                logger.warning("reload: these need a restart, and stay: %s", "; ".join(map(str, plan.fixed)))


def _load_with_token(load: Callable[[], NodeConfig]) -> tuple[NodeConfig, bytes]:
    config = load()
    return config, load_token(config.listen)


def _changes(old: msgspec.Struct, new: msgspec.Struct, path: str = "") -> Iterator[Change]:
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, msgspec.Struct) and isinstance(after, msgspec.Struct):
            yield from _changes(before, after, f"{path}{name}.")
        elif before != after:
            yield Change(f"{path}{name}", before, after)


def _replaced(config: Any, path: list[str], value: Any) -> Any:
    name, *below = path
    inner = _replaced(getattr(config, name), below, value) if below else value
    return msgspec.structs.replace(config, **{name: inner})
