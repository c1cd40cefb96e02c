"""Classes that installed packages add to a node: they declare them under an entry-point group."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from prorl_trio.types.errors import ConfigError


def load_plugins(group: str, base: type[Any]) -> dict[str, type[Any]]:
    """Import every class that is declared under `group`; return them by the names they are declared by.

    Raises:
        ConfigError: one cannot be imported, is no subclass of `base`, lacks a method, or has the name of
            another; the message names it.
    """
    found: dict[str, type[Any]] = {}
    for entry in entry_points(group=group):
        what = f"{group}: {entry.name!r} ({entry.value})"
        try:
            plugin = entry.load()
        except (ImportError, AttributeError) as exc:
            raise ConfigError(f"{what} cannot be loaded: {exc}") from exc
        if not (isinstance(plugin, type) and issubclass(plugin, base)):
            raise ConfigError(f"{what} is not a subclass of {base.__name__}")
        if missing := sorted(getattr(plugin, "__abstractmethods__", ())):
            raise ConfigError(f"{what} does not define {', '.join(missing)}")
        if found.setdefault(entry.name, plugin) is not plugin:
            raise ConfigError(f"{what}: two installed packages declare that name; remove one")
    return found
