"""The core of a node: backends, sandboxes, scoring processes, and the pipeline that uses them."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.agent.context import Resources
from prorl_trio.agent.mcp import prepare_servers
from prorl_trio.agent.scoring import open_scorer_pool
from prorl_trio.chat.proof import load_chat_format
from prorl_trio.chat.token_memory import TokenMemory
from prorl_trio.chat.tokenizer_sample import tokenizer_sample
from prorl_trio.edges.gateway.app import GatewayTable
from prorl_trio.edges.gateway.serve import open_gateway_port
from prorl_trio.inference.pool.admission import ModelProof
from prorl_trio.node.drain import EndOfTime, allocation_left_s
from prorl_trio.node.node import Node
from prorl_trio.node.parts import engine_finder, open_backends, open_node_arena, open_node_sandboxes, warn_of_image
from prorl_trio.pipeline.pipeline import open_pipeline
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.search.service import open_search
from prorl_trio.tasks.handlers.registry import HandlerRegistry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from prorl_trio.config import NodeConfig
    from prorl_trio.inference.engines.http_engine import OnCall
    from prorl_trio.node.node import Outbox
    from prorl_trio.pipeline.observer import Observer
    from prorl_trio.sandbox.host import OnOpen
    from prorl_trio.sandbox.provider import SandboxProvider

EXAMINATIONS_TIMEOUT_S: Final = 10.0
"""Limit of the time in which checks of gold answers are stopped when the node ends."""


class _NoSessions:
    refusal = ""

    def undelivered(self) -> tuple[int, int]:
        return 0, 0

    async def wait_answered(self) -> None:
        await trio.lowlevel.checkpoint()


NO_SESSIONS: Final = _NoSessions()
"""Outbox of a node without sessions: its jobs deliver to other sinks."""


@asynccontextmanager
async def open_node(
    config: NodeConfig,
    handlers: HandlerRegistry | None = None,
    *,
    provider: SandboxProvider | None = None,
    observers: Sequence[Observer] = (),
    on_backend_call: OnCall | None = None,
    on_sandbox_open: OnOpen | None = None,
    tokens: TokenMemory | None = None,
    outbox: Outbox = NO_SESSIONS,
) -> AsyncIterator[Node]:
    """Open a node without its sessions and edges; on exit, cancel all jobs and wait until all have ended.

    Args:
        config: the node's configuration.
        handlers: the agent handlers; None: the handlers of the installed entry points.
        provider: replaces the sandbox provider of the configuration.
        observers: called for every job.
        on_backend_call: called for every call of an LLM backend.
        on_sandbox_open: called for every sandbox handed out.
        tokens: the memory in which trajectories are recorded; None: the node opens its own arena.
        outbox: the sessions of the jobs, if any.

    Raises:
        ConfigError: the model folder, the sandbox provider or the configuration cannot be used; the message has a
            remedy.
        BackendError: backends are `required`, and one failed its probe.
    """
    handlers = handlers or HandlerRegistry.from_entry_points()
    model = config.model
    await prepare_servers(config.mcp)
    chat_format = await trio.to_thread.run_sync(load_chat_format, model)
    find_client = engine_finder(config.backends, on_backend_call, max_positions=chat_format.max_positions)
    if provider is None:
        provider = await choose_provider(config.sandbox)
        await trio.to_thread.run_sync(warn_of_image, config.sandbox)
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(open_single_nursery())
        proof = ModelProof(tokenizer_sample(chat_format.model_dir, chat_format.codec))
        backends = await stack.enter_async_context(open_backends(config.backends, find_client, proof=proof))
        scorers = await stack.enter_async_context(open_scorer_pool(config.stages.eval_workers, config.scoring))
        sandboxes = await stack.enter_async_context(open_node_sandboxes(provider, config.sandbox, on_sandbox_open))
        search = await stack.enter_async_context(open_search(config.search, cache_dir() / "search"))
        if tokens is None:
            tokens = TokenMemory(stack.enter_context(open_node_arena(config.arena)))
        gateways = GatewayTable()
        resources = Resources(
            config=config,
            chat_format=chat_format,
            backends=backends,
            scorers=scorers,
            tokens=tokens,
            search=search,
            serve_gateway=partial(open_gateway_port, listen=config.listen, table=gateways),
        )
        for name in handlers.names:
            await handlers.get(name).prepare(resources)
        pipeline = await stack.enter_async_context(open_pipeline(resources, sandboxes, service, observers=observers))
        left_s = allocation_left_s(os.environ)
        end = EndOfTime(None if left_s is None else left_s - config.fleet.end_margin_s, pipeline.durations)
        node = Node(config, handlers, pipeline, backends, sandboxes, provider, resources, outbox, end)
        node.gateways = gateways
        if search is not None:
            node.describe("search", search.statistics)
        try:
            yield node
        finally:
            with trio.move_on_after(EXAMINATIONS_TIMEOUT_S, shield=True):
                await node.end_examinations()
