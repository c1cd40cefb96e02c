"""A whole node with a made-up policy, as `examples/local_node.py` runs it, whose rollouts need no sandbox."""

from __future__ import annotations

import importlib.util
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prorl_trio.tasks.handlers.math import MathHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from prorl_trio.agent.context import RolloutContext

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_node.py"


class AnswersOnly(MathHandler):
    """Mathematics for a policy that calls no tool."""

    def sandbox_spec(self, context: RolloutContext) -> None:  # type: ignore[override]
        """Return None: there is nothing to run."""

    async def init(self, context: RolloutContext) -> None:
        """Make nothing ready."""


def load_example() -> Any:
    """Return the module of the example."""
    spec = importlib.util.spec_from_file_location("local_node_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@asynccontextmanager
async def open_quick_node(policy: Callable[[str], str] | None = None) -> AsyncIterator[Any]:
    """Yield the addresses of the node, as the example has them. Without `policy` it is the example's."""
    example = load_example()
    async with example.open_local_node(policy or example.guess, [AnswersOnly()], provider="process") as node:
        yield node
