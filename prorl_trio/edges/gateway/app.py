"""The gateway's ASGI application. It finds a request's API and rollout, and answers the request.

Inside a sandbox the port is the identity: all its requests belong to one rollout. On the node's own port a path begins
with `/s/ID`, and the API key is the secret of that rollout; both must match.
"""

from __future__ import annotations

import gzip
import hmac
import io
import logging
import re
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_ipc.wire import UNDECODABLE
from prorl_trio.agent.gateway import BadQuestion, RolloutOver
from prorl_trio.agent.program import MODEL
from prorl_trio.edges.gateway import chat, google, messages, responses
from prorl_trio.edges.gateway.wire import Problem
from prorl_trio.edges.http1 import ConnectionEnded
from prorl_trio.edges.responses import Response
from prorl_trio.threads import run_sync
from prorl_trio.types.errors import ContextLengthExceeded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType

    from prorl_trio.agent.gateway import Gateway
    from prorl_trio.agent.said import Answer
    from prorl_trio.edges.gateway.wire import Asked, ProblemKind
    from prorl_trio.edges.http1 import App
    from prorl_trio.edges.requests import ErrorDetail
    from prorl_trio.edges.responses import Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

PREFIX: Final = re.compile(r"/s/(?P<session>[^/]+)(?P<path>/.*)?")
KEEP_ALIVE_S: Final = 5.0
"""Interval of keep-alive events in seconds while a turn is sampled. The stream begins with the first such event; an
earlier problem can still be answered with an HTTP status."""
MAX_BODY_BYTES: Final = 16 * 1024 * 1024
"""Maximum body size: about four million tokens of four characters."""
BIG_BODY_BYTES: Final = 128 * 1024
"""Larger bodies are decoded in a thread, because they would block the loop."""
RETRY_AFTER_S: Final = 5.0
MAX_NAMES: Final = 256
MAX_NAME_CHARS: Final = 64
OTHERS: Final = "(others)"
"""The name for all ignored fields without a count of their own."""
_KEYS: Final = ("x-api-key", "x-goog-api-key")
_MODEL: Final = r"(?P<model>[^/:]+(?:/[^/:]+)*)"


class _Route(NamedTuple):
    """A resolved path. `operation` is `ask`, `stream` (requested by the path), `count`, `models` or `model`."""

    method: str
    pattern: re.Pattern[str]
    dialect: ModuleType
    operation: str


_ROUTES: Final = [
    _Route(method, re.compile(pattern), dialect, operation)
    for method, pattern, dialect, operation in (
        ("POST", r"(?:/v1)?/chat/completions", chat, "ask"),
        ("POST", r"(?:/v1)?/responses", responses, "ask"),
        ("POST", r"(?:/v1)?/responses/input_tokens", responses, "count"),
        ("POST", r"(?:/v1)?/messages", messages, "ask"),
        ("POST", r"(?:/v1)?/messages/count_tokens", messages, "count"),
        ("POST", rf"/v1(?:beta\d*|alpha)?/models/{_MODEL}:generateContent", google, "ask"),
        ("POST", rf"/v1(?:beta\d*|alpha)?/models/{_MODEL}:streamGenerateContent", google, "stream"),
        ("POST", rf"/v1(?:beta\d*|alpha)?/models/{_MODEL}:countTokens", google, "count"),
        ("GET", r"/v1(?:beta\d*|alpha)/models", google, "models"),
        ("GET", rf"/v1(?:beta\d*|alpha)/models/{_MODEL}", google, "model"),
        ("GET", r"(?:/v1)?/models", chat, "models"),
        ("GET", rf"(?:/v1)?/models/{_MODEL}", chat, "model"),
        ("GET", r"/?", chat, "models"),
    )
]
_SIGNS: Final = {"anthropic-version": messages, "x-goog-api-key": google, "x-goog-api-client": google}
_COUNTED: Final = {responses: "input_tokens", messages: "input_tokens", google: "totalTokens"}


class _Served(NamedTuple):
    gateway: Gateway
    secret: str


class Tally:
    """Counts of the requests from a node's programs, and of the answers.

    Attributes:
        results: requests by dialect and result: `ok`, or the kind of the problem.
        ignored: ignored fields of requests, with counts.
        joined: requests that were answered by the turn of an earlier request.
    """

    def __init__(self) -> None:
        self.results: Counter[tuple[str, str]] = Counter()
        self.ignored: Counter[str] = Counter()
        self.joined = 0

    def ignore(self, names: Iterable[str]) -> None:
        """Count ignored fields. Programs choose the names freely, so names beyond a limit are counted as one."""
        for name in names:
            is_named = name in self.ignored or (len(name) <= MAX_NAME_CHARS and len(self.ignored) < MAX_NAMES)
            self.ignored[name if is_named else OTHERS] += 1

    def statistics(self) -> dict[str, Any]:
        """Return all counts as values that msgpack can encode."""
        dialects: dict[str, dict[str, int]] = {}
        for (dialect, result), count in self.results.items():
            dialects.setdefault(dialect, {})[f"{result}_total"] = count
        return {"requests": dialects, "ignored_fields": dict(self.ignored), "joined_total": self.joined}


class GatewayTable:
    """The gateways for programs outside of a sandbox's network, by the id in the path.

    Attributes:
        url: the URL of the node's own port; empty without one.
        public_url: the same URL for other machines.
        tally: counts for all gateways of the node, including ports of sandboxes.
    """

    def __init__(self) -> None:
        self.url = self.public_url = ""
        self.tally = Tally()
        self._served: dict[str, _Served] = {}
        self._over: dict[str, None] = {}

    def add(self, session: str, gateway: Gateway, secret: str) -> None:
        self._served[session] = _Served(gateway, secret)

    def remove(self, session: str) -> None:
        """Stop serving a gateway. Its clients are notified that the rollout is over."""
        del self._served[session]
        self._over[session] = None
        if len(self._over) > 10_000:
            del self._over[next(iter(self._over))]

    def find(self, session: str, headers: Mapping[str, str]) -> Gateway:
        """Return the gateway of that id if the request has its secret. Raises Problem."""
        served = self._served.get(session)
        if served is None:
            if session in self._over:
                raise Problem("over", "the rollout has ended")
            raise Problem("not_found", "there is no such rollout: its path or its secret is wrong")
        bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not any(
            hmac.compare_digest(given.encode(), served.secret.encode())
            for given in (bearer, *(headers.get(name, "") for name in _KEYS))
        ):
            raise Problem("unauthorized", "the API key is not the secret of this rollout")
        return served.gateway


class BesideRest:
    """An application whose paths below `/s/` belong to the gateways and all others to REST."""

    def __init__(self, rest: App, gateways: GatewayTable) -> None:
        self._rest = rest
        self._gateway = GatewayApp(gateways, MODEL, gateways.tally)

    def _of(self, path: str) -> App:
        return self._gateway if PREFIX.fullmatch(path) else self._rest

    def is_free(self, path: str) -> bool:
        return self._of(path).is_free(path)

    def error_body(self, path: str, detail: ErrorDetail) -> bytes:
        return self._of(path).error_body(path, detail)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._of(scope["path"])(scope, receive, send)


class GatewayApp:
    """An application that answers and counts the requests of programs, for one gateway or for a table of gateways."""

    def __init__(self, gateways: Gateway | GatewayTable, model: str, tally: Tally) -> None:
        self._gateways = gateways
        self._model = model
        self._tally = tally

    def is_free(self, path: str) -> bool:
        """Return whether a path belongs to a gateway, which checks its secret itself."""
        return not isinstance(self._gateways, GatewayTable) or PREFIX.fullmatch(path) is not None

    def error_body(self, path: str, detail: ErrorDetail) -> bytes:
        dialect = next((each.dialect for each in _ROUTES if each.pattern.fullmatch(_inner(path))), chat)
        kind: ProblemKind = "too_large" if "large" in detail.code else "bad_request"
        return msgspec.json.encode(dialect.problem(Problem(kind, detail.message))[1])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _inner(scope["path"])
        dialect: ModuleType = chat
        try:
            route, model = _route(scope["method"], path)
            dialect = route.dialect
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            if route.operation in ("models", "model"):  # these paths belong to several APIs
                dialect = next((each for name, each in _SIGNS.items() if name in headers), dialect)
            gateway = self._gateway(scope, headers)
            if route.operation in ("models", "model"):
                models = self._models(dialect, route.operation, gateway.context_tokens)
                response = Response(msgspec.json.encode(models), 200, {}, _JSON)
            else:
                asked = await _read(dialect, await _body(receive), headers, model or self._model)
                await self._answer(route, asked, gateway, receive, send)
                return
        except Problem as problem:
            response = self._told(dialect, problem)
        await response(scope, receive, send)

    def _gateway(self, scope: Scope, headers: Mapping[str, str]) -> Gateway:
        if not isinstance(self._gateways, GatewayTable):
            return self._gateways
        found = PREFIX.fullmatch(scope["path"])
        if found is None:
            raise Problem("not_found", "a path of the gateway begins with /s/ and the rollout's id")
        return self._gateways.find(found["session"], headers)

    def _told(self, dialect: ModuleType, problem: Problem) -> Response:
        status, body = dialect.problem(problem)
        self._tally.results[_name(dialect), problem.kind] += 1
        headers = {"x-should-retry": "true" if problem.kind == "unavailable" else "false"}
        if problem.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(problem.retry_after_s)))
        return Response(msgspec.json.encode(body), status, headers, _JSON)

    async def _answer(self, route: _Route, asked: Asked, gateway: Gateway, receive: Receive, send: Send) -> None:
        """Pass a request to the gateway, and send its answer. Raises Problem if nothing was sent yet."""
        dialect = route.dialect
        self._tally.ignore(asked.ignored)
        if route.operation == "count":
            tokens = await _asked(gateway.count_tokens(asked.question))
            body = msgspec.json.encode({_COUNTED[dialect]: tokens, "object": "response.input_tokens"})
            await Response(body, 200, {}, _JSON)({}, receive, send)
            return
        answered = False
        async with open_single_nursery() as nursery:
            nursery.start_soon(_leave, receive, nursery.cancel_scope)
            if asked.stream or route.operation == "stream":
                await self._stream(dialect, asked, gateway, send)
            else:
                answer = await _asked(gateway.ask(asked.question))
                await Response(msgspec.json.encode(dialect.whole(answer, asked)), 200, {}, _JSON)({}, receive, send)
            answered = True
            self._tally.results[_name(dialect), "ok"] += 1
            nursery.cancel_scope.cancel("answered")
        if not answered:
            raise ConnectionEnded

    async def _stream(self, dialect: ModuleType, asked: Asked, gateway: Gateway, send: Send) -> None:
        outcome = _Outcome()
        async with open_single_nursery() as nursery:
            nursery.start_soon(outcome.wait_for, gateway, asked)
            with trio.move_on_after(KEEP_ALIVE_S):
                await outcome.get()
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _part(send, dialect.opening(asked))
            while True:
                with trio.move_on_after(KEEP_ALIVE_S):
                    try:
                        last = dialect.events(await outcome.get(), asked)
                    except Problem as problem:
                        self._tally.results[_name(dialect), problem.kind] += 1
                        last = dialect.problem_event(problem, asked)
                    await _part(send, last)
                    break
                await _part(send, dialect.keep_alive(asked))
            await send({"type": "http.response.body", "body": b""})

    def _models(self, dialect: ModuleType, operation: str, context_tokens: int) -> dict[str, Any]:
        """Return the description of the single model."""
        name = self._model
        if dialect is google:
            model = {
                "name": f"models/{name}",
                "displayName": name,
                "inputTokenLimit": context_tokens,
                "supportedGenerationMethods": ["generateContent", "countTokens"],
            }
            return model if operation == "model" else {"models": [model]}
        if dialect is messages:
            born = {"created_at": "1970-01-01T00:00:00Z", "lifecycle": "active", "max_input_tokens": context_tokens}
            model = {"type": "model", "id": name, "display_name": name, **born}
            return model if operation == "model" else {"data": [model], "has_more": False}
        described = {"id": name, "object": "model", "created": 0, "owned_by": "prorl-trio"}
        return described if operation == "model" else {"object": "list", "data": [described]}


_JSON: Final = "application/json"


def _name(dialect: ModuleType) -> str:
    return dialect.__name__.rpartition(".")[2]


class _Outcome:
    """The answer or problem that a request waits for."""

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._problem: Problem | None = None
        self._done = trio.Event()

    async def wait_for(self, gateway: Gateway, asked: Asked) -> None:
        try:
            self._answer = await _asked(gateway.ask(asked.question))
        except Problem as problem:
            self._problem = problem
        self._done.set()

    async def get(self) -> Answer:
        await self._done.wait()
        if self._problem is not None:
            raise self._problem
        assert self._answer is not None
        return self._answer


async def _asked(answer: Any) -> Any:
    """Wait for a gateway's answer. Converts its errors into Problem."""
    try:
        return await answer
    except BadQuestion as exc:
        raise Problem("bad_request", str(exc), field=exc.field) from exc
    except ContextLengthExceeded as exc:
        raise Problem("overflow", str(exc), prompt_tokens=exc.prompt_tokens, limit_tokens=exc.max_model_len) from exc
    except RolloutOver as exc:
        raise Problem("over", str(exc)) from exc
    except Exception as exc:
        raise Problem("unavailable", f"the node failed: {exc}", retry_after_s=RETRY_AFTER_S) from exc


def _inner(path: str) -> str:
    found = PREFIX.fullmatch(path)
    return (found["path"] or "/") if found else path


def _route(method: str, path: str) -> tuple[_Route, str]:
    path = path.removesuffix("/") or "/"
    for route in _ROUTES:
        if route.method == ("GET" if method == "HEAD" else method) and (found := route.pattern.fullmatch(path)):
            return route, found.groupdict().get("model") or ""
    raise Problem("not_found", f"{method} {path} is none of the paths of this gateway")


async def _body(receive: Receive) -> bytes:
    received = bytearray()
    more = True
    while more:
        part: Message = await receive()
        if part["type"] == "http.disconnect":
            raise Problem("bad_request", "the client left")
        received += part.get("body", b"")
        more = part.get("more_body", False)
        if len(received) > MAX_BODY_BYTES:
            raise Problem("too_large", f"a request has at most {MAX_BODY_BYTES} bytes; shorten the history")
    return bytes(received)


async def _read(dialect: ModuleType, body: bytes, headers: Mapping[str, str], model: str) -> Asked:
    def read() -> Asked:
        try:
            fields = msgspec.json.decode(_unpacked(body, headers.get("content-encoding", "identity")))
        except UNDECODABLE as exc:
            raise Problem("bad_request", f"the body is no JSON: {exc}") from exc
        if not isinstance(fields, dict):
            raise Problem("bad_request", "the body is no JSON object")
        asked: Asked = dialect.question(fields, headers, model)
        return asked

    if len(body) <= BIG_BODY_BYTES and "content-encoding" not in headers:
        return read()
    return await run_sync(read)


def _unpacked(body: bytes, coding: str) -> bytes:
    """Return a body without its content coding.

    Raises Problem if the coding is unknown or broken, or the body too large.
    """
    coding = coding.strip().lower()
    try:
        if coding == "gzip":
            plain = gzip.GzipFile(fileobj=io.BytesIO(body)).read(MAX_BODY_BYTES + 1)
        elif coding == "deflate":
            plain = zlib.decompressobj().decompress(body, MAX_BODY_BYTES + 1)
        elif coding in ("identity", ""):
            return body
        else:
            raise Problem("bad_request", f"content-encoding {coding!r} is not read here: send gzip, deflate, or plain")
    except (OSError, EOFError, zlib.error) as exc:
        raise Problem("bad_request", f"the body is not {coding}: {exc}") from exc
    if len(plain) > MAX_BODY_BYTES:
        raise Problem("too_large", f"a request has at most {MAX_BODY_BYTES} bytes, unpacked; shorten the history")
    return plain


async def _part(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _leave(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel("the client left")
