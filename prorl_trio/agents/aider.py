"""aider, over Chat Completions (LiteLLM). It edits through the model's text, without tools. A full context stops it."""

from __future__ import annotations

import json
from typing import Final

from prorl_trio.agents.preset import Preset, Start, Started, python_program


def _start(start: Start) -> Started:
    limits = {"max_input_tokens": start.context_tokens, "max_output_tokens": start.output_tokens}
    facts = {
        **limits,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    options = (
        f"--model=openai/{start.model}",
        f"--openai-api-base={start.url}/v1",
        f"--model-metadata-file={start.home}/models.json",
        "--yes-always",
        "--no-auto-commits",
        "--no-dirty-commits",
        "--no-gitignore",
        "--no-pretty",
        "--no-check-update",
        "--no-show-release-notes",
        "--no-show-model-warnings",
        "--no-analytics",
        "--no-detect-urls",
        "--map-tokens=0",
    )
    return Started(
        argv=python_program(start, "aider", *options, f"--message={start.instruction}"),
        env={"HOME": start.home, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        files={"models.json": json.dumps({f"openai/{start.model}": facts})},
    )


PRESET: Final = Preset(
    name="aider",
    source=("aider-chat=={version}",),
    index="pypi",
    versions=("0.86.2",),
    start=_start,
)
