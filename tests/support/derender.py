"""vLLM's own reading of sampled tokens as an answer of Chat Completions, beside what the gateway serves of them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from prorl_launch.paths import model_dir
from prorl_trio.agent.said import served_calls
from prorl_trio.chat.conversation import Conversation
from prorl_trio.chat.format import ChatFormat
from prorl_trio.http.client import HttpClient
from prorl_trio.types.models import ChatMessage
from support.gateway_client import TOOLS

SERVER_ARGS = ["--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
OFFERED = TOOLS["/v1/chat/completions"]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at":  "ü\\n"}}\n</tool_call>'
TURNS = ["Hi there.", CALL, f"I look.\n{CALL}\n{CALL}", "It is <tool> {}."]


async def derendered(http: HttpClient, ids: list[int]) -> tuple[str, list[Any]]:
    """Return the text and the calls that vLLM reads in these tokens."""
    body = {
        "generate_response": {
            "request_id": "r",
            "choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}],
        },
        "chat_request": {"messages": [{"role": "user", "content": "x"}], "tools": OFFERED},
    }
    headers = [("Content-Type", "application/json")]
    path = "/v1/chat/completions/derender"
    response = await http.request("POST", path, body=msgspec.json.encode(body), headers=headers, timeout_s=120)
    assert response.status == 200, response.body
    message = json.loads(response.body)["choices"][0]["message"]
    calls = [each["function"] for each in message.get("tool_calls") or []]
    return message["content"] or "", [(call["name"], json.loads(call["arguments"])) for call in calls]


async def check_derender(url: str) -> None:
    """Hold what the gateway serves of turns against what vLLM reads in the same tokens."""
    chat, http = ChatFormat.load(model_dir()), HttpClient(url)
    try:
        for said in TURNS:
            conversation = Conversation(chat, [ChatMessage(role="user", content="x")], OFFERED)
            ids = chat.codec.encode(said)
            parsed = conversation.add_completion([*ids, chat.end_of_turn_id], [-0.5] * (len(ids) + 1))
            text, calls = served_calls(parsed, "0")
            theirs, their_calls = await derendered(http, ids)
            assert (text.strip(), [(call.name, call.parsed) for call in calls]) == (theirs.strip(), their_calls)
            assert bool(calls) == ("<tool_call>" in said)
    finally:
        http.close()
