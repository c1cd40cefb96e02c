"""The parts of a node that its configuration opens: backends, sandbox host, arena."""

from __future__ import annotations

import logging
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from prorl_ipc.arena import open_arena
from prorl_ipc.nursery import open_single_nursery
from prorl_trio.inference.engines.protocol import EnginePaused
from prorl_trio.inference.engines.registry import EngineRegistry
from prorl_trio.inference.engines.tinker import TinkerAccess
from prorl_trio.inference.pool.pool import Backends
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.images.locate import locate_root
from prorl_trio.sandbox.images.pull import PullRules
from prorl_trio.sandbox.images.puller import PullLimits
from prorl_trio.sandbox.warm_pool import WarmLimits
from prorl_trio.supervision import service_task
from prorl_trio.types.errors import BackendError, ConfigError, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager
    from random import Random

    from prorl_ipc.arena import Arena
    from prorl_trio.config import ArenaConfig, BackendConfig, ImagesConfig, SandboxConfig
    from prorl_trio.inference.engines.http_engine import OnCall
    from prorl_trio.inference.engines.protocol import ClientFinder, EngineClient
    from prorl_trio.inference.pool.admission import ModelProof
    from prorl_trio.sandbox.host import OnOpen, SandboxHost
    from prorl_trio.sandbox.provider import SandboxProvider

logger = logging.getLogger(__name__)


def engine_finder(config: BackendConfig, on_call: OnCall | None, *, max_positions: int = 0) -> ClientFinder:
    """Return a function that makes the client of a backend's URL, for the configured kind of engine.

    `on_call` is called for every call of a backend. `max_positions` is the model's longest context in tokens, 0 if
    unknown. A URL that `config` does not allow is not contacted: the function raises BackendError.

    Blocks on the disk, if there is a file with an API key.

    Raises:
        ConfigError: the kind of engine is unknown; or a configured URL is not valid, or occurs twice; or an API key
            cannot be read.
    """
    config.check_urls()
    find = EngineRegistry.from_entry_points().finder(
        config.engine,
        context_tokens=config.max_model_len or max_positions,
        max_connections=config.max_connections_per_backend,
        on_call=on_call,
        tinker=TinkerAccess(
            model=config.tinker.model, weights=config.tinker.weights, api_key=config.tinker.read_api_key()
        ),
    )

    async def find_allowed(url: str, timeout_s: float) -> EngineClient:
        if not config.allows(url):
            await trio.lowlevel.checkpoint()
            message = f"{url}: backends.allowed in the node's node.toml does not have that address; add it, and restart"
            raise BackendError(message, retryable=False)
        return await find(url, timeout_s)

    return find_allowed


@asynccontextmanager
async def open_backends(
    config: BackendConfig,
    find_client: ClientFinder,
    *,
    random: Random | None = None,
    proof: ModelProof | None = None,
) -> AsyncIterator[Backends]:
    """Probe the configured backends concurrently, and yield the pool with them; it is watched during the block.

    A backend that fails is `down`, and joins when a later probe passes. A paused backend is handled the same way, even
    if backends are `required`: after a crash during a policy update, the node restarts before its engines are resumed.
    `find_client`, `random` and `proof` are passed to `Backends`. On exit, calls in flight fail.

    Raises:
        BackendError: backends are `required`, and one failed its probe.
    """
    backends = Backends(
        find_client,
        probe_timeout_s=config.probe_timeout_s,
        max_tasks_per_backend=config.max_tasks_per_backend,
        health=config.health,
        load=config.load,
        random=random,
        proof=proof,
    )
    backends.configured = frozenset(config.weighted_urls)
    try:
        failed: dict[str, BackendError] = {}
        if config.urls:
            logger.info("probing %d backends, for %g s at most", len(config.urls), config.probe_timeout_s)
        async with open_single_nursery() as probes:
            for url in config.urls:
                probes.start_soon(_add, backends, url, config.weights.get(url), failed)
        for url, error in failed.items():
            if config.required and not isinstance(error, EnginePaused):
                raise error
            logger.warning("backend %s is down, and joins when it is up: %s", url, error)
            backends.expect(url, config.weights.get(url), str(error))
        async with open_single_nursery() as watch:
            watch.start_soon(service_task(backends.watch, "backends"))
            yield backends
            watch.cancel_scope.cancel("the node ends")
    finally:
        await backends.aclose()


async def _add(backends: Backends, url: str, weight: float | None, failed: dict[str, BackendError]) -> None:
    try:
        await backends.add(url, weight)
    except BackendError as exc:
        failed[url] = exc


@contextmanager
def open_node_arena(config: ArenaConfig) -> Iterator[Arena | None]:
    """Open the node's arena; yield None if the configuration disables it.

    Raises:
        ConfigError: the system cannot allocate that memory.
    """
    with ExitStack() as stack:
        arena = None
        if config.enabled:
            try:
                arena = stack.enter_context(open_arena(config.size_bytes or None))
            except (OSError, ValueError) as exc:
                raise ConfigError(f"arena.size_bytes: {exc}; change it, or set arena.enabled to false") from exc
        yield arena


def warn_of_image(config: SandboxConfig) -> None:
    """Log a warning if the configured image is unused, or is not on this machine and may have to be pulled.

    Blocks on the disk.
    """
    if config.image == "host":
        return
    if config.provider == "process":
        logger.warning("sandbox.image has no effect: the provider `process` uses this machine, not %r", config.image)
        return
    try:
        locate_root(config.image)
    except SandboxUnavailable as exc:
        logger.warning("sandbox.image: until it is there, rollouts that use it fail: %s", exc)


def open_node_sandboxes(
    provider: SandboxProvider, config: SandboxConfig, on_open: OnOpen | None
) -> AbstractAsyncContextManager[SandboxHost]:
    """Open a sandbox host with the configured limits. `on_open` is called for every sandbox handed out."""
    warm = WarmLimits(
        max_warm=config.max_warm,
        max_warm_per_image=config.max_warm_per_image,
        max_refills=max(1, config.max_concurrent_starts // 2),  # the remaining starts are for waiting rollouts
        max_idle_s=config.max_warm_idle_s,
    )
    return open_sandbox_host(
        provider,
        max_concurrent_starts=config.max_concurrent_starts,
        max_concurrent_starts_per_image=config.max_concurrent_starts_per_image,
        warm=warm,
        on_open=on_open,
        pulls=_pull_limits(config.images) if config.images.pull and provider.has_layers else None,
    )


def _pull_limits(config: ImagesConfig) -> PullLimits:
    return PullLimits(
        rules=PullRules(
            max_store_bytes=config.max_store_bytes,
            min_free_bytes=config.min_free_bytes,
            max_downloads=config.max_concurrent_layers,
            patience_s=config.patience_s,
            plain_http=config.plain_http,
        ),
        max_concurrent=config.max_concurrent_pulls,
        timeout_s=config.timeout_s,
    )
