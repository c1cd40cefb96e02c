"""A server of the Tinker API as an engine: Tinker itself, or the servers of SkyRL, Miles and others.

A sampling session has fixed weights: those of the base model, or of a checkpoint that a trainer saved for sampling. So
new weights need no pause, and each token has the version of its session, also if a completion outlasts an update.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import trio

from prorl_trio.http.client import split_path
from prorl_trio.http.connection import HttpError
from prorl_trio.inference.engines.answers import UNNAMED, context_limit, error_message
from prorl_trio.inference.engines.http_engine import (
    JSON_CONTENT,
    PROBE_PROMPT,
    PROBE_TOKENS,
    ClientOptions,
    HttpEngineClient,
)
from prorl_trio.inference.engines.protocol import CompletionTimedOut, EngineInfo, RequestRefused
from prorl_trio.inference.engines.tinker_api import (
    API,
    PROTO,
    SCHEME,
    Capabilities,
    Made,
    ServedModel,
    completion_of,
    read_result,
    sample_request,
)
from prorl_trio.types.errors import BackendError, ContextLengthExceeded

if TYPE_CHECKING:
    from typing import Unpack

    from prorl_trio.http.connection import Response
    from prorl_trio.inference.engines.answers import Wanted
    from prorl_trio.inference.engines.protocol import Completion

NAME: Final = "tinker"
"""The engine's name in spans, because no server reports one."""
POLL_S: Final = 60.0
"""Time limit of one poll for a result. Servers answer within 30 to 300 s that there is none yet."""
CANCEL_GRACE_S: Final = 2.0
SUBMISSIONS: Final = 3
"""Limit on submissions of a sample whose session or future the server has lost. None of its tokens was received."""

_OK, _FAILED, _NOT_FOUND, _TIMEOUT, _GONE, _BUSY = 200, 400, 404, 408, 410, 429
_LOST: Final = frozenset({_NOT_FOUND, _GONE})
_SESSION_OVER: Final = frozenset({_FAILED, 403, *_LOST})
_SENT: Final = frozenset({_OK, *_LOST})
_POLLED: Final = frozenset({_OK, _FAILED, _TIMEOUT, *_LOST})
_PATIENT: Final = frozenset({_BUSY})
_BACKPRESSURE: Final = ("X-Tinker-Sampling-Backpressure", "1")
"""The server may answer with status 429 at once, instead of keeping the request."""
_SDK: Final = "0.38.0"
"""The version of the SDK whose wire format this client has."""


class TinkerAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What a client of a Tinker server is configured with, beside its URL.

    Attributes:
        model: the base model; empty: the only one that the server offers.
        weights: the checkpoint to sample from at first, `tinker://...`; empty: the base model.
        api_key: empty for servers that require none.
    """

    model: str = ""
    weights: str = ""
    api_key: str = ""


class _Sampler(msgspec.Struct, frozen=True, kw_only=True):
    """A sampling session. `weights`: a checkpoint or the base model. `label`: the version of the policy."""

    weights: str
    session_id: str = ""
    label: str = UNNAMED


class TinkerClient(HttpEngineClient):
    """A client of one server. `load_weights` takes the path of a checkpoint, and opens a sampling session for it.

    The URL may have a path, as Tinker's own service does. A probe sends the session's heartbeat.
    """

    may_scale_logprobs: ClassVar[bool] = True

    def __init__(self, url: str, *, access: TinkerAccess | None = None, **options: Unpack[ClientOptions]) -> None:
        """Create the client without sending anything. See `HttpEngineClient` for `options`.

        Raises:
            BackendError: not retryable: the URL cannot be one.
        """
        origin, self._prefix = split_path(url)
        super().__init__(origin, **options)
        self.url = f"{self.url}{self._prefix}"
        self._access = access or TinkerAccess()
        self.headers = [("X-API-Key", self._access.api_key)] if self._access.api_key else []
        self._model = ""
        self._session_id = ""
        self._sampler = _Sampler(weights=self._access.weights)
        self._former: _Sampler | None = None
        self._seq_ids = count()
        self._sampler_numbers = count()
        self._opening = trio.Lock()

    async def is_there(self, *, timeout_s: float) -> bool:
        """See `EngineClient.is_there`. Recognises the list of models."""
        return await self._capabilities(timeout_s) is not None

    async def load_weights(self, folder: str, *, timeout_s: float) -> bool:
        """See `EngineClient.load_weights`. Samples two tokens from the checkpoint. Returns False for other folders.

        Completions in flight keep their session, and are recorded under its version.
        """
        info = self._info
        if info is None or not (folder.startswith(SCHEME) or folder == self._model):
            await trio.lowlevel.checkpoint()
            return False
        known = (self._sampler, *([self._former] if self._former else []))
        sampler = next((each for each in known if each.weights == folder), _Sampler(weights=folder))
        with trio.move_on_after(timeout_s):
            former, self._sampler = self._sampler, sampler
            try:
                await self._sample_probe(info, timeout_s)
            except BaseException:
                self._sampler = former
                raise
            if former.weights != folder:
                self._former = former
            return True
        raise BackendError(f"{self.url}: {folder} was not loaded within {timeout_s:g} s", retryable=True)

    async def label_weights(self, policy_version: str, *, timeout_s: float) -> bool:
        """See `EngineClient.label_weights`. The name is kept here, because the server has none."""
        del timeout_s
        await trio.lowlevel.checkpoint()
        self._sampler = msgspec.structs.replace(self._sampler, label=policy_version)
        return True

    async def read_label(self, *, timeout_s: float) -> str:
        del timeout_s
        await trio.lowlevel.checkpoint()
        return self._sampler.label

    async def _ask_info(self, timeout_s: float) -> EngineInfo:
        offered = await self._capabilities(timeout_s)
        if offered is None:
            raise self._unfit(f"it has no {API}/get_server_capabilities; is it a Tinker server?")
        model = self._chosen(offered.supported_models)
        self._model = model.model_name or ""
        if not self._sampler.weights:
            self._sampler = msgspec.structs.replace(self._sampler, weights=self._model)
        length = model.max_context_length or self._context_tokens
        if length < len(PROBE_PROMPT) + PROBE_TOKENS:
            raise self._unfit("it does not report how long a context may be; set backends.max_model_len")
        await self._beat(timeout_s)
        label = self._sampler.label
        return EngineInfo(
            url=self.url,
            model=self._model,
            max_model_len=length,
            engine=NAME,
            policy_version=label,
            label=label,
            api=f"{API}/asample",
            pausable=True,
            weights=self._sampler.weights,
            model_folder=self._model,
        )

    def _chosen(self, models: list[ServedModel]) -> ServedModel:
        found = [each for each in models if each.model_name and each.sampleable is not False]
        if self._access.model:
            found = [each for each in found if each.model_name == self._access.model]
        if len(found) == 1:
            return found[0]
        names = ", ".join(each.model_name or "?" for each in models) or "none"
        wanted = self._access.model or "one model alone, and backends.tinker.model is not set"
        raise self._unfit(f"wanted {wanted}; it offers: {names}")

    async def _capabilities(self, timeout_s: float) -> Capabilities | None:
        return await self._get_json(f"{self._prefix}{API}/get_server_capabilities", Capabilities, timeout_s)

    # ------------------------------------------------------------ sessions

    async def _beat(self, timeout_s: float) -> None:
        """Send a heartbeat, so that the server keeps the session. If it has lost it, the next sample opens another."""
        if not self._session_id:
            return
        asked = {"session_id": self._session_id, "type": "session_heartbeat"}
        response = await self._send("session_heartbeat", asked, timeout_s)
        if response.status in _SESSION_OVER:
            self._forget(self._session_id)
        elif response.status != _OK:
            self._refused("POST", f"{API}/session_heartbeat", response, 0)

    def _forget(self, session_id: str) -> None:
        """Forget a session that the server has lost, with its sampling sessions. Their weights and labels stay."""
        if session_id == self._session_id:
            self._session_id = ""
            self._sampler = msgspec.structs.replace(self._sampler, session_id="")
            self._former = None

    async def _opened(self, timeout_s: float) -> tuple[_Sampler, str]:
        """Return the sampling session of the current weights, and its session; open them first if necessary."""
        async with self._opening:
            if not self._session_id:
                asked: dict[str, Any] = {"tags": ["prorl-trio"], "user_metadata": None, "sdk_version": _SDK}
                self._session_id = (await self._make("create_session", asked, timeout_s)).session_id
            sampler, session_id = self._sampler, self._session_id
            if not sampler.session_id:
                source = "model_path" if sampler.weights.startswith(SCHEME) else "base_model"
                number = next(self._sampler_numbers)
                asked = {"session_id": session_id, "sampling_session_seq_id": number, source: sampler.weights}
                made = await self._make("create_sampling_session", asked, timeout_s)
                sampler = msgspec.structs.replace(sampler, session_id=made.sampling_session_id)
                if self._sampler.weights == sampler.weights:
                    self._sampler = sampler = msgspec.structs.replace(sampler, label=self._sampler.label)
            return sampler, session_id

    # ------------------------------------------------------------ samples

    async def _complete(self, wanted: Wanted) -> Completion:
        ends_s = trio.current_time() + wanted.timeout_s
        for _ in range(SUBMISSIONS):
            sampler, session_id = await self._opened(max(0.0, ends_s - trio.current_time()))
            request_id = await self._submit(sampler, wanted, ends_s)
            if request_id is None:
                self._forget(session_id)
                continue
            try:
                completion = await self._retrieve(request_id, sampler, wanted, ends_s)
            except BaseException:  # a cancel, or the time is over: nothing waits for the sample any more
                with trio.move_on_after(CANCEL_GRACE_S, shield=True), suppress(BackendError):
                    await self._send("cancel_future", {"request_id": request_id}, CANCEL_GRACE_S)
                raise
            if completion is not None:
                return completion
        raise BackendError(
            f"{self.url}: it lost the session or the sample {SUBMISSIONS} times; are the weights "
            f"{self._sampler.weights} still there?",
            retryable=True,
        )

    async def _submit(self, sampler: _Sampler, wanted: Wanted, ends_s: float) -> str | None:
        """Return the id of the sample's future; None if the server has lost the sampling session.

        A cancel waits for the id for up to `CANCEL_GRACE_S`, because without it the sample could not be stopped. A
        slower request is repeated with the same number, which a server answers with the same future.
        """
        body = sample_request(wanted, sampler.session_id, next(self._seq_ids))

        async def send() -> Response:
            path, left = f"{self._prefix}{API}/asample", _until(ends_s, wanted)
            return await self._post(path, body, left, headers=[_BACKPRESSURE], returned=_SENT, patient=_PATIENT)

        response = None
        with trio.move_on_after(CANCEL_GRACE_S, shield=True):
            response = await send()
        if response is None:
            response = await send()
        if response.status in _LOST:
            return None
        return self._made("asample", response).request_id

    async def _retrieve(self, request_id: str, sampler: _Sampler, wanted: Wanted, ends_s: float) -> Completion | None:
        """Wait for the result. Returns None if the server has lost the future, and so the sample."""
        body = msgspec.json.encode({"request_id": request_id})
        while True:
            try:
                response = await self._post(
                    f"{self._prefix}{API}/retrieve_future",
                    body,
                    _until(ends_s, wanted, POLL_S),
                    headers=[("Accept", PROTO)],
                    returned=_POLLED,
                    patient=_PATIENT,
                )
            except CompletionTimedOut:
                if trio.current_time() < ends_s:
                    continue
                raise
            if response.status in _LOST:
                return None
            if response.status == _TIMEOUT:
                continue
            if response.headers.get("content-type", "").startswith(PROTO):
                return completion_of(response.body, wanted, sampler.label)
            if response.status == _FAILED:  # SkyRL's answer to each failure, also of the engine behind it
                raise self._sample_failed(error_message(response.body), wanted)
            result = read_result(response.body)
            if result.type == "try_again":
                continue
            if result.error is not None:
                raise self._sample_failed(result.error, wanted, refused=result.category == "user")
            return completion_of(result, wanted, sampler.label)

    def _sample_failed(self, why: str, wanted: Wanted, *, refused: bool = False) -> Exception:
        limit = context_limit(why)
        if limit is not None:
            return ContextLengthExceeded(wanted.prompt.tokens, limit)
        said = f"{self.url}: the sample failed: {why}"
        return RequestRefused(said) if refused else BackendError(said, retryable=True)

    async def _make(self, name: str, fields: dict[str, Any], timeout_s: float) -> Made:
        response = await self._send(name, {**fields, "type": name}, timeout_s)
        if response.status != _OK:
            self._refused("POST", f"{API}/{name}", response, 0)
        return self._made(name, response)

    def _made(self, name: str, response: Response) -> Made:
        try:
            made = msgspec.json.decode(response.body, type=Made, strict=False)
        except msgspec.MsgspecError as exc:
            raise self._unfit(f"its answer to {API}/{name} is not what was expected: {exc}") from exc
        if made == Made():
            raise self._unfit(f"its answer to {API}/{name} contains no id: {error_message(response.body)}")
        return made

    async def _send(self, name: str, fields: dict[str, Any], timeout_s: float) -> Response:
        """Call an endpoint once."""
        body, headers = msgspec.json.encode(fields), [JSON_CONTENT, *self.headers]
        path = f"{self._prefix}{API}/{name}"
        try:
            return await self._http.request("POST", path, body=body, headers=headers, timeout_s=timeout_s)
        except HttpError as exc:
            raise self._failed(exc) from exc


def _until(ends_s: float, wanted: Wanted, at_most_s: float | None = None) -> Wanted:
    left_s = max(0.0, ends_s - trio.current_time())
    return msgspec.structs.replace(wanted, timeout_s=left_s if at_most_s is None else min(left_s, at_most_s))
