"""A registry of images on loopback: layers, tokens, limits of requests, and connections that break."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.server
import io
import json
import tarfile
import threading
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

USER, PASSWORD = "ada", "lovelace"


def tar_of(entries, *, pack=False):
    """A layer's stream: by name, the bytes of a file, None for a folder, or ("symlink" | "link", target)."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz" if pack else "w") as tar:
        for name, content in entries.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            if content is None:
                entry.type = tarfile.DIRTYPE
            elif isinstance(content, tuple):
                entry.type = {"symlink": tarfile.SYMTYPE, "link": tarfile.LNKTYPE}[content[0]]
                entry.linkname = content[1]
            else:
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content) if entry.size else None)
    return packed.getvalue()


def digest_of(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class LocalRegistry(http.server.ThreadingHTTPServer):
    """Serves what `push` has put in.

    Attributes:
        requests: method and path of each, in order.
        private: wants a token, which USER gets with PASSWORD.
        realm: where it says that tokens are; empty: here.
        refuse: how many of the next requests are answered with 429, and `retry_after` as that header.
        break_after: blobs break off after so many bytes, this many times.
        before_blob: called with the digest before a blob is sent.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self):
        self.blobs = {}
        self.manifests = {}
        self.requests = []
        self.private = False
        self.realm = ""
        self.refuse = 0
        self.retry_after = "0"
        self.break_after = []
        self.before_blob = lambda digest: None
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.host = f"127.0.0.1:{self.server_address[1]}"

    def reference(self, name):
        return f"docker://{self.host}/{name}"

    def push(self, name, layers, env=(), *, index=False):
        """Put an image in, of the streams of its layers, and return its reference."""
        streams = [gzip.decompress(it) if it[:2] == b"\x1f\x8b" else it for it in layers]
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": list(env)},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(stream) for stream in streams]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self._add(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": [self._add(layer, "application/vnd.oci.image.layer.v1.tar") for layer in layers],
        }
        repository, _, tag = name.rpartition(":")
        described = self._put_manifest(repository, tag, manifest)
        if index:
            entries = [
                {**described, "platform": {"os": "linux", "architecture": "s390x"}, "digest": f"sha256:{'0' * 64}"},
                {**described, "platform": {"os": "linux", "architecture": "amd64"}},
            ]
            media_type = "application/vnd.oci.image.index.v1+json"
            self._put_manifest(repository, tag, {"schemaVersion": 2, "mediaType": media_type, "manifests": entries})
        return self.reference(name)

    def _put_manifest(self, repository, tag, manifest):
        content = json.dumps(manifest).encode()
        for version in (tag, digest_of(content)):
            self.manifests[repository, version] = (manifest["mediaType"], content)
        return {"mediaType": manifest["mediaType"], "size": len(content), "digest": digest_of(content)}

    def _add(self, content, media_type):
        self.blobs[digest_of(content)] = content
        return {"mediaType": media_type, "size": len(content), "digest": digest_of(content)}

    def blob_requests(self):
        return [path for path in self.requests if "/blobs/" in path]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LocalRegistry

    def do_GET(self):
        url = urlsplit(self.path)
        with self.server.lock:
            self.server.requests.append(url.path)
            refused = self.server.refuse > 0
            self.server.refuse -= refused
        if refused:
            self._send(429, b"slow down", {"Retry-After": self.server.retry_after})
        elif url.path == "/token":
            self._token(parse_qs(url.query))
        elif self.server.private and self.headers.get("Authorization") != "Bearer the-token":
            realm = self.server.realm or f"http://{self.server.host}/token"
            challenge = f'Bearer realm="{realm}",service="test",scope="repository:x:pull"'
            self._send(401, b"{}", {"WWW-Authenticate": challenge})
        else:
            self._content(url.path)

    def do_POST(self):
        fields = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        asked = (fields.get("grant_type"), fields.get("refresh_token"), fields.get("service"))
        if self.path == "/token" and asked == (["refresh_token"], [PASSWORD], ["test"]) and fields.get("client_id"):
            self._send(200, b'{"access_token": "the-token"}')
        else:
            self._send(401, b"{}")

    def _token(self, fields):
        known = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if fields.get("service") == ["test"] and self.headers.get("Authorization") == f"Basic {known}":
            self._send(200, b'{"token": "the-token"}')
        else:
            self._send(401, b"{}")

    def _content(self, path):
        _, _, rest = path.partition("/v2/")
        if "/manifests/" in rest:
            repository, _, version = rest.partition("/manifests/")
            found = self.server.manifests.get((repository, version))
            if found is not None:
                self._send(200, found[1], {"Content-Type": found[0]})
                return
        elif (content := self.server.blobs.get(rest.rpartition("/")[2])) is not None:
            self._blob(rest.rpartition("/")[2], content)
            return
        self._send(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')

    def _blob(self, digest, content):
        self.server.before_blob(digest)
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        rest = content[begin:]
        with self.server.lock:
            cut = self.server.break_after.pop(0) if self.server.break_after else None
        if cut is None or cut >= len(rest):
            self._send(206 if begin else 200, rest)
            return
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[:cut])
        self.close_connection = True

    def _send(self, status, content, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def open_registry():
    """A registry for a test's time."""
    with LocalRegistry() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(30)
