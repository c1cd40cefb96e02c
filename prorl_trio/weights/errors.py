"""The error for weights that are rejected before any engine loads them."""

from __future__ import annotations

from prorl_trio.types.errors import ServiceError


class WeightsRefused(ServiceError):
    """The weights are incomplete, damaged, or of another model than the engines serve. No engine loaded them.

    Attributes:
        tensor: name of the first tensor at fault; empty if a file or a field of `config.json` is at fault.
    """

    code = "weights_refused"

    def __init__(self, message: str, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor
