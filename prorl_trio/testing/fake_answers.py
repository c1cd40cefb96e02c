"""Answers of a fake engine on the wire, whole or streamed, and their possible faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from prorl_trio.testing.fake_http import Answer

if TYPE_CHECKING:
    from prorl_trio.testing.fake_sampling import FakeRequest, Sampled

Fault = Literal[
    "server_error",  # status 500
    "reset_before_headers",  # the connection is reset before any byte of the answer
    "reset_after_headers",  # the connection ends in the middle of the body
    "hang",  # no answer until the client leaves
    "bad_json",  # status 200 and half a JSON document
    "drop_token_ids",
    "drop_logprobs",
    "count_mismatch",  # one log-probability fewer than tokens
    "usage_mismatch",  # the usage counts one token more
    "changed_prompt",  # the echoed prompt lacks its first token
    "nan_logprob",  # the literal NaN, which is not JSON
    "null_logprob",
    "clamped_logprob",  # -9999.0, vLLM's minus infinity
    "unknown_finish",
    "engine_error",  # only in a stream: an error instead of its second half
    "repeated_event",  # only in a stream: its second event is repeated
    "no_done",  # only in a stream: it ends properly, but before the last event
]
"""The possible faults of one completion."""

DONE = b"data: [DONE]\n\n"


def sse(body: bytes) -> bytes:
    """Return `body` as a server-sent event."""
    return b"data: " + body + b"\n\n"


def error_answer(status: int, message: str) -> Answer:
    """Return an error response with vLLM's wording."""
    return Answer(status, error_body(status, message))


def error_body(status: int, message: str) -> bytes:
    """Return the body of an error response."""
    error = {"message": message, "type": "FakeEngineError", "param": None, "code": status}
    return msgspec.json.encode({"error": error})


def completion_answer(request: FakeRequest, sampled: Sampled, fault: Fault | None) -> Answer:
    """Return a whole completion as answered by `/v1/completions`."""
    choice = _choice(request, sampled.token_ids, sampled.logprobs, sampled.finish_reason, fault, prompt=True)
    body = _faulty({"model": request.model, "choices": [choice], "usage": _usage(request, sampled, fault)}, fault)
    if fault == "reset_before_headers":
        return Answer(200, body, cut="before_headers")
    return Answer(200, body, cut="after_headers" if fault == "reset_after_headers" else "")


def completion_event(request: FakeRequest, sampled: Sampled, start: int, end: int, fault: Fault | None) -> bytes:
    """Return the event for tokens `start` to `end` of a streamed completion.

    The last event has the finish reason, too.
    """
    reason = sampled.finish_reason if end == len(sampled.token_ids) else None
    ids, logprobs = sampled.token_ids[start:end], sampled.logprobs[start:end]
    choice = _choice(request, ids, logprobs, reason, fault, prompt=start == 0)
    event: dict[str, Any] = {"model": request.model, "choices": [choice]}
    if request.stream_options.continuous_usage_stats:
        event["usage"] = {"prompt_tokens": len(request.prompt), "completion_tokens": end}
    return sse(_faulty(event, fault))


def usage_event(request: FakeRequest, sampled: Sampled, fault: Fault | None) -> bytes:
    """Return the event with the engine's own count, which ends a stream."""
    return sse(_faulty({"model": request.model, "choices": [], "usage": _usage(request, sampled, fault)}, None))


def _choice(
    request: FakeRequest,
    token_ids: list[int],
    sampled_logprobs: list[float],
    finish_reason: str | None,
    fault: Fault | None,
    *,
    prompt: bool,
) -> dict[str, Any]:
    logprobs: list[float | None] = list(sampled_logprobs)
    if fault == "null_logprob":
        logprobs[-1:] = [None]
    elif fault == "clamped_logprob":
        logprobs[-1:] = [-9999.0]
    elif fault == "count_mismatch":
        logprobs = logprobs[:-1]
    with_ids = request.return_token_ids and fault != "drop_token_ids"
    with_logprobs = request.logprobs is not None and fault != "drop_logprobs"
    unknown = finish_reason is not None and fault == "unknown_finish"
    return {
        "index": 0,
        "text": "",
        "finish_reason": "repetition" if unknown else finish_reason,
        "token_ids": token_ids if with_ids else None,
        "prompt_token_ids": request.prompt[fault == "changed_prompt" :] if with_ids and prompt else None,
        "logprobs": {"token_logprobs": logprobs, "tokens": [], "top_logprobs": []} if with_logprobs else None,
    }


def _usage(request: FakeRequest, sampled: Sampled, fault: Fault | None) -> dict[str, int]:
    count = len(sampled.token_ids) + (fault == "usage_mismatch")
    return {"prompt_tokens": len(request.prompt), "completion_tokens": count}


def _faulty(answer: dict[str, Any], fault: Fault | None) -> bytes:
    body = msgspec.json.encode({"id": "cmpl-fake", **answer})
    if fault == "nan_logprob":
        body = body.replace(b'"token_logprobs":[', b'"token_logprobs":[NaN,')
    return body[: len(body) // 2] if fault == "bad_json" else body
