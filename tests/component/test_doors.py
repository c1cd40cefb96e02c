"""Every door of the project, tried by web pages, by names that were made to resolve to this machine, by strangers."""

from __future__ import annotations

import ast
import base64
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_trio.config import BackendConfig, RestConfig
from prorl_trio.edges.auth import Door
from prorl_trio.edges.guard import Guard, Refusal, Visitors
from prorl_trio.edges.prorl_compat import compat_endpoints
from prorl_trio.edges.rest.app import ENDPOINTS, RestApp
from prorl_trio.edges.rest.call import Api
from prorl_trio.edges.rest.events import EventFeed
from support.fake_rest import TOKEN, open_rest
from support.fake_service import open_service
from support.raw_trainer import raw_trainer
from support.sessions import sessions_in

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
MORE = compat_endpoints(BackendConfig(), free=True)
ROUTES = sorted(
    {
        (each.method, each.path.replace("{job_id}", "j"))
        for each in (*ENDPOINTS, *compat_endpoints(BackendConfig(), free=True))
    }
    | {("GET", "/openapi.json"), ("GET", "/nowhere"), ("OPTIONS", "/start"), ("OPTIONS", "/v1/rollouts")}
)
BASIC = "Basic " + base64.b64encode(f"any:{TOKEN}".encode()).decode()
PAGES = {
    "another origin": {"Origin": "https://evil.example"},
    "an opaque origin": {"Origin": "null"},
    "an empty origin": {"Origin": ""},
    "another port of this machine": {"Origin": "http://127.0.0.1:1"},
    "another name of this machine": {"Origin": "http://localhost:{port}", "Host": "127.0.0.1:{port}"},
    "a rebound name": {"Origin": "http://evil.example:{port}", "Host": "evil.example:{port}"},
    "an origin that begins like ours": {"Origin": "http://127.0.0.1:{port}.evil.example"},
    "an origin with a user like ours": {"Origin": "http://127.0.0.1:{port}@evil.example"},
    "another scheme": {"Origin": "chrome-extension://127.0.0.1:{port}"},
    "another site without an origin": {"Sec-Fetch-Site": "cross-site"},
    "another port without an origin": {"Sec-Fetch-Site": "same-site"},
    "another site, it says": {"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1:{port}"},
    "an unknown site": {"Sec-Fetch-Site": "x"},
}
SIMPLE_KINDS = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
)
"""A page may send these anywhere without asking first."""
STRANGE_HOSTS = (
    "evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "evil-localhost",
    "127.0.0.1:{port}:1", "127.0.0.1@evil.example", "evil.example/127.0.0.1", "127.1", "0x7f000001", "2130706433",
    "localhost.",    "[evil.example]", "", "[", ":80", "xn--e1awd7f.com", "*",
)  # fmt: skip
OWN_HOSTS = (
    "127.0.0.1",
    "127.0.0.1:{port}",
    "localhost:{port}",
    "LOCALHOST",
    "10.1.2.3:8701",
    "[::1]:{port}",
    "named.example",
)
"""Kubernetes' probes name the pod's address, whatever the node listens on."""


def filled(headers, port):
    return {name: value.replace("{port}", str(port)) for name, value in headers.items()}


class Asked:
    """The guard and the REST application without their server, for the many requests of a table."""

    def __init__(self, node, nursery, *, free):
        config = RestConfig(prorl_compat=True)
        feed = EventFeed(max_streams=1, max_events=1)
        api = Api(node=node, sessions=sessions_in(nursery), config=config, feed=feed, closing=trio.Event())
        self.app = RestApp(api, compat_endpoints(BackendConfig(), free=free))
        self.guard = Guard(Door(TOKEN.encode(), ["named.example"]), self.app.is_free)

    async def __call__(self, method, path, headers):
        """Return the status and the code of the error."""
        answer = []

        async def receive():
            await trio.lowlevel.checkpoint()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            await trio.lowlevel.checkpoint()
            answer.append(message)

        pairs = headers.items() if isinstance(headers, dict) else headers
        lower = [(name.lower().encode(), value.encode()) for name, value in pairs]
        visitor = Visitors(9, 9).arrive("a peer", lambda: None)
        scope = {"type": "http", "method": method, "path": path, "headers": lower, "query_string": b""}
        try:
            self.guard.check(method, path, lower, visitor)
        except Refusal as refusal:
            return refusal.status, msgspec.json.decode(self.app.error_body(path, refusal.detail))["error"]["code"]
        with trio.fail_after(10):
            await self.app(scope, receive, send)
        return answer[0]["status"], msgspec.json.decode(answer[1]["body"])["error"]["code"]


@pytest.mark.parametrize("free", [False, True], ids=["token", "no token"])
async def test_no_page_and_no_strange_name_gets_through_to_any_route(node, nursery, free):
    """`/start`, `/stop`, `/cancel`, `/add_llm_server` and `/clear_llm_server` among them, and those to come."""
    await node.backends.add("http://mine")
    ask = Asked(node, nursery, free=free)
    own = {"Host": "127.0.0.1:{port}"}
    for method, path in ROUTES:
        for credentials in ({}, {"Authorization": BASIC}, {"Authorization": "Bearer wrong"}):
            for name, headers in PAGES.items():
                got = await ask(method, path, filled({**own, **credentials, **headers}, 8701))
                assert got == (403, "page"), (method, path, name, credentials)
        for host in STRANGE_HOSTS:
            assert await ask(method, path, filled({"Host": host}, 8701)) == (403, "host"), (method, path, host)
    assert not node.live
    assert node.backends.urls() == ("http://mine",)


def basic(credentials):
    return "Basic " + base64.b64encode(credentials.encode()).decode()


@pytest.mark.parametrize(
    "offered",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [TOKEN],
        ["Token " + TOKEN],
        ["Bearer " + TOKEN[:-1]],
        ["Bearer " + TOKEN + "x"],
        ["Bearer " + TOKEN.upper()],
        ["Bearer " + basic("any:" + TOKEN).removeprefix("Basic ")],
        ["Basic"],
        ["Basic " + TOKEN],
        ["Basic ???"],
        [basic(TOKEN)],
        [basic("any:")],
        [basic("any:wrong")],
        [basic(TOKEN + ":any")],
        [basic("any:" + TOKEN[:-1])],
        [basic("any:" + TOKEN + "x")],
        [BASIC + "!"],
        ["Bearer " + TOKEN, "Bearer wrong"],
        ["Bearer wrong", "Bearer " + TOKEN],
        [BASIC, BASIC],
    ],
)
async def test_nothing_but_the_whole_token_offered_once_gets_in(node, nursery, offered):
    ask = Asked(node, nursery, free=False)
    headers = [("Host", "127.0.0.1"), *(("Authorization", each) for each in offered)]
    for method, path in ROUTES:
        if path.startswith("/v1/") or path == "/start":
            assert await ask(method, path, headers) == (401, "token"), (method, path)


async def test_no_page_gets_through_the_listener(node):
    async with open_rest(node, prorl_compat=True, prorl_compat_token=False) as rest:
        for name, headers in PAGES.items():
            sent = filled({"Authorization": "", **headers}, rest.port)
            assert (await rest.call("POST", "/clear_llm_server", headers=sent)).status == 403, name
        assert (await rest.call("POST", "/start", headers={"Host": "evil.example", "Authorization": ""})).status == 403


async def test_what_a_page_can_post_without_asking_is_not_read_without_a_token(node):
    async with open_rest(node, prorl_compat=True, prorl_compat_token=False) as rest:
        for kind in (
            "text/plain",
            "text/plain;charset=UTF-8",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            "",
        ):
            sent = {"Authorization": "", "Content-Type": kind}
            answer = await rest.call("POST", "/add_llm_server", {"address": "127.0.0.1:1"}, headers=sent)
            assert answer.status == 415, kind
        for kind in ("application/json", "Application/JSON; charset=utf-8"):
            sent = {"Authorization": "", "Content-Type": kind}
            assert (await rest.call("POST", "/add_llm_server", {"address": "127.0.0.1:1"}, headers=sent)).status == 200
        sent = {"Content-Type": "application/x-www-form-urlencoded"}  # curl's own, with the token
        assert (await rest.call("POST", "/v1/rollouts", {}, headers=sent)).status == 422


async def test_programs_and_own_pages_come_in(node):
    async with open_rest(node, prorl_compat=True, prorl_compat_token=False, hosts=["Named.example"]) as rest:
        for host in OWN_HOSTS:
            headers = filled({"Host": host, "Authorization": ""}, rest.port)
            assert (await rest.call("GET", "/healthz", headers=headers)).status == 200, host
            assert (await rest.call("GET", "/v1/status", headers=headers)).status == 401, host
        for headers in (
            {"Sec-Fetch-Site": "none"},
            {"Sec-Fetch-Site": "same-origin"},
            {"Sec-Fetch-Mode": "cors"},  # the fetch of Node.js
            {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:{port}", "Host": "127.0.0.1:{port}"},
            {"Origin": "https://named.example", "Sec-Fetch-Site": "cross-site"},
            {"Origin": "https://NAMED.example:444", "Host": "127.0.0.1"},
        ):
            answer = await rest.call("GET", "/docs", headers=filled({"Authorization": "", **headers}, rest.port))
            assert answer.status == 200, headers
        for host in STRANGE_HOSTS:  # proxies and services of Kubernetes'; a page has no token
            for credentials in ({}, {"Authorization": BASIC}):
                headers = filled({"Host": host, **credentials}, rest.port)
                assert (await rest.call("GET", "/v1/status", headers=headers)).status == 200, host
        answer = await rest.call("GET", "/v1/status", headers={"Origin": "https://evil.example"})
        assert answer.status == 200
        assert "access-control-allow-origin" not in answer.headers


async def handshake(service, headers):
    fields = {
        "Host": f"127.0.0.1:{service.port}", "Upgrade": "websocket", "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        **filled(headers, service.port),
    }  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    async with await trio.open_tcp_stream(service.host, service.port) as stream:
        await stream.send_all(f"GET / HTTP/1.1\r\n{head}\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer and (chunk := await stream.receive_some(4096)):
            answer += bytes(chunk)
        return int(answer.split(b" ")[1]) if answer else 0


async def test_no_page_opens_a_websocket(node):
    async with open_service(node, hosts=["named.example"]) as service:
        for name, headers in PAGES.items():
            assert await handshake(service, headers) == 403, name
        for host in STRANGE_HOSTS:
            if host and host.isascii() and not set("/@[*") & set(host):
                headers = {"Host": host, "Origin": f"http://{host}"}
                assert await handshake(service, headers) in (400, 403), host
        for headers in (
            {},
            {"Host": "rollouts.svc:80"},
            {"Origin": "http://127.0.0.1:{port}"},
            {"Origin": "https://named.example"},
        ):
            assert await handshake(service, headers) == 101, headers
        async with raw_trainer(service) as trainer:
            await trainer.hello()


def test_a_door_trusts_pages_of_the_listed_names_alone():
    door = Door(b"t", ["pages.example"], ["node7"])
    own = [(b"host", b"node7:8701"), (b"origin", b"http://node7:8701")]
    assert not door.refuse_page(own)
    assert not door.refuse_page([(b"host", b"x"), (b"origin", b"https://pages.example:1")])
    assert door.refuse_page([(b"host", b"node7:8701"), (b"origin", b"http://node7:8888")]), "a notebook on that machine"
    assert door.refuse_page([*own, (b"origin", b"https://evil.example")])
    assert door.refuse_page([*own, (b"host", b"evil.example")])
    assert door.refuse_page([*own, (b"sec-fetch-site", b"same-origin"), (b"sec-fetch-site", b"cross-site")])
    assert door.refuse_page([(b"origin", b"http://node7:8701")])
    assert not door.refuse_host([]), "HTTP/1.0: no browser"


# ---------------------------------------------------------------- all listeners

OPENERS = {
    "open_tcp_listeners",
    "serve_tcp",
    "listen_unix",
    "open_tcp_listener",
    "create_server",
    "start_server",
    "listen",
}
LISTENERS = {
    "prorl_trio/edges/serve.py": "the server: `Guard`, above; its Unix socket is in a folder of mode 0700",
    "prorl_trio/edges/tcp.py": "opens its port",
    "ipc/prorl_ipc/channel.py": "opens Unix sockets in folders of mode 0700",
    "ipc/prorl_ipc/arena_socket.py": "a Unix socket: user and token; no HTTP",
    "prorl_trio/sandbox/providers/start.py": "a Unix socket for one daemon: token; no HTTP",
    "sandbox_daemon/prorl_daemon/daemon.py": "the same, from the inside",
    "prorl_trio/testing/fake_engine.py": "for tests: an engine",
    "prorl_trio/testing/fake_search.py": "for tests: a search service",
    "prorl_trio/testing/sandbox_contract.py": "for tests: nobody is answered",
    "prorl_trio/tools/mcp/sessions.py": "subscribes to an MCP server's changes, over our connection to it",
    "launch/prorl_launch/slurm/fleet_folder.py": "a trial whether sockets can be made: nobody is answered",
    "launch/prorl_launch/slurm/engine_port.py": "a trial whether a port is free: nobody is answered",
}


def test_every_listener_is_known():
    """A new one is added here with what guards it; those that speak HTTP go through `Door`."""
    found = set()
    for package in ("prorl_trio", "ipc", "launch", "sandbox_daemon"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            for call in ast.walk(ast.parse(text)) if any(name in text for name in (*OPENERS, "Server(")) else ():
                name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
                if name in OPENERS or name.endswith(("HTTPServer", "TCPServer", "UnixStreamServer")):
                    found.add(str(path.relative_to(ROOT)))
    assert found == set(LISTENERS)
