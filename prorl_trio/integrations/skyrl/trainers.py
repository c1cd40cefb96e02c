"""SkyRL trainers that report each weight sync to a node, so that its tokens have the trainer's step as their version.

Works for engines beside the trainer (`trainer.placement.colocate_all=false`), and without SkyRL itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prorl_trio.integrations.engines import NodeEngines
from prorl_trio.integrations.node_address import NodeAddress
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


def with_node(trainer: type[Any], node: Mapping[str, Any]) -> type[Any]:
    """Return a subclass of a SkyRL trainer that registers its engines with a node, and reports each weight sync.

    The node holds completions back during a sync. Those in flight are aborted, and continue from the received tokens.
    Tokens sampled after the sync that follows training step N have the policy version N; before any, 0.

    Args:
        trainer: `RayPPOTrainer`, `FullyAsyncRayPPOTrainer`, `FullyAsyncTrainerSim` or a subclass.
        node: fields of `NodeAddress`.
    """
    address = NodeAddress.read(node)

    class NodeTrainer(trainer):  # type: ignore[misc] # SkyRL has no types
        def init_weight_sync_state(self) -> None:
            super().init_weight_sync_state()
            if self.colocate_all:
                raise ConfigError(
                    "trainer.placement.colocate_all=true: the engines sleep while the trainer trains; give them GPUs "
                    "of their own, with colocate_all=false"
                )
            engines = NodeEngines(address.connect_blocking())
            urls = self.inference_engine_client.server_urls
            engines.register([url.removeprefix("http://") for url in urls], self.global_step)
            sync = self.dispatch.save_weights_for_sampler

            async def save_weights_for_sampler(*arguments: Any, **named: Any) -> None:
                await asyncio.to_thread(engines.begin_update, self.global_step)
                await sync(*arguments, **named)  # if it fails, the engines stay paused: their weights are unknown
                await asyncio.to_thread(engines.finish_update)

            self.dispatch.save_weights_for_sampler = save_weights_for_sampler

    NodeTrainer.__name__ = NodeTrainer.__qualname__ = f"Node{trainer.__name__}"
    return NodeTrainer
