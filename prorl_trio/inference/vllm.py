"""A vLLM server as an engine: token ids in, token ids and log-probabilities out, every count checked."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NoReturn, TypeVar
from urllib.parse import quote

import msgspec
import trio

from prorl_trio.errors import BackendError, ContextLengthExceeded
from prorl_trio.inference.engine import Completion, EngineClient, EngineInfo
from prorl_trio.inference.http import (
    ConnectFailed,
    ConnectionLost,
    HttpClient,
    HttpError,
    HttpLimits,
    Response,
    ResponseMalformed,
    ResponseTooLarge,
)
from prorl_trio.inference.vllm_api import (
    ContractBroken,
    ModelList,
    Version,
    WeightInfo,
    completion_request,
    context_limit,
    error_message,
    read_completion,
)
from prorl_trio.models import SamplingParams

if TYPE_CHECKING:
    from prorl_trio.inference.gate import PauseMode

__all__ = ["OnCall", "RetryPolicy", "VllmClient"]

RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
MAX_REQUEST_ID_CHARS = 200
PROBE_PROMPT = [1, 2, 3]
PROBE_TOKENS = 2

OnCall = Callable[[str, str, float], None]
"""Told of the URL, how a call ended (completed, failed, cancelled), and its seconds with retries. Must not raise."""

_PROBE_SAMPLING = SamplingParams(max_output_tokens=PROBE_TOKENS)
_Answer = TypeVar("_Answer", ModelList, Version, WeightInfo)


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often a call that was not answered is sent again, and after what delay: it doubles, and between half and all
    of it is waited, at random.

    With the defaults a dead backend is given up after 9 to 18 s, so that its tasks can move to another one.
    """

    max_attempts: int = 8
    first_delay_s: float = 0.25
    max_delay_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be >= 1, got {self.max_attempts}")

    def delay_s(self, attempt: int, random: Random) -> float:
        """Seconds to wait after failed attempt number `attempt`, counted from 1."""
        ceiling_s = min(self.first_delay_s * 2.0 ** (attempt - 1), self.max_delay_s)
        return ceiling_s * random.uniform(0.5, 1.0)


class VllmClient(EngineClient):
    """One vLLM server over its `/v1/completions`. See `EngineClient` for what the methods promise."""

    def __init__(
        self,
        url: str,
        *,
        max_connections: int = 512,
        retry: RetryPolicy | None = None,
        random: Random | None = None,
        on_call: OnCall | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: the server's origin, as `http://127.0.0.1:8000`, without `/v1`.
            max_connections: calls that run at once; more wait, first come first served.
            retry: when and how often.
            random: draws the jitter of the retries.
            on_call: told of every `generate` that ended.

        Raises:
            BackendError: not retryable: `url` is not an origin.
        """
        try:
            self._http = HttpClient(url, limits=HttpLimits(max_connections=max_connections))
        except ValueError as exc:
            raise BackendError(f"backend URL: {exc}", retryable=False) from exc
        self.url = self._http.origin
        self._retry = retry or RetryPolicy()
        self._random = random or Random()
        self._on_call = on_call
        self._info: EngineInfo | None = None

    def __repr__(self) -> str:
        return f"<VllmClient of {self._http!r}>"

    @property
    def http(self) -> HttpClient:
        """The connections, for their `statistics()`."""
        return self._http

    async def probe(self, *, timeout_s: float) -> EngineInfo:
        """See `EngineClient.probe`. Nothing is retried. Also refreshes what `generate` knows about the server."""
        with trio.move_on_after(timeout_s):
            info = await self._ask_info(timeout_s)
            body = completion_request(
                info.model, PROBE_PROMPT, _PROBE_SAMPLING, max_tokens=PROBE_TOKENS, ignore_eos=True
            )
            response = await self._probe_call("POST", "/v1/completions", body, timeout_s)
            completion = self._read(response, PROBE_PROMPT, PROBE_TOKENS, info)
            if len(completion.token_ids) != PROBE_TOKENS:
                raise self._unfit(f"asked for {PROBE_TOKENS} tokens, it sampled {len(completion.token_ids)}")
            self._info = info
            return info
        raise BackendError(f"{self.url}: the probe took more than {timeout_s:g} s", retryable=True)

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        request_id: str,
        timeout_s: float,
    ) -> Completion:
        """See `EngineClient.generate`. `max_tokens` is cut to what the context has left; the reason is then `length`.

        Raises:
            RuntimeError: no `probe` has succeeded yet.
            ValueError: an empty prompt, or `max_tokens` below 1.
        """
        info = self._info
        if info is None:
            raise RuntimeError(f"{self.url}: probe() must succeed before generate()")
        if not prompt_token_ids or max_tokens < 1:
            raise ValueError(f"need a prompt and max_tokens >= 1, got {len(prompt_token_ids)} ids and {max_tokens}")
        room = info.max_model_len - len(prompt_token_ids)
        if room < 1:
            raise ContextLengthExceeded(len(prompt_token_ids), info.max_model_len)
        budget = min(max_tokens, room)
        body = completion_request(info.model, prompt_token_ids, sampling, max_tokens=budget)
        started_s, result = trio.current_time(), "cancelled"
        try:
            response = await self._send_until_answered(body, request_id, timeout_s)
            if response.status != 200:
                self._refused("POST", "/v1/completions", response, len(prompt_token_ids))
            completion = self._read(response, prompt_token_ids, budget, info)
            result = "completed"
        except (BackendError, ContextLengthExceeded):
            result = "failed"
            raise
        finally:
            if self._on_call is not None:
                self._on_call(self.url, result, trio.current_time() - started_s)
        return completion

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> bool:
        """See `EngineClient.pause`. Only a server in development mode (`VLLM_SERVER_DEV_MODE=1`) offers it."""
        response = await self._control(f"/pause?mode={mode}", timeout_s)
        return response.status == 200

    async def resume(self, *, timeout_s: float) -> None:
        """See `EngineClient.resume`."""
        await self._control("/resume", timeout_s)

    async def _control(self, path: str, timeout_s: float) -> Response:
        """One call, not retried: status 200, or 404 where the server does not have it."""
        try:
            response = await self._http.request("POST", path, body=b"", headers=[], timeout_s=timeout_s)
        except HttpError as exc:
            raise self._failed(exc) from exc
        if response.status not in (200, 404):
            self._refused("POST", path, response, 0)
        return response

    async def aclose(self) -> None:
        """Close every connection. Calls in flight raise `BackendError`. Idempotent."""
        self._http.close()
        await trio.lowlevel.checkpoint()

    # ------------------------------------------------------------ generate

    async def _send_until_answered(self, body: bytes, request_id: str, timeout_s: float) -> Response:
        """Send, and send again after a delay, until an answer comes that sending again would not change.

        A request is never repeated once a byte of its answer came.
        """
        started_s = trio.current_time()
        for attempt in range(1, self._retry.max_attempts + 1):
            left_s = max(0.0, started_s + timeout_s - trio.current_time())
            try:
                response = await self._post_completion(body, f"{request_id}.{attempt}", left_s)
                if response.status not in RETRYABLE_STATUSES:
                    return response
                failure = f"status {response.status}: {error_message(response.body)}"
            except (ConnectFailed, ConnectionLost) as exc:
                if isinstance(exc, ConnectionLost) and exc.received_bytes:
                    raise self._failed(exc) from exc
                failure = str(exc)
            except HttpError as exc:
                raise self._failed(exc) from exc
            delay_s = self._retry.delay_s(attempt, self._random)
            if attempt == self._retry.max_attempts or trio.current_time() + delay_s >= started_s + timeout_s:
                break
            await trio.sleep(delay_s)
        used_s = trio.current_time() - started_s
        raise BackendError(
            f"{self.url}: {failure}; gave up after {attempt} attempts in {used_s:.1f} s of {timeout_s:g} s",
            retryable=True,
        )

    async def _post_completion(self, body: bytes, request_id: str, timeout_s: float) -> Response:
        # Job ids are the submitter's and may hold anything; a header may not.
        header = quote(request_id, safe="/:+@ ")[-MAX_REQUEST_ID_CHARS:]
        headers = [("Content-Type", "application/json"), ("X-Request-Id", header)]
        return await self._http.request("POST", "/v1/completions", body=body, headers=headers, timeout_s=timeout_s)

    # ------------------------------------------------------------ probe

    async def _ask_info(self, timeout_s: float) -> EngineInfo:
        models = await self._get("/v1/models", ModelList, timeout_s)
        if models is None or not models.data:
            raise self._unfit("it lists no model at /v1/models; is it a vLLM server?")
        card = models.data[0]
        if card.max_model_len is None or card.max_model_len < len(PROBE_PROMPT) + PROBE_TOKENS:
            raise self._unfit(f"it reports a max_model_len of {card.max_model_len}")
        version = await self._get("/version", Version, timeout_s)
        weights = await self._get("/weight_info", WeightInfo, timeout_s)
        return EngineInfo(
            url=self.url,
            model=card.id,
            max_model_len=card.max_model_len,
            engine=f"vllm {version.version}" if version else "vllm",
            policy_version=(weights.weight_version if weights else None) or "0",
        )

    async def _get(self, path: str, kind: type[_Answer], timeout_s: float) -> _Answer | None:
        """The decoded answer, or None if the server does not know `path`."""
        response = await self._probe_call("GET", path, b"", timeout_s)
        if response.status == 404:
            return None
        try:
            return msgspec.json.decode(response.body, type=kind)
        except msgspec.MsgspecError as exc:
            raise self._unfit(f"{path} is not what vLLM sends: {exc}") from exc

    async def _probe_call(self, method: str, path: str, body: bytes, timeout_s: float) -> Response:
        """One call, not retried: status 200, or 404 for a GET."""
        headers = [("Content-Type", "application/json"), ("X-Request-Id", "prorl-probe")]
        try:
            response = await self._http.request(method, path, body=body, headers=headers, timeout_s=timeout_s)
        except HttpError as exc:
            raise self._failed(exc) from exc
        if response.status != 200 and (method, response.status) != ("GET", 404):
            self._refused(method, path, response, len(PROBE_PROMPT))
        return response

    # ------------------------------------------------------------ answers and errors

    def _read(self, response: Response, prompt_token_ids: list[int], max_tokens: int, info: EngineInfo) -> Completion:
        try:
            return read_completion(response.body, prompt_token_ids, max_tokens, info)
        except ContractBroken as exc:
            raise self._unfit(str(exc)) from exc

    def _refused(self, method: str, path: str, response: Response, prompt_tokens: int) -> NoReturn:
        """Raise for a status that is not 200."""
        message = error_message(response.body)
        limit = context_limit(message) if response.status == 400 else None
        if limit is not None:
            raise ContextLengthExceeded(prompt_tokens, limit)
        raise BackendError(
            f"{self.url}: {method} {path} was answered by status {response.status}: {message}",
            retryable=response.status in RETRYABLE_STATUSES,
        )

    def _failed(self, exc: HttpError) -> BackendError:
        breach = isinstance(exc, ResponseMalformed | ResponseTooLarge)
        return BackendError(f"{self.url}: {exc}", retryable=not breach)

    def _unfit(self, reason: str) -> BackendError:
        return BackendError(f"{self.url}: not fit for token-exact rollouts: {reason}", retryable=False)
