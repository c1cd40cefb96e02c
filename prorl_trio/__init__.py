"""Rollout-as-a-service for RL training of multi-turn LLM agents.

What a trainer and a handler's author need, under one name. Loaded on first use: importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prorl_ipc.limits import SandboxLimits
    from prorl_ipc.session import Accepted, Rejected
    from prorl_trio.agent.context import Resources, RolloutContext
    from prorl_trio.agent.loop import AgentEnd, NewDialogue, asking_service, run_agent, run_sub_agent
    from prorl_trio.agent.style import AgentStyle
    from prorl_trio.chat.conversation import ParsedTurn
    from prorl_trio.client import BlockingClient, RolloutClient, connect
    from prorl_trio.sampling import BlockingGroups, GroupRules, JobTemplate, open_groups
    from prorl_trio.sandbox.provider import ProviderReport, SandboxProvider, SandboxSpec
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.sandbox.transfer import TransferOptions, TransferReport
    from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation
    from prorl_trio.tools import BashTool, EditorTool, FinishTool, IpythonTool, Observation, Tool, ToolSet
    from prorl_trio.types.batch import PaddedBatch, pad_batch
    from prorl_trio.types.errors import (
        AgentFault,
        EvaluationError,
        HandlerError,
        MalformedJob,
        ProrlError,
        RolloutError,
        SandboxCallFailed,
        SandboxLost,
        SandboxUnavailable,
        ServiceError,
    )
    from prorl_trio.types.models import (
        AgentProgram,
        Budgets,
        ChatMessage,
        GroupPolicy,
        JobSpec,
        McpServer,
        Outcome,
        RetryPolicy,
        SamplingParams,
        Segment,
        TaskInstance,
        ToolCall,
        ToolResult,
        Trajectory,
        Turn,
    )

__all__ = [
    "Accepted",
    "AgentEnd",
    "AgentFault",
    "AgentHandler",
    "AgentProgram",
    "AgentStyle",
    "BashTool",
    "BlockingClient",
    "BlockingGroups",
    "Budgets",
    "ChatMessage",
    "EditorTool",
    "Evaluation",
    "EvaluationError",
    "FinishTool",
    "GroupPolicy",
    "GroupRules",
    "HandlerError",
    "IpythonTool",
    "JobSpec",
    "JobTemplate",
    "MalformedJob",
    "McpServer",
    "NewDialogue",
    "Observation",
    "Outcome",
    "PaddedBatch",
    "ParsedTurn",
    "ProrlError",
    "ProviderReport",
    "Rejected",
    "Resources",
    "RetryPolicy",
    "RolloutClient",
    "RolloutContext",
    "RolloutError",
    "SamplingParams",
    "Sandbox",
    "SandboxCallFailed",
    "SandboxLimits",
    "SandboxLost",
    "SandboxProvider",
    "SandboxSpec",
    "SandboxUnavailable",
    "Segment",
    "ServiceError",
    "TaskInstance",
    "Tool",
    "ToolCall",
    "ToolResult",
    "ToolSet",
    "Trajectory",
    "TransferOptions",
    "TransferReport",
    "Turn",
    "asking_service",
    "connect",
    "open_groups",
    "pad_batch",
    "run_agent",
    "run_sub_agent",
]

_HOMES = {
    "prorl_ipc.limits": "SandboxLimits",
    "prorl_ipc.session": "Accepted Rejected",
    "prorl_trio.agent.context": "Resources RolloutContext",
    "prorl_trio.agent.loop": "AgentEnd NewDialogue asking_service run_agent run_sub_agent",
    "prorl_trio.agent.style": "AgentStyle",
    "prorl_trio.chat.conversation": "ParsedTurn",
    "prorl_trio.client": "BlockingClient RolloutClient connect",
    "prorl_trio.sampling": "BlockingGroups GroupRules JobTemplate open_groups",
    "prorl_trio.tasks.handlers.base": "AgentHandler Evaluation",
    "prorl_trio.sandbox.provider": "ProviderReport SandboxProvider SandboxSpec",
    "prorl_trio.sandbox.sandbox": "Sandbox",
    "prorl_trio.sandbox.transfer": "TransferOptions TransferReport",
    "prorl_trio.tools": "BashTool EditorTool FinishTool IpythonTool Observation Tool ToolSet",
    "prorl_trio.types.batch": "PaddedBatch pad_batch",
    "prorl_trio.types.errors": "AgentFault EvaluationError HandlerError MalformedJob ProrlError "
    "RolloutError SandboxCallFailed SandboxLost SandboxUnavailable ServiceError",
    "prorl_trio.types.models": "AgentProgram Budgets ChatMessage GroupPolicy JobSpec McpServer Outcome RetryPolicy "
    "SamplingParams Segment TaskInstance ToolCall ToolResult Trajectory Turn",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
