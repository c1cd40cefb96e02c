"""Handlers by name, as declared by installed packages under the entry-point group `prorl_trio.handlers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl_trio.plugins import described, load_class, load_plugins
from prorl_trio.tasks.handlers.base import AgentHandler
from prorl_trio.types.errors import ConfigError, UnknownHandler

if TYPE_CHECKING:
    from collections.abc import Iterable

GROUP = "prorl_trio.handlers"


class HandlerRegistry:
    """The handlers by name. Immutable after the node's start."""

    def __init__(self, handlers: Iterable[AgentHandler]) -> None:
        self._handlers: dict[str, AgentHandler] = {}
        for handler in handlers:
            if handler.name in self._handlers:
                raise ConfigError(f"two handlers are called {handler.name!r}: rename one")
            self._handlers[handler.name] = handler

    @classmethod
    def from_entry_points(cls, more: Iterable[AgentHandler] = ()) -> HandlerRegistry:
        """Load every declared handler class, create one instance of each, and add the handlers `more`.

        Raises:
            ConfigError: see `load_plugins`; or one cannot be created, or two handlers have the same name.
        """
        return cls([*(_create(handler) for handler in load_plugins(GROUP, AgentHandler).values()), *more])

    @property
    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        return sorted(self._handlers)

    def get(self, name: str) -> AgentHandler:
        """Return the handler called `name`.

        Raises:
            UnknownHandler: the name is unknown; the message lists the known names.
        """
        try:
            return self._handlers[name]
        except KeyError:
            known = ", ".join(self.names) or "none"
            raise UnknownHandler(f"no handler is called {name!r}; this node has: {known}") from None


def find_handler(target: str) -> AgentHandler:
    """Return the handler of the class `MODULE:CLASS`, or an installed handler by its name.

    Raises:
        ConfigError: the class cannot be loaded or created, or no installed handler has that name.
    """
    if ":" in target:
        return _create(load_class(target, AgentHandler))
    registry = HandlerRegistry.from_entry_points()
    if target not in registry.names:
        raise ConfigError(
            f"no handler is called {target!r}; name a class as MODULE:CLASS, or: {', '.join(registry.names)}"
        )
    return registry.get(target)


def _create(kind: type[AgentHandler]) -> AgentHandler:
    try:
        return kind()
    except (Exception, SystemExit) as exc:
        name = f"{kind.__module__}:{kind.__qualname__}"
        raise ConfigError(f"{name!r} cannot be created: {described(exc, kind.__module__)}") from exc
