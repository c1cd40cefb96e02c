"""The error for weights that no engine is asked to load."""

from __future__ import annotations

from prorl_trio.types.errors import ServiceError


class WeightsRefused(ServiceError):
    """Weights are incomplete, damaged, or not of the model that the engines serve. No engine was asked to load them.

    Attributes:
        tensor: the name of the first tensor that is at fault; empty where it is a file or a field of `config.json`.
    """

    code = "weights_refused"

    def __init__(self, message: str, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor
