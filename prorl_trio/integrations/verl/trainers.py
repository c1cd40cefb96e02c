"""verl's trainers (V1), which notify a node about weight changes and their training step. Needs verl.

    python -m prorl_trio.integrations.verl.main_ppo ...     # instead of: python -m verl.trainer.main_ppo ...

Each trainer of verl (`trainer.v1.trainer_mode`) gets its own class, which wraps verl's own hooks. After
initialisation, it registers the rollout servers with the node that the agent loop's configuration names. It pauses the
servers when verl puts them to sleep or transfers weights to them. They resume under `str(global_steps)`.

It is written for verl 0.9.1. The hooks are tested. Weight transfer by NCCL is not tested, because it needs GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    from verl.utils.import_utils import resolve_config_path
except ImportError as exc:
    raise ImportError("this needs verl: pip install 'prorl-trio[verl]'") from exc

from prorl_trio.chat.codec import vocabulary_digest
from prorl_trio.integrations.engines import NodeEngines
from prorl_trio.integrations.node_address import NodeAddress
from prorl_trio.integrations.verl.agent_loop import NodeAgentLoop, builtin, check_sampling, run_name
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl_trio.client import BlockingClient


class NodeTrainer:
    """The trainer hooks that keep a node's engines in step. This class is mixed in before verl's class."""

    config: Any
    tokenizer: Any
    global_steps: int
    llm_server_manager: Any
    _engines: NodeEngines

    def on_init_end(self) -> None:
        """Register the engines once they have weights. Cancel the jobs that an earlier trainer of this run left behind.

        Raises:
            ConfigError: the configuration cannot be trained with, or the node has another model's tokenizer.
            BackendError: the node cannot use an engine.
            ServiceError: the node cannot be reached.
        """
        check_sampling(self.config.actor_rollout_ref.rollout)
        client = node_of(self.config).connect_blocking()
        check_tokenizer(self.tokenizer, client)
        client.cancel(on_node=True, tags={"verl": run_name(self.config)}, reason="its trainer was started again")
        _hook(self, "on_init_end")()
        self._engines = NodeEngines(client)
        self._engines.register(self._servers().get_addresses(), self.global_steps)

    def on_sample_end(self) -> None:
        """Pause the engines if they now give their memory to the trainer."""
        if self._servers() is self.llm_server_manager:
            self._engines.begin_update(self.global_steps)
        _hook(self, "on_sample_end")()

    def on_step_end(self) -> None:
        """Pause the engines while they receive the weights of this step, then resume them under its number.

        If verl's own hook raises, they stay paused, because their weights are unknown.
        """
        self._engines.begin_update(self.global_steps)
        _hook(self, "on_step_end")()
        self._engines.finish_update()

    def _servers(self) -> Any:
        """Return the manager of the rollout servers. Standalone servers take precedence over the trainer's own.

        The servers on the trainer's GPUs are idle in that case: `actor_rollout_ref.hybrid_engine=False` saves them.
        """
        return getattr(self, "standalone_server_manager", self.llm_server_manager)


def install() -> None:
    """Replace each registered trainer of verl with a class that keeps a node's engines in step. It is idempotent."""
    for mode, trainer in list(TRAINER_REGISTRY.items()):
        if not issubclass(trainer, NodeTrainer):
            TRAINER_REGISTRY[mode] = type(f"Node{trainer.__name__}", (NodeTrainer, trainer), {})


def check_tokenizer(tokenizer: Any, client: BlockingClient) -> None:
    """Check that token ids have the same meaning for verl and the node.

    Raises:
        ConfigError: the node was started with another model's tokenizer.
    """
    ours, theirs = vocabulary_digest(tokenizer.get_vocab()), client.status()["model"]["vocabulary"]
    if ours != theirs:
        raise ConfigError(
            f"the node's tokenizer has other tokens than verl's (digests {theirs[:12]} and {ours[:12]}): start the "
            "node with the model that verl trains ([model] path)"
        )


def node_of(config: Any) -> NodeAddress:
    """Return the node that the configured agent loop runs its rollouts on.

    Raises:
        ConfigError: the file at `agent_loop_config_path` contains no `NodeAgentLoop`.
    """
    path = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
    loops = OmegaConf.load(resolve_config_path(path)) if path else []
    ours = f"{NodeAgentLoop.__module__}.{NodeAgentLoop.__qualname__}"
    for loop in loops:
        if loop.get("_target_") == ours:
            return NodeAddress.read(builtin(loop.node))
    raise ConfigError(f"rollout.agent.agent_loop_config_path={path}: no agent loop there has _target_: {ours}")


def _hook(trainer: NodeTrainer, name: str) -> Callable[[], None]:
    """Return verl's own hook, which follows this class in the method resolution order."""
    hook: Callable[[], None] = getattr(super(NodeTrainer, trainer), name)
    return hook
