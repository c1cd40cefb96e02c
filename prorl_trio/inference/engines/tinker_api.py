"""The part of the Tinker API that samples, without I/O.

Requests are JSON. A result is protobuf, as the SDK (0.38) demands it, or JSON from servers of older SDKs. It contains
no count of the sampled tokens, so only ids and log-probabilities can be compared.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from prorl_trio.inference.engines.answers import (
    CLAMPED_LOGPROB,
    MAX_LOGPROB,
    ContractBroken,
    Logprob,
    TokenId,
    Wanted,
    checked_completion,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prorl_trio.inference.engines.protocol import Completion

API: Final = "/api/v1"
PROTO: Final = "application/x-protobuf"
SCHEME: Final = "tinker://"
"""Begins the path of saved weights."""

_STOP_REASONS: Final = {0: "stop", 1: "length"}
_SEQUENCES, _STOP_REASON, _TOKENS, _LOGPROBS = 1, 1, 2, 3
_VARINT, _BYTES = 0, 2
_FIXED_BYTES: Final = {1: 8, 5: 4}


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters. `stop` null keeps the model's own end of turn; an empty list disables even that."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: list[int] | None


class SampleBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /api/v1/asample`. The server answers a repeated `seq_id` of a sampling session with the same future."""

    sampling_session_id: str
    seq_id: int
    prompt: dict[str, list[dict[str, msgspec.Raw | str]]]
    sampling_params: Sampling
    num_samples: int = 1
    type: str = "sample"


class Made(msgspec.Struct, frozen=True):
    """The id in the answer of a POST that creates a session, a sampling session or a future."""

    session_id: str = ""
    sampling_session_id: str = ""
    request_id: str = ""


class ServedModel(msgspec.Struct, frozen=True):
    """A model of the server. Some servers report only its name."""

    model_name: str | None = None
    max_context_length: int | None = None
    sampleable: bool | None = None


class Capabilities(msgspec.Struct, frozen=True):
    """The answer of `GET /api/v1/get_server_capabilities`."""

    supported_models: list[ServedModel]


class Sequence(msgspec.Struct, frozen=True):
    """One sample of a JSON result."""

    stop_reason: str
    tokens: list[TokenId]
    logprobs: list[Logprob] | None = None


class Result(msgspec.Struct, frozen=True):
    """A JSON answer of `POST /api/v1/retrieve_future`: a result, a failure, or a request to ask again."""

    type: str = ""
    error: str | None = None
    category: str = "unknown"
    sequences: list[Sequence] = []


def sample_request(wanted: Wanted, session_id: str, seq_id: int) -> bytes:
    """Return the JSON body that requests one continuation."""
    sampling = wanted.sampling
    how = Sampling(
        max_tokens=wanted.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        stop=[] if wanted.probing else sampling.stop_token_ids or None,
    )
    prompt: dict[str, msgspec.Raw | str] = {"type": "encoded_text", "tokens": wanted.prompt.text}
    body = SampleBody(sampling_session_id=session_id, seq_id=seq_id, prompt={"chunks": [prompt]}, sampling_params=how)
    return msgspec.json.encode(body)


def read_result(body: bytes) -> Result:
    """Decode a JSON answer of a future. Raises ContractBroken."""
    try:
        return msgspec.json.decode(body, type=Result)
    except msgspec.MsgspecError as exc:
        raise ContractBroken(f"the answer is not a sample to train on: {exc}") from exc


def completion_of(sample: bytes | Result, wanted: Wanted, version: str) -> Completion:
    """Return the completion in a result of a sampler whose weights are called `version`.

    Raises:
        ContractBroken: it cannot be trusted.
    """
    if isinstance(sample, bytes):
        sequences = [_sequence(value) for value in _values(sample, _SEQUENCES, _BYTES)]
    else:
        sequences = [(each.stop_reason, each.tokens, each.logprobs) for each in sample.sequences]
    if len(sequences) != 1:
        raise ContractBroken(f"asked for 1 continuation, got {len(sequences)}")
    stop_reason, token_ids, logprobs = sequences[0]
    if not logprobs and token_ids:
        raise ContractBroken("it drops log-probabilities (no logprobs in the answer)")
    if len(token_ids) != len(logprobs or ()):
        raise ContractBroken(f"it drops token ids or logprobs: {len(token_ids)} ids, {len(logprobs or ())} logprobs")
    # SkyRL's server ignores stop tokens in front of an external vLLM. What follows one is no part of the answer.
    stops = () if wanted.probing else wanted.sampling.stop_token_ids
    end = next((at for at, token_id in enumerate(token_ids, 1) if token_id in stops), 0)
    kept = end or len(token_ids)
    return checked_completion(
        wanted,
        token_ids=token_ids[:kept],
        logprobs=(logprobs or [])[:kept],
        sampled=kept,
        finish_reason="stop" if end else stop_reason,
        versions=[(version, 0, kept)] if kept else (),
        dropped=len(token_ids) - kept,
    )


def _sequence(message: bytes) -> tuple[str, Any, Any]:
    reason = (_values(message, _STOP_REASON, _VARINT) or [0])[-1]
    token_ids = _array("i", _values(message, _TOKENS, _BYTES))
    logprobs = _array("f", _values(message, _LOGPROBS, _BYTES))
    if token_ids and min(token_ids) < 0:
        raise ContractBroken(f"it returned a negative token id: {min(token_ids)}")
    if wrong := [value for value in logprobs if not CLAMPED_LOGPROB < value <= MAX_LOGPROB]:
        raise ContractBroken(f"it returned a log-probability that is none: {wrong[0]}")
    return _STOP_REASONS.get(reason, str(reason)), token_ids, logprobs


def _array(kind: Literal["i", "f"], values: list[bytes]) -> array[Any]:
    """Return the little-endian numbers of 4 bytes in the last of `values`."""
    found: array[Any] = array(kind)
    try:
        found.frombytes(values[-1] if values else b"")
    except ValueError as exc:
        raise ContractBroken(f"the answer is not a sample to train on: {exc}") from exc
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _values(message: bytes, number: int, kind: int) -> list[Any]:
    """Return the values of a field of a protobuf message."""
    try:
        return [value for field, wire, value in fields_of(message) if (field, wire) == (number, kind)]
    except (IndexError, KeyError) as exc:
        raise ContractBroken("the answer is not a whole protobuf message") from exc


def fields_of(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield number, wire type and value of each field of a protobuf message.

    Raises:
        IndexError, KeyError: the message is damaged.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, wire, value
            continue
        length, at = _varint(message, at) if wire == _BYTES else (_FIXED_BYTES[wire], at)
        if at + length > len(message):
            raise IndexError(at + length)
        yield number, wire, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
