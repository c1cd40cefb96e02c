"""What agents that people have meet while they work on a task: scripted turns of the policy, and faults on the way.

A scenario is played to the real client in a sandbox (`play`), or a recording of it to the gateway alone
(`support.agent_recordings`). Either way the trainer gets the same segments: `tests/data/agent_segments.txt`.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prorl_trio.edges.gateway import app as app_module
from prorl_trio.edges.gateway import serve
from prorl_trio.edges.gateway.wire import Problem
from prorl_trio.edges.http1 import ConnectionEnded
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import SamplingParams
from support.whole_node import job, open_service, outcome_of

if TYPE_CHECKING:
    from collections.abc import Mapping

SHELLS = {
    "claude-code": ("Bash", "command", {"description": "Look"}),
    "codex": ("exec_command", "cmd", {}),
    "gemini-cli": ("run_shell_command", "command", {}),
    "mini-swe-agent": ("bash", "command", {}),
    "opencode": ("bash", "command", {"description": "Look"}),
    "pi": ("bash", "command", {}),
}
"""What each client calls the tool that runs a command, its argument, and what else that wants."""
ANSWER = "It is \\boxed{42}."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
SUMMARY = "<analysis>\nAll.\n</analysis>\n\n<summary>\nThe second command printed mark-2.\n</summary>"
MAIN = re.compile("What is 6")


def call(name: str, **arguments: Any) -> str:
    """A call, spelled as no JSON encoder spells it."""
    fields = ",  ".join(f"{json.dumps(key)} : {json.dumps(value)}" for key, value in arguments.items())
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {{ {fields} }}}}\n</tool_call>'


def shell(client: str, number: int, before: str = "") -> str:
    """The call of a client's shell that prints `mark-NUMBER`, a text that no call has."""
    name, argument, others = SHELLS[client]
    return call(name, **{argument: f"{before}printf mark-; expr {number - 1} + 1"}, **others)


def marks(prompt: str) -> int:
    """The number of the last command that has been run, of those below 7."""
    return max((int(each) for each in re.findall("mark-([1-6])", prompt)), default=0)


def end(client: str) -> str:
    """The turn that ends the work."""
    return ANSWER + (call("bash", command=SUBMIT) if client == "mini-swe-agent" else "")


def plain(client: str, prompt: str) -> str:
    """Two commands, with reasoning and text beside, and the answer."""
    if client == "opencode" and "title" in prompt[-2000:]:
        return "A title"
    if marks(prompt) < 2:
        return f"{THOUGHT}I look.  \n\n{shell(client, marks(prompt) + 1)}"
    return end(client)


def in_parallel(client: str, prompt: str) -> str:
    """Two commands at once."""
    if plain(client, prompt) == "A title" or marks(prompt):
        return plain(client, prompt + "mark-2")
    return f"Both.\n{shell(client, 1)}\n{shell(client, 2)}"


def sub_agent(client: str, prompt: str) -> str:
    """Another agent is asked, which runs a command; the first one runs one beside, and waits."""
    if not MAIN.search(prompt):
        return "The child has seen it." if "mark-7" in prompt else shell(client, 7)
    if client == "codex":
        if "agent_id" not in prompt:
            return call("multi_agent_v1__spawn_agent", message="SUBTASK: look around.")
        found = re.search(r'agent_id[\\"]*: *[\\"]*([0-9a-f-]+)', prompt)
        if marks(prompt) < 1:
            return shell(client, 1)
        if "has seen it" not in prompt:
            return call("multi_agent_v1__wait_agent", targets=[found[1] if found else ""], timeout_ms=30000)
        return ANSWER
    if "SUBTASK" not in prompt:
        return call(
            "Agent", description="Look", prompt="SUBTASK: look around.", subagent_type="general-purpose",
            run_in_background=False,
        )  # fmt: skip
    return ANSWER if marks(prompt) else shell(client, 1)


def compaction(client: str, prompt: str) -> str:
    """Three commands; where the client asks for a summary, one that has their output."""
    if "<tools>" not in prompt or "Do NOT call any tools" in prompt[-8000:]:
        return "A title" if "title" in prompt[-2000:] else SUMMARY
    return (
        end(client) if marks(prompt) >= 3 else shell(client, marks(prompt) + 1, "head -c 2500 /dev/zero | tr '\\0' x; ")
    )


def bad_arguments(client: str, prompt: str) -> str:
    """A call whose arguments break off; then the plain dialogue."""
    name, argument, _ = SHELLS[client]
    if "Broken" in prompt or (client == "opencode" and "title" in prompt[-2000:]):
        return plain(client, prompt)
    return f'Broken.\n<tool_call>\n{{"name": "{name}", "arguments": {{"{argument}": "ls -la\n</tool_call>'


def unknown_tool(client: str, prompt: str) -> str:
    """A call of a tool that there is not; then the plain dialogue."""
    if "no_such_tool" in prompt or (client == "opencode" and "title" in prompt[-2000:]):
        return plain(client, prompt)
    return "Unknown.\n" + call("no_such_tool", a=1)


class Policy:
    """What is said after a prompt. With `once`, that is said once after the first command."""

    def __init__(self, scenario: Scenario, client: str) -> None:
        self._say, self._client, self._once = scenario.policy, client, scenario.once
        self._said: list[str] = []

    def __call__(self, prompt: str) -> str:
        begun = prompt.rpartition("<|im_start|>assistant\n")[2]
        if begun:  # a long turn is sampled in several pieces
            return next(each.removeprefix(begun) for each in reversed(self._said) if each.startswith(begun))
        if self._once and marks(prompt) == 1:
            said, self._once = self._once, ""
        else:
            said = self._say(self._client, prompt)
        self._said.append(said)
        return said


@dataclass(frozen=True)
class Scenario:
    """`faults`: by the number of a request that has tools, from 1: what its client gets in place of the answer."""

    policy: Any
    faults: Mapping[int, str] = field(default_factory=dict)
    once: str = ""


SCENARIOS = {
    "plain": Scenario(plain),
    "parallel": Scenario(in_parallel),
    "sub-agent": Scenario(sub_agent),
    "overflow": Scenario(compaction, {3: "overflow"}),
    "unavailable": Scenario(plain, {2: "unavailable", 3: "unavailable"}),
    "error": Scenario(plain, {2: "error"}),
    "cut": Scenario(plain, {2: "cut"}),
    "arguments": Scenario(bad_arguments),
    "unknown": Scenario(unknown_tool),
    "empty": Scenario(plain, once=THOUGHT),
    "length": Scenario(plain, once="blah " * 300),
    "own count": Scenario(compaction),
}
OWN_COUNT = {"claude-code": 60_000, "codex": 53_000}
"""The context at which a client shortens its history by its own count, before the gateway has to refuse it."""


def context_tokens(client: str, name: str) -> int:
    """Return the most tokens that a dialogue of a scenario may have."""
    return OWN_COUNT[client] if name == "own count" else 200_000


EVERY = [
    (client, name)
    for client in SHELLS
    if client != "opencode"
    for name in SCENARIOS
    if client in OWN_COUNT or name not in ("sub-agent", "own count")
]
MAX_OUTPUT_TOKENS = 800


class Faulty(app_module.GatewayApp):
    """A gateway's application that notes each request and its answer in `heard`, and plays the faults of a scenario."""

    heard: list[dict[str, Any]]
    faults: dict[int, str]
    asked: int

    async def _answer(self, route, asked, gateway, receive, send):
        entry = self.heard[-1]
        listening: Any = Listening(gateway, entry)
        fault = None
        if route.operation != "count" and asked.question.tools:
            type(self).asked += 1
            fault = entry["fault"] = self.faults.get(self.asked, "")
        if fault == "overflow":
            raise Problem("overflow", "", prompt_tokens=213_462, limit_tokens=200_000)
        if fault == "unavailable":
            raise Problem("unavailable", "busy", retry_after_s=1)
        if fault:
            send = cutting(send, route.dialect.problem_event(Problem("unavailable", "busy"), asked), fault)
        await super()._answer(route, asked, listening, receive, send)

    async def __call__(self, scope, receive, send):
        body = b""
        more = scope["method"] == "POST"
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"]
        self.heard.append({"path": path, "headers": headers, "body": body, "fault": ""})
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed():
            return given.pop() if given else await receive()

        await super().__call__(scope, replayed, send)


def cutting(send, problem, fault):
    """A `send` that hands out half of a stream: then a problem, or nothing but the connection's end."""

    async def sent(message):
        body = message.get("body", b"")
        if (
            message["type"] != "http.response.body"
            or not message.get("more_body")
            or (b"[DONE]" not in body and len(body) < 1500)
        ):
            await send(message)
            return
        half = body[: body.index(b"\n\n", len(body) // 3) + 2]
        await send({**message, "body": half + (problem if fault == "error" else b"")})
        raise ConnectionEnded

    return sent


class Listening:
    """A gateway whose answers are noted."""

    def __init__(self, gateway, entry):
        self._gateway, self._entry = gateway, entry

    def __getattr__(self, name):
        return getattr(self._gateway, name)

    async def ask(self, question):
        answer = await self._gateway.ask(question)
        turn = self._gateway._by_key[answer.key]
        conversation = turn.line.turns.conversation
        place = conversation.completion_ranges[turn.index]
        ids = conversation.token_ids_of(place.segment)[place.start : place.end]
        self._entry |= {"key": answer.key, "ids": list(ids), "served": [answer.text, answer.reasoning]}
        return answer


@contextmanager
def hearing(monkeypatch, faults):
    """Have every gateway of this process note what it hears in the list that this yields."""
    heard: list[dict[str, Any]] = []
    kind = type("Heard", (Faulty,), {"heard": heard, "faults": dict(faults), "asked": 0})
    monkeypatch.setattr(serve, "GatewayApp", kind)
    yield heard


async def play(tmp_path, monkeypatch, client: str, name: str):
    """Let a client work on a task; return the outcome, and what was heard of it."""
    scenario = SCENARIOS[name]
    policy = Policy(scenario, client)
    with hearing(monkeypatch, scenario.faults) as heard:
        async with open_service(tmp_path, provider="bubblewrap", policy=policy, max_model_len=1_000_000) as (
            url,
            engine,
            _ends,
        ):
            sampling = SamplingParams(max_output_tokens=MAX_OUTPUT_TOKENS)
            most = context_tokens(client, name)
            spec = job("j", agent=client, sampling=sampling, max_turns=16, max_trajectory_tokens=most)
            outcome = await outcome_of(url, spec)
            prompts = {tuple(request.prompt) for request in engine.requests}
            tiny = make_tiny_model(tmp_path / "model")
    for entry in heard:
        entry["said"] = tiny.decode(entry.pop("ids", []))
        entry["body"] = entry["body"].decode()
    return outcome, heard, prompts
