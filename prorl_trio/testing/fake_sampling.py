"""The sampling of a fake engine: a script's tokens, limited by the request; by default a deterministic "model"."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from prorl_trio.types.models import FinishReason

Script = Callable[[list[int]], tuple[list[int], list[float], FinishReason]]
"""Prompt ids -> (sampled ids, log-probabilities, finish reason)."""


class FakeStreamOptions(msgspec.Struct, frozen=True):
    """Request the engine's own count in the last part of a stream, or in each part."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class FakeStructuredOutputs(msgspec.Struct, frozen=True):
    """The required grammar of a completion, as JSON text."""

    structural_tag: str


class FakeRequest(msgspec.Struct, frozen=True):
    """The fields of `POST /v1/completions` that a fake engine uses; others are ignored."""

    model: str
    prompt: list[Annotated[int, msgspec.Meta(ge=0)]]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    return_token_ids: bool = False
    logprobs: int | None = None
    stream: bool = False
    stream_options: FakeStreamOptions = FakeStreamOptions()
    cache_salt: str = ""
    structured_outputs: FakeStructuredOutputs | None = None


class Sampled(msgspec.Struct, frozen=True):
    """A continuation of N tokens."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


def default_script(vocab_size: int, end_of_turn_id: int) -> Script:
    """Return a "model" whose next token and log-probability depend only on all previous ids.

    So a prompt always has the same continuation, and continuing a continuation is consistent. One token in 16 ends the
    turn. Otherwise ids 0 to 2, which are usually special tokens, are never sampled.
    """

    def script(prompt_token_ids: list[int]) -> tuple[list[int], list[float], FinishReason]:
        state = 0
        for token_id in prompt_token_ids:
            state = _mix(state, token_id)
        token_ids: list[int] = []
        logprobs: list[float] = []
        while not token_ids or token_ids[-1] != end_of_turn_id:
            token_ids.append(end_of_turn_id if state % 16 == 0 else 3 + state % (vocab_size - 3))
            logprobs.append(-0.001 - (state >> 8) % 1000 / 250)
            state = _mix(state, token_ids[-1])
        return token_ids, logprobs, "stop"

    return script


def sample(request: FakeRequest, script: Script, fallback: Script) -> Sampled:
    """Return the script's tokens, up to the first stop token (included) or `max_tokens`.

    A request that ignores the end of turn, such as a probe, gets tokens of `fallback` repeatedly, so that a
    turn-by-turn script does not advance.
    """
    if request.ignore_eos:
        script = fallback
    token_ids, logprobs, finish_reason = script(request.prompt)
    while request.ignore_eos and len(token_ids) < request.max_tokens:
        more_ids, more_logprobs, _ = script(request.prompt + token_ids)
        token_ids, logprobs = token_ids + more_ids, logprobs + more_logprobs
    for index, token_id in enumerate(token_ids[: request.max_tokens]):
        if token_id in request.stop_token_ids:
            return Sampled(token_ids[: index + 1], logprobs[: index + 1], "stop")
    if len(token_ids) > request.max_tokens or request.ignore_eos:
        return Sampled(token_ids[: request.max_tokens], logprobs[: request.max_tokens], "length")
    return Sampled(token_ids, logprobs, finish_reason)


def short_instance(form: dict[str, Any]) -> str:
    """Return a short text for a supported xgrammar grammar. Raises LookupError for others."""
    match form["type"]:
        case "json_schema":
            return json.dumps(_short_value(form["json_schema"]))
        case "any_text":
            return "hm"
        case "tag":
            return f"{form['begin']}{short_instance(form['content'])}{form['end']}"
        case "tags_with_separator":
            return short_instance(form["tags"][0])
        case "or":
            return short_instance(form["elements"][0])
        case "sequence":
            return "".join(map(short_instance, form["elements"]))
        case kind:
            raise LookupError(f"no form is called {kind!r}")


def _short_value(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type", "object"):
        case "object":
            wanted = schema.get("required", ())
            return {name: _short_value(of) for name, of in schema.get("properties", {}).items() if name in wanted}
        case "integer" | "number":
            return 1
        case kind:
            values: dict[Any, Any] = {"array": [], "string": "x", "boolean": True, "null": None}
            return values[kind]


def _mix(state: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(4, "little"), state)
