"""Handlers by name: those the installed packages declare under the entry-point group `prorl_trio.handlers`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from prorl_trio.handlers.base import AgentHandler
from prorl_trio.types.errors import ConfigError, UnknownHandler

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HandlerRegistry"]

GROUP = "prorl_trio.handlers"


class HandlerRegistry:
    """Immutable after the node's start."""

    def __init__(self, handlers: Iterable[AgentHandler]) -> None:
        self._handlers: dict[str, AgentHandler] = {}
        for handler in handlers:
            if handler.name in self._handlers:
                raise ConfigError(f"two handlers are called {handler.name!r}: rename one")
            self._handlers[handler.name] = handler

    @classmethod
    def from_entry_points(cls) -> HandlerRegistry:
        """Load every declared handler class and make one instance of each.

        Raises:
            ConfigError: an entry point cannot be imported or is no `AgentHandler`; the message names it.
        """
        handlers: list[AgentHandler] = []
        for entry in entry_points(group=GROUP):
            try:
                factory = entry.load()
            except (ImportError, AttributeError) as exc:
                raise ConfigError(f"handler {entry.name!r} ({entry.value}) cannot be loaded: {exc}") from exc
            if not (isinstance(factory, type) and issubclass(factory, AgentHandler)):
                raise ConfigError(f"handler {entry.name!r} ({entry.value}) is not a subclass of AgentHandler")
            handlers.append(factory())
        return cls(handlers)

    @property
    def names(self) -> list[str]:
        """Registered names, sorted."""
        return sorted(self._handlers)

    def get(self, name: str) -> AgentHandler:
        """The handler called `name`.

        Raises:
            UnknownHandler: there is none; the message lists those there are.
        """
        try:
            return self._handlers[name]
        except KeyError:
            known = ", ".join(self.names) or "none"
            raise UnknownHandler(f"no handler is called {name!r}; this node has: {known}") from None
