"""The base of engine clients over HTTP: retries within the budget, probes, and the classification of failures."""

from __future__ import annotations

import abc
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import count
from random import Random
from typing import TYPE_CHECKING, ClassVar, NamedTuple, NoReturn, TypedDict, TypeVar
from urllib.parse import quote

import msgspec
import trio

from prorl_trio.http.client import RETRYABLE_STATUSES, HttpClient, RetryPolicy
from prorl_trio.http.connection import (
    ConnectFailed,
    ConnectionLost,
    HttpError,
    HttpLimits,
    RequestTimedOut,
    Response,
    ResponseMalformed,
    ResponseTooLarge,
)
from prorl_trio.inference.engines.answers import (
    REFUSED_STATUSES,
    ContractBroken,
    NotStreamed,
    Prompt,
    Wanted,
    context_limit,
    error_message,
    logprob_kind,
)
from prorl_trio.inference.engines.completion_stream import CompletionStream, StreamPart
from prorl_trio.inference.engines.load_report import LoadReader, LoadReport
from prorl_trio.inference.engines.protocol import (
    CannotStream,
    Completion,
    CompletionRequest,
    CompletionTimedOut,
    EngineClient,
    EngineInfo,
    EnginePaused,
    RequestRefused,
)
from prorl_trio.types.errors import BackendError, ContextLengthExceeded
from prorl_trio.types.models import SamplingParams

if TYPE_CHECKING:
    from prorl_trio.types.backends import PauseMode

MAX_REQUEST_ID_CHARS = 200
MISSING_STATUSES = frozenset({403, 404, 405, 501})
"""The server lacks the endpoint or has disabled it."""
METHOD_NOT_ALLOWED = 405
PROBE_PROMPT = [1, 2, 3]
PROBE_TOKENS = 2

OnCall = Callable[[str, str, float], None]
"""Called with the URL, the call's end (completed, failed, cancelled), and its seconds including retries. Must not
raise."""


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of a client's constructor: see `HttpEngineClient`."""

    max_connections: int
    context_tokens: int
    retry: RetryPolicy | None
    random: Random | None
    on_call: OnCall | None


class ControlCall(NamedTuple):
    """A POST that controls the engine. `body`, if any, is sent as JSON."""

    path: str
    body: object = msgspec.UNSET


_PROBE_SAMPLING = SamplingParams(max_output_tokens=PROBE_TOKENS, top_k=1)
_HOT_SAMPLING = msgspec.structs.replace(_PROBE_SAMPLING, temperature=2.0)
JSON_CONTENT = ("Content-Type", "application/json")
_Answer = TypeVar("_Answer")


class HttpEngineClient(EngineClient):
    """A client of one server. Subclasses define paths and formats; see `EngineClient` for the semantics of the methods.

    Attributes:
        may_scale_logprobs: the engine may report log-probabilities after the temperature but before `top_k`. The probe
            then samples a second time.
        pause_calls, resume_call: the calls that pause and resume the engine; empty if it cannot be paused.
        adapter_calls: the paths that load and unload a LoRA adapter; None if adapters are not supported.
        headers: sent with each completion and each GET, such as credentials.
    """

    may_scale_logprobs: ClassVar[bool] = False
    pause_calls: ClassVar[Mapping[PauseMode, ControlCall]] = {}
    resume_call: ClassVar[ControlCall | None] = None
    adapter_calls: ClassVar[tuple[str, str] | None] = None
    headers: Sequence[tuple[str, str]] = ()

    def __init__(
        self,
        url: str,
        *,
        max_connections: int = 512,
        context_tokens: int = 0,
        retry: RetryPolicy | None = None,
        random: Random | None = None,
        on_call: OnCall | None = None,
    ) -> None:
        """Create the client without sending anything.

        Args:
            url: the server's origin, such as `http://127.0.0.1:8000`, without a path.
            max_connections: number of concurrent calls; further calls wait in FIFO order.
            context_tokens: limit of prompt plus completion for an engine that does not report it; 0 if unknown.
            retry: the retry policy.
            random: draws the jitter of the retries.
            on_call: called after every `generate`.

        Raises:
            BackendError: not retryable: `url` is not an origin.
        """
        try:
            self._http = HttpClient(url, limits=HttpLimits(max_connections=max_connections))
        except ValueError as exc:
            raise BackendError(f"backend URL: {exc}", retryable=False) from exc
        self.url = self._http.origin
        self._context_tokens = context_tokens
        self._retry = retry or RetryPolicy()
        self._random = random or Random()
        self._on_call = on_call
        self._info: EngineInfo | None = None
        self._adapter = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._http!r}>"

    @property
    def http(self) -> HttpClient:
        return self._http

    @abc.abstractmethod
    async def _ask_info(self, timeout_s: float) -> EngineInfo:
        """Return the server's description of itself."""

    @abc.abstractmethod
    async def _complete(self, wanted: Wanted) -> Completion:
        """Send the request and read the answer.

        Raises:
            ContractBroken: the answer cannot be trusted.
            BackendError, ContextLengthExceeded: as `generate`.
        """

    async def probe(self, *, timeout_s: float) -> EngineInfo:
        """See `EngineClient.probe`. Nothing is retried. Also refreshes the server information that `generate` uses."""
        with trio.move_on_after(timeout_s):
            info = await self._ask_info(timeout_s)
            plain = await self._sample_probe(info, timeout_s)
            hot = await self._sample_probe(info, timeout_s, _HOT_SAMPLING) if self.may_scale_logprobs else plain
            self._info = msgspec.structs.replace(info, logprob_kind=logprob_kind(plain.logprobs, hot.logprobs))
            return self._info
        raise BackendError(f"{self.url}: the probe took more than {timeout_s:g} s", retryable=True)

    async def generate(self, request: CompletionRequest) -> Completion:
        """See `EngineClient.generate`. `max_tokens` is reduced to the rest of the context (finish reason `length`).

        Raises:
            RuntimeError: no `probe` has succeeded yet.
            ValueError: the prompt is empty, or `max_tokens` is below 1.
        """
        info = self._info
        if info is None:
            raise RuntimeError(f"{self.url}: probe() must succeed before generate()")
        if not request.prompt_token_ids or request.max_tokens < 1:
            asked = f"{len(request.prompt_token_ids)} ids and {request.max_tokens}"
            raise ValueError(f"need a prompt and max_tokens >= 1, got {asked}")
        if request.guide is not None and not info.guides:
            raise RequestRefused(f"{self.url}: {info.engine} cannot keep a completion to a form")
        prompt = Prompt.of(request.prompt_token_ids)
        room = info.max_model_len - prompt.tokens
        if room < 1:
            raise ContextLengthExceeded(prompt.tokens, info.max_model_len)
        wanted = Wanted(
            prompt=prompt,
            sampling=request.sampling,
            max_tokens=min(request.max_tokens, room),
            info=info,
            request_id=request.request_id,
            timeout_s=request.timeout_s,
            cache_salt=request.cache_salt,
            sink=request.sink,
            guide=request.guide,
            adapter=self._adapter,
        )
        started_s, result = trio.current_time(), "cancelled"
        try:
            completion = await self._complete(wanted)
            result = "completed"
        except NotStreamed as exc:
            result = "failed"
            raise CannotStream(f"{self.url}: {exc}") from exc
        except ContractBroken as exc:
            result = "failed"
            raise self._unfit(str(exc)) from exc
        except (BackendError, ContextLengthExceeded):
            result = "failed"
            raise
        finally:
            if self._on_call is not None:
                self._on_call(self.url, result, trio.current_time() - started_s)
        return completion

    async def load(self, *, timeout_s: float) -> LoadReport | None:
        """See `EngineClient.load`. Reads the server's metrics page."""
        reader = LoadReader()
        found = await self._get("/metrics", timeout_s, on_data=reader.feed)
        return None if found is None else reader.load()

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> bool:
        """See `EngineClient.pause`. With `abort`, completions in flight are answered at once with the tokens so far."""
        call = self.pause_calls.get(mode)
        if call is None:
            return await super().pause(mode, timeout_s=timeout_s)
        return await self._control(call.path, timeout_s, call.body)

    async def resume(self, *, timeout_s: float) -> None:
        if self.resume_call is None:
            return await super().resume(timeout_s=timeout_s)
        await self._control(self.resume_call.path, timeout_s, self.resume_call.body)

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> bool:
        """See `EngineClient.load_adapter`. First unloads an adapter of that name that a failed update left behind."""
        if self.adapter_calls is None:
            return await super().load_adapter(name, folder, timeout_s=timeout_s)
        load, _ = self.adapter_calls
        started_s = trio.current_time()
        try:
            there = await self._http.request("GET", load, timeout_s=timeout_s)
        except HttpError as exc:
            raise self._failed(exc) from exc
        if there.status != METHOD_NOT_ALLOWED:  # a server with this endpoint offers it for POST
            return False
        await self.unload_adapter(name, timeout_s=timeout_s)
        left_s = max(0.0, started_s + timeout_s - trio.current_time())
        if not await self._control(load, left_s, {"lora_name": name, "lora_path": folder}):
            raise BackendError(f"{self.url}: it finds no adapter in {folder}", retryable=False)
        return True

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        if self.adapter_calls is None:
            return await super().unload_adapter(name, timeout_s=timeout_s)
        try:
            await self._control(self.adapter_calls[1], timeout_s, {"lora_name": name})
        except RequestRefused:
            await trio.lowlevel.checkpoint()

    def use_adapter(self, name: str) -> None:
        self._adapter = name

    async def aclose(self) -> None:
        """Close every connection. Calls in flight raise `BackendError`. Idempotent."""
        self._http.close()
        await trio.lowlevel.checkpoint()

    # ------------------------------------------------------------ for subclasses

    async def _ask(
        self,
        path: str,
        body: bytes,
        wanted: Wanted,
        read_answer: Callable[[bytes, Wanted], Completion],
        read_event: Callable[[bytes, Wanted, int], StreamPart],
    ) -> Completion:
        """Post `body` and read the answer, event by event if there is a sink. Raises the same errors as `_complete`."""
        if wanted.sink is None:
            return read_answer((await self._post(path, body, wanted)).body, wanted)
        stream = CompletionStream(wanted, read_event)
        await self._post(path, body, wanted, stream.feed)
        return stream.completion()

    async def _sample_probe(
        self, info: EngineInfo, timeout_s: float, sampling: SamplingParams = _PROBE_SAMPLING
    ) -> Completion:
        """Sample `PROBE_TOKENS` tokens. Raises BackendError if the engine is unfit."""
        wanted = Wanted(
            prompt=Prompt.of(PROBE_PROMPT),
            sampling=sampling,
            max_tokens=PROBE_TOKENS,
            info=info,
            timeout_s=timeout_s,
            probing=True,
        )
        try:
            completion = await self._complete(wanted)
        except ContractBroken as exc:
            raise self._unfit(str(exc)) from exc
        if completion.finish_reason == "abort":
            raise EnginePaused(f"{self.url}: it aborted the probe, as it does for a pause")
        if len(completion.token_ids) != PROBE_TOKENS:
            raise self._unfit(f"asked for {PROBE_TOKENS} tokens, it sampled {len(completion.token_ids)}")
        return completion

    async def _post(
        self,
        path: str,
        body: bytes,
        wanted: Wanted,
        on_data: Callable[[bytes], bool] | None = None,
        *,
        headers: Sequence[tuple[str, str]] = (),
        returned: Container[int] = (200,),
        patient: Container[int] = (),
    ) -> Response:
        """Send the request and, unless it is a probe, retry after a delay until a response of status 200 arrives.

        A request is never repeated after the first byte of its response has arrived. `returned`: the statuses to
        return. `patient`: statuses of a healthy but busy server, after which only the time limits the attempts.
        """
        started_s, timeout_s, once = trio.current_time(), wanted.timeout_s, wanted.probing
        max_attempts = 1 if once else self._retry.max_attempts
        failures = 0
        for attempt in count(1):
            left_s = max(0.0, started_s + timeout_s - trio.current_time())
            # Job ids come from the submitter and may contain any character; a header may not.
            header = quote(f"{wanted.request_id}.{attempt}", safe="/:+@ ")[-MAX_REQUEST_ID_CHARS:]
            sent = [JSON_CONTENT, ("X-Request-Id", header), *self.headers, *headers]
            failures += 1
            try:
                response = await self._http.request(
                    "POST", path, body=body, headers=sent, timeout_s=left_s, on_data=on_data
                )
                if response.status in returned:
                    return response
                failures -= response.status in patient
                if (once and response.status not in patient) or response.status not in RETRYABLE_STATUSES:
                    self._refused("POST", path, response, wanted.prompt.tokens)
                failure = f"status {response.status}: {error_message(response.body)}"
            except (ConnectFailed, ConnectionLost) as exc:
                if once or (isinstance(exc, ConnectionLost) and exc.received_bytes):
                    raise self._failed(exc) from exc
                failure = str(exc)
            except HttpError as exc:
                raise self._failed(exc) from exc
            delay_s = self._retry.delay_s(min(attempt, self._retry.max_attempts), self._random)
            if failures == max_attempts or trio.current_time() + delay_s >= started_s + timeout_s:
                break
            await trio.sleep(delay_s)
        used_s = trio.current_time() - started_s
        raise BackendError(
            f"{self.url}: {failure}; gave up after {attempt} attempts in {used_s:.1f} s of {timeout_s:g} s",
            retryable=True,
        )

    async def _get(self, path: str, timeout_s: float, on_data: Callable[[bytes], bool] | None = None) -> bytes | None:
        """Return the body of `path`, empty if `on_data` received it; None if the server does not know `path`.

        Not retried.
        """
        headers = [("X-Request-Id", "prorl-probe"), *self.headers]
        try:
            response = await self._http.request("GET", path, headers=headers, timeout_s=timeout_s, on_data=on_data)
        except HttpError as exc:
            raise self._failed(exc) from exc
        if response.status != 200 and response.status not in MISSING_STATUSES:
            self._refused("GET", path, response, 0)
        return response.body if response.status == 200 else None

    async def _ask_tokenizer(
        self, path: str, fields: dict[str, object], kind: type[_Answer], timeout_s: float
    ) -> _Answer | None:
        """Post to an endpoint of the server's tokenizer. Returns None if it is missing or answers something else.

        SGLang with `--skip-tokenizer-init`, for example, fails there with status 500.
        """
        body = msgspec.json.encode({"model": self._info.model if self._info else "", **fields})
        try:
            response = await self._http.request("POST", path, body=body, headers=[JSON_CONTENT], timeout_s=timeout_s)
        except HttpError as exc:
            raise self._failed(exc) from exc
        try:
            return msgspec.json.decode(response.body, type=kind) if response.status == 200 else None
        except msgspec.MsgspecError:
            return None

    async def _get_json(self, path: str, kind: type[_Answer], timeout_s: float) -> _Answer | None:
        """Get `path` like `_get`, and decode the body."""
        body = await self._get(path, timeout_s)
        if body is None:
            return None
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as exc:
            raise self._unfit(f"{path} is not what was expected: {exc}") from exc

    async def _control(self, path: str, timeout_s: float, body: object = msgspec.UNSET) -> bool:
        """Call once, without retries. Returns False if the server lacks the endpoint."""
        payload = b"" if body is msgspec.UNSET else msgspec.json.encode(body)
        headers = [JSON_CONTENT] if payload else []
        try:
            response = await self._http.request("POST", path, body=payload, headers=headers, timeout_s=timeout_s)
        except HttpError as exc:
            raise self._failed(exc) from exc
        if response.status != 200 and response.status not in MISSING_STATUSES:
            self._refused("POST", path, response, 0)
        return response.status == 200

    def _refused(self, method: str, path: str, response: Response, prompt_tokens: int) -> NoReturn:
        """Raise for a status that is not 200."""
        message = error_message(response.body)
        limit = context_limit(message) if response.status == 400 else None
        if limit is not None:
            raise ContextLengthExceeded(prompt_tokens, limit)
        said = f"{self.url}: {method} {path} was answered by status {response.status}: {message}"
        if response.status in REFUSED_STATUSES:
            raise RequestRefused(said)
        raise BackendError(said, retryable=response.status in RETRYABLE_STATUSES)

    def _failed(self, exc: HttpError) -> BackendError:
        if isinstance(exc, RequestTimedOut):
            return CompletionTimedOut(f"{self.url}: {exc}")
        breach = isinstance(exc, ResponseMalformed | ResponseTooLarge)
        return BackendError(f"{self.url}: {exc}", retryable=not breach)

    def _unfit(self, reason: str) -> BackendError:
        return BackendError(f"{self.url}: not fit for token-exact rollouts: {reason}", retryable=False)
