"""Reward files, as written by a task's own verifier: `reward.json` and `reward.txt`."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from prorl_ipc.wire import UNDECODABLE

REWARD_FILES: Final = ("reward.json", "reward.txt")
"""File names in the order in which they are tried."""
MAX_REWARD_BYTES: Final = 64 * 1024


def parse_rewards(name: str, content: bytes) -> dict[str, float]:
    """Return the rewards in a file by key; a plain number has the key `reward`.

    Raises:
        ValueError: the file is empty, is neither a number nor a table of numbers, or contains a number that is not
            finite.
    """
    if not content.strip():
        raise ValueError(f"{name} is empty")
    value: Any = content.decode(errors="replace")
    if name.endswith(".json"):
        try:
            value = msgspec.json.decode(content)
        except UNDECODABLE as exc:
            raise ValueError(f"{name} is no JSON: {exc}") from exc
    else:
        try:
            value = float(value)
        except ValueError as exc:
            raise ValueError(f"{name} is no number: {value[:60]!r}") from exc
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not rewards:
        raise ValueError(f"{name} has no reward")
    return {key: _number(name, key, each) for key, each in rewards.items()}


def _number(name: str, key: str, value: Any) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"{name}: {key} is a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: {key} is not finite")
    return number


def scalar_reward(rewards: dict[str, float]) -> float:
    """Return the single reward: the key `reward`, or the only key.

    Raises:
        ValueError: there are several keys, but not `reward`.
    """
    if "reward" in rewards:
        return rewards["reward"]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    raise ValueError(f"there are rewards for {', '.join(sorted(rewards))}, and none is called `reward`")
