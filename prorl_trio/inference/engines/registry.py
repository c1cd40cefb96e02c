"""Engines by kind: built-in engines, and engines from installed packages.

A package registers an engine in the entry-point group `prorl_trio.engines`:

    [project.entry-points."prorl_trio.engines"]
    mine = "my_package.engine:MyEngineClient"

and `backends.engine = "mine"` selects it. The object is a subclass of `EngineClient`, called with the URL and the
keywords of `ClientOptions`; a subclass of `HttpEngineClient` already accepts these. If it implements `is_there`, the
kind `auto` finds it too. It must pass the test suite `prorl_trio.testing.engine_contract`.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from prorl_trio.inference.engines.protocol import ClientFinder, EngineClient, made_by
from prorl_trio.inference.engines.sglang import SglangClient
from prorl_trio.inference.engines.tinker import NAME as TINKER
from prorl_trio.inference.engines.tinker import TinkerClient
from prorl_trio.inference.engines.trainer_engine import TrainerEngineClient
from prorl_trio.inference.engines.vllm import VllmClient
from prorl_trio.plugins import load_plugins
from prorl_trio.types.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Unpack

    from prorl_trio.inference.engines.http_engine import ClientOptions
    from prorl_trio.inference.engines.tinker import TinkerAccess

GROUP: Final = "prorl_trio.engines"
AUTO: Final = "auto"
"""The kind that is detected by asking the server."""
BUILT_IN: Final[dict[str, Callable[..., EngineClient]]] = {
    "sglang": SglangClient,
    "vllm": VllmClient,
    TINKER: TinkerClient,
    "prorl": TrainerEngineClient,
}
"""In the order in which `auto` tries them."""
CLOSE_GRACE_S: Final = 1.0


class EngineRegistry:
    """Kinds of engines. Immutable after the node's start."""

    def __init__(self, installed: Mapping[str, Callable[..., EngineClient]] | None = None) -> None:
        """Raise ConfigError if an `installed` kind has the name of a built-in kind."""
        self._installed = dict(installed or {})
        for name in self._installed:
            if name in BUILT_IN or name == AUTO:
                raise ConfigError(f"an installed package offers an engine called {name!r}, as a built-in one is")

    @classmethod
    def from_entry_points(cls) -> EngineRegistry:
        """Load every class that an installed package declares.

        Raises:
            ConfigError: see `load_plugins`; or a name is that of a built-in kind.
        """
        return cls(load_plugins(GROUP, EngineClient))

    @property
    def names(self) -> list[str]:
        """Valid kinds for `backends.engine`, sorted: built-in kinds first, then installed ones."""
        return [AUTO, *sorted(BUILT_IN), *sorted(self._installed)]

    def finder(
        self, kind: str, *, tinker: TinkerAccess | None = None, **options: Unpack[ClientOptions]
    ) -> ClientFinder:
        """Return a function that creates clients for engines of this kind. `tinker` applies to Tinker servers.

        For `auto` each server is asked for its kind, installed kinds first. An unrecognised server is treated as vLLM,
        whose probe then reports the missing features.

        Raises:
            ConfigError: the kind is unknown; the message lists the known kinds.
        """
        built_in: dict[str, Callable[..., EngineClient]] = {**BUILT_IN, TINKER: partial(TinkerClient, access=tinker)}
        if kind == AUTO:
            kinds = [partial(each, **options) for each in (*self._installed.values(), *built_in.values())]
            return partial(_find, kinds, partial(VllmClient, **options))
        known = self._installed.get(kind) or built_in.get(kind)
        if known is None:
            raise ConfigError(f"no engine is called {kind!r}; this node has: {', '.join(self.names)}")
        return made_by(partial(known, **options))


async def _find(
    kinds: Sequence[Callable[[str], EngineClient]], otherwise: Callable[[str], EngineClient], url: str, timeout_s: float
) -> EngineClient:
    """Return a client of the first of the `kinds` whose server answers at `url`."""
    with trio.move_on_after(timeout_s):
        await trio.lowlevel.checkpoint()
        for make in kinds:
            async with AsyncExitStack() as stack:
                client = make(url)
                stack.push_async_callback(_close, client)
                if await client.is_there(timeout_s=timeout_s):
                    stack.pop_all()
                    return client
        return otherwise(url)
    raise BackendError(f"{url}: no answer within {timeout_s:g} s to which engine it is", retryable=True)


async def _close(client: EngineClient) -> None:
    with trio.move_on_after(CLOSE_GRACE_S, shield=True):
        await client.aclose()
