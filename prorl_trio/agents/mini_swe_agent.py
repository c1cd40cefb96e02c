"""mini-swe-agent, over Chat Completions (LiteLLM). A full context stops it."""

from __future__ import annotations

from typing import Final

from prorl_trio.agents.preset import Preset, Start, Started, python_program


def _start(start: Start) -> Started:
    options = ("--yolo", "--exit-immediately", "--cost-limit=0", f"--output={start.home}/trajectory.json")
    module = "minisweagent.run.mini"
    return Started(
        argv=python_program(start, module, *options, f"--model=openai/{start.model}", f"--task={start.instruction}"),
        env={
            "MSWEA_GLOBAL_CONFIG_DIR": start.home,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )


PRESET: Final = Preset(
    name="mini-swe-agent",
    source=("mini-swe-agent=={version}", "mcp==2.3.0"),
    index="pypi",
    versions=("2.4.6",),
    start=_start,
)
