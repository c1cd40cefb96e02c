"""Human-readable trajectories from before and after training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prorl_trio.types.models import Outcome


def write_examples(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Write the dialogues of `outcomes`, with their rewards and policy versions, as Markdown."""
    lines = [f"# {title}", ""]
    for outcome in outcomes:
        lines += [f"## {outcome.tags.get('family', outcome.instance_id)}: reward {outcome.reward}", ""]
        if outcome.trajectory is None:
            lines += [f"No trajectory: {outcome.error}", ""]
            continue
        versions = ", ".join(outcome.trajectory.policy_versions)
        lines += [f"Policy version {versions}, ended by `{outcome.trajectory.stop_reason}`.", ""]
        for turn in outcome.trajectory.turns:
            said = [(message.role, message.content) for message in turn.messages]
            for role, text in (*said, ("assistant", turn.text), *(("tool", text) for text in turn.observations)):
                lines += [f"**{role}**", "", *(f"    {line}" for line in text.strip().splitlines()), ""]
    path.write_text("\n".join(lines))
