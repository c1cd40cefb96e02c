"""The transfer of TRL's weights to a node's engines, and the names of their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prorl_trio.integrations.trl.model_check import check_config, check_embedding, model_facts
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from prorl_trio.client import BlockingClient
    from prorl_trio.client.blocking import BlockingPolicyUpdate
    from prorl_trio.types.backends import PauseMode
    from prorl_trio.types.model_facts import ModelFacts
    from prorl_trio.weights.check import WeightCheck

_VOCABULARY_TENSORS = ("embed_tokens.weight", "wte.weight", "lm_head.weight")


class WeightTransfer:
    """`AsyncGRPOTrainer(weight_transfer=...)`: a policy update of a node (TRL's `WeightTransferProtocol`).

    Weights are transferred as a folder that the engines load. Version numbers continue from the node's own.

    Args:
        client: a session on the node; the rollout worker's, or another one.
        folder: on a file system that all engines see; None: /dev/shm, for engines on this host.
        base: the model folder that the engines were started with; None: the folder that they report, if visible here.
        mode: the handling of completions in flight; see `RolloutClient.policy_update`.
        timeout_s: limit in seconds for the pause, and for the load.
        check: the check of the weights before they are loaded; see `PolicyUpdate.load_folder`.
        config: the configuration of the trainer's model (`AutoConfig.from_pretrained(...)`). It is compared with the
            node's model, because weights alone do not determine their use. None: only weights are compared.
    """

    def __init__(
        self,
        client: BlockingClient,
        *,
        folder: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        mode: PauseMode = "wait",
        timeout_s: float = 600.0,
        check: WeightCheck = "values",
        config: Any = None,
    ) -> None:
        self._client = client
        self._folder = folder
        self._base = base
        self._mode: PauseMode = mode
        self._timeout_s = timeout_s
        self._check: WeightCheck = check
        self._config = config
        self._facts: ModelFacts | None = None
        self._version = 0
        self._open: BlockingPolicyUpdate | None = None

    def init_weight_transfer(self) -> None:
        """Request the node's model and version. Called once, before the first update.

        Raises:
            ConfigError: the trainer's model is a different one.
        """
        self._facts = model_facts(self._client)
        if self._config is not None:
            check_config(self._config, self._facts)
        self._version = newest_version(self._client)

    def pause(self) -> None:
        """Pause the engines.

        Raises the exceptions of `RolloutClient.policy_update`, without having changed anything.
        """
        update = self._client.policy_update(str(self._version + 1), mode=self._mode, timeout_s=self._timeout_s)
        update.__enter__()
        self._open = update

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Have the engines load these tensors. After an error they continue with the old ones.

        Raises:
            ConfigError: the model has another vocabulary.
            WeightsRefused: the tensors are incomplete, not finite, or of another model.
            PolicyUpdateFailed: an engine failed.
        """
        assert self._open is not None, "TRL pauses first"
        assert self._facts is not None, "TRL initializes first"
        try:
            tensors = _checked(iterator, self._facts)
            self._open.load_state_dict(tensors, self._folder, base=self._base, check=self._check)
        except BaseException as error:
            self._leave(error)
            raise

    def resume(self) -> None:
        """Resume the engines under the next version."""
        self._leave(None)
        self._version += 1

    def destroy(self) -> None:
        """Abandon an unfinished update. Called at the end of training, also after an error."""
        if self._open is not None:
            self._leave(RuntimeError("training has ended in the middle of a policy update"))

    def _leave(self, error: BaseException | None) -> None:
        assert self._open is not None, "TRL pauses first"
        update, self._open = self._open, None
        update.__exit__(type(error) if error is not None else None, error, None)


def _checked(tensors: Iterable[tuple[str, Any]], facts: ModelFacts) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, and check the tensors that have a row for each token.

    Raises:
        ConfigError: the model has another vocabulary than the node's.
    """
    for name, tensor in tensors:
        if name.endswith(_VOCABULARY_TENSORS):
            check_embedding(int(tensor.shape[0]), facts)
        yield name, tensor


def newest_version(client: BlockingClient) -> int:
    """Return the highest version of the node's engines; 0 if no version is a number.

    Raises:
        ConfigError: the node lacks an engine.
    """
    backends = client.list_backends().pool["backends"]
    if not backends:
        raise ConfigError("the node has no backend; add one before training begins")
    return max((int(each["policy_version"]) for each in backends if each["policy_version"].isdecimal()), default=0)
