"""The account of a run's slots: what each place for a rollout was used for, at every moment. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Call", "PlacedRollout", "Slots", "account", "place_calls"]


class Call(msgspec.Struct, frozen=True):
    """A completion: when it was under way, in seconds of the run, and the tokens that it sampled."""

    start_s: float
    end_s: float
    tokens: int

    def tokens_until(self, at_s: float) -> float:
        """Return how many of them had come by then, if they came evenly."""
        if at_s >= self.end_s:
            return self.tokens
        return self.tokens * max(0.0, at_s - self.start_s) / (self.end_s - self.start_s)

    def seconds_until(self, at_s: float) -> float:
        """Return for how long it had been under way by then."""
        return max(0.0, min(self.end_s, at_s) - self.start_s)


class PlacedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout in its slot, with its calls in order, and the seconds in which it waited for tools."""

    start_s: float
    end_s: float
    calls: list[Call]
    tools_s: float = 0.0


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """Slot time, as shares that add up to 1, over the whole run or the part of it before its tail.

    Attributes:
        slots: how many.
        wall_s: length.
        tokens_per_s: sampled.
        calls: a completion is under way.
        tools: the policy's call of a tool is carried out.
        between: neither: prompts are rendered, answers read, calls scheduled.
        unready: the slot is empty, and there are rollouts left, none of which is ready: their sandboxes start.
        tail: the slot is empty since no rollout is left to start.
    """

    slots: int
    wall_s: float
    tokens_per_s: float
    calls: float
    tools: float
    between: float
    unready: float
    tail: float

    @property
    def tokens_per_call_s(self) -> float:
        """Return the tokens that came in a second of a call, on average: the speed of the engine for one caller."""
        return self.tokens_per_s / (self.calls * self.slots) if self.calls else 0.0


def place_calls(start_s: float, end_s: float, turns: Sequence[tuple[float, float, int]]) -> PlacedRollout:
    """Return a rollout whose turns are known by their durations: (seconds of the call, of the tools, tokens) each.

    The time that neither took is divided evenly before, between and after the turns.
    """
    rest_s = max(0.0, end_s - start_s - sum(call_s + tools_s for call_s, tools_s, _ in turns))
    gap_s = rest_s / (len(turns) + 1)
    calls, now_s = [], start_s
    for call_s, tools_s, tokens in turns:
        now_s += gap_s
        calls.append(Call(now_s, now_s + call_s, tokens))
        now_s += call_s + tools_s
    return PlacedRollout(start_s=start_s, end_s=end_s, calls=calls, tools_s=sum(tools_s for _, tools_s, _ in turns))


def account(rollouts: Sequence[PlacedRollout], slots: int, *, tail: bool) -> Slots:
    """Return what `slots` places were used for, from second 0 on: to the end, or without the `tail`.

    The tail begins when the last rollout has started: from then on slots get empty. Seconds of tools and between calls
    are taken to be spread evenly over a rollout.

    Raises:
        ValueError: all rollouts start at second 0, and the time before the tail is asked for.
    """
    last_start_s = max(rollout.start_s for rollout in rollouts)
    end_s = max(rollout.end_s for rollout in rollouts) if tail else last_start_s
    if end_s <= 0:
        raise ValueError(f"{len(rollouts)} rollouts in {slots} slots: all of the run is its tail")
    calls_s = tools_s = between_s = tokens = empty_after_s = used_s = 0.0
    for rollout in rollouts:
        here_s = max(0.0, min(rollout.end_s, end_s) - rollout.start_s)
        in_calls_s = sum(call.seconds_until(end_s) for call in rollout.calls)
        share = here_s / (rollout.end_s - rollout.start_s) if rollout.end_s > rollout.start_s else 0.0
        in_tools_s = min(rollout.tools_s * share, here_s - in_calls_s)
        used_s += here_s
        calls_s += in_calls_s
        tools_s += in_tools_s
        between_s += here_s - in_calls_s - in_tools_s
        tokens += sum(call.tokens_until(end_s) for call in rollout.calls)
    if tail:
        used_in_tail_s = sum(max(0.0, rollout.end_s - last_start_s) for rollout in rollouts)
        empty_after_s = slots * (end_s - last_start_s) - used_in_tail_s
    whole_s = slots * end_s
    return Slots(
        slots=slots,
        wall_s=end_s,
        tokens_per_s=tokens / end_s,
        calls=calls_s / whole_s,
        tools=tools_s / whole_s,
        between=between_s / whole_s,
        unready=(whole_s - used_s - empty_after_s) / whole_s,
        tail=empty_after_s / whole_s,
    )
