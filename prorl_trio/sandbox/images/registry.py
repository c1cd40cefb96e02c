"""A client of registries with the OCI distribution protocol: manifests, and blobs from any byte on.

It honours a registry's rate limits (429, Retry-After) for all processes that share the store. It obtains and renews
tokens, and retries failed requests within a limit. Proxies come from the environment. Blocks: run it in a process of
its own.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import email.utils
import http.client
import logging
import os
import random
import re
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from prorl_trio.sandbox.cache import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.client import HTTPResponse

    from prorl_trio.sandbox.images.names import Reference


READ_TIMEOUT_S: Final = 60.0
"""Longest silence of a registry while it connects, or between two pieces of an answer."""
FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 60.0
MAX_MANIFEST_BYTES: Final = 16 * 1024 * 1024

logger = logging.getLogger(__name__)

_CLIENT_ID: Final = "prorl-trio"
_PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})
_CHALLENGE: Final = re.compile(r'(\w+)="([^"]*)"')
_MANIFESTS: Final = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)

_HELPER_TIMEOUT_S: Final = 30.0
_NO_USER: Final = "00000000-0000-0000-0000-000000000000"
_TOKEN_USER: Final = "<token>"
"""The user name with which a helper marks its secret as an identity token."""
_DOCKER_HUB_KEYS: Final = ("https://index.docker.io/v1/", "index.docker.io", "docker.io", "registry-1.docker.io")


class Credentials(NamedTuple):
    """A user and a password, or an access token instead.

    For an identity token, such as the one of `az acr login`, the registry's realm issues access tokens (OAuth 2, grant
    type `refresh_token`; Docker's "Registry v2 authentication using OAuth2").
    """

    user: str
    password: str
    is_identity_token: bool = False

    def __repr__(self) -> str:
        return f"<Credentials of {self.user}>"

    @property
    def header(self) -> str:
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


def find_credentials(host: str) -> Credentials | None:
    """Return the credentials for a registry's host, or None. Calls a credential helper if configured. Blocks.

    Keys are read as Docker reads them: `https://HOST/v2/` and `http://HOST` also belong to the host.

    In order: `REGISTRY_AUTH_FILE`; the `config.json` of `DOCKER_CONFIG`, or of ~/.docker; podman's `auth.json`;
    Apptainer's `docker-config.json`.
    """
    keys = _DOCKER_HUB_KEYS if host == "docker.io" else (host, f"https://{host}", f"https://{host}/v1/")
    for path in _files():
        try:
            settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError):
            continue
        entries = _table(settings, "auths")
        for key in dict.fromkeys((*keys, *(key for key in entries if _host_of(key) in keys))):
            if found := _from_entry(entries.get(key)) or _from_helper(settings, key):
                return found
    return None


def _table(settings: dict[str, Any], name: str) -> dict[str, Any]:
    table = settings.get(name)
    return table if isinstance(table, dict) else {}


def _host_of(key: str) -> str:
    """Return the host if the key is a URL of a registry API; return other keys, such as podman paths, unchanged."""
    host, _, path = re.sub(r"^https?://", "", key).partition("/")
    return host if path.strip("/") in ("", "v1", "v2") else key


def _files() -> Iterator[Path]:
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    home = Path(os.path.expanduser("~"))  # `~` itself if the user lacks a home: then no file below it is found
    yield Path(os.environ.get("DOCKER_CONFIG") or home / ".docker", "config.json")
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime, "containers", "auth.json")
    yield home / ".config" / "containers" / "auth.json"
    yield home / ".apptainer" / "docker-config.json"


def _from_entry(entry: object) -> Credentials | None:
    if not isinstance(entry, dict):
        return None
    if isinstance(entry.get("identitytoken"), str) and entry["identitytoken"]:
        return Credentials(_NO_USER, entry["identitytoken"], is_identity_token=True)
    if isinstance(entry.get("username"), str) and isinstance(entry.get("password"), str):
        return Credentials(entry["username"], entry["password"])
    try:
        user, colon, password = base64.b64decode(entry.get("auth") or "").decode().partition(":")
    except (binascii.Error, UnicodeDecodeError, TypeError):
        return None
    return Credentials(user, password.rstrip("\0")) if colon else None


def _from_helper(settings: dict[str, Any], key: str) -> Credentials | None:
    helper = _table(settings, "credHelpers").get(key) or settings.get("credsStore")
    if not isinstance(helper, str) or "/" in helper:
        return None
    try:
        asked = subprocess.run(
            (f"docker-credential-{helper}", "get"),
            input=key.encode(),
            capture_output=True,
            timeout=_HELPER_TIMEOUT_S,
            check=True,
        )
        answer = msgspec.json.decode(asked.stdout, type=dict[str, str])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return None
    user, secret = answer.get("Username", ""), answer.get("Secret", "")
    return Credentials(_NO_USER, secret, is_identity_token=True) if user == _TOKEN_USER else Credentials(user, secret)


class RegistryError(Exception):
    """A registry refused a request, or did not answer in time. The message has a remedy."""


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


class Registry:
    """The registry of a reference. Thread-safe.

    Args:
        reference: names the host and the repository.
        plain_http: it does not use TLS.
        patience_s: how long a request may wait and retry without progress.
    """

    def __init__(self, reference: Reference, *, plain_http: bool, patience_s: float) -> None:
        self._reference = reference
        scheme = "http" if plain_http else "https"
        self._base = f"{scheme}://{reference.api_host}/v2/{reference.repository}"
        self._patience_s = patience_s
        self._pause = _Pause(reference.host)
        self._lock = threading.Lock()
        self._authorization = ""

    def manifest(self, version: str) -> tuple[bytes, str]:
        """Return the manifest of a tag or digest, and its media type.

        Raises:
            RegistryError: see there.
        """
        with self._request(f"manifests/{version}", {"Accept": _MANIFESTS}) as answer:
            content = answer.read(MAX_MANIFEST_BYTES + 1)
            media_type = answer.headers.get_content_type()
        if len(content) > MAX_MANIFEST_BYTES:
            raise RegistryError(f"{self._name}: the manifest {version} has more than {MAX_MANIFEST_BYTES} bytes")
        return content, media_type

    def blob(self, digest: str, offset: int) -> HTTPResponse:
        """Return the response for a blob from byte `offset` on. Its status is 206, or 200 for the whole blob.

        Raises:
            RegistryError: see there.
        """
        return self._request(f"blobs/{digest}", {"Range": f"bytes={offset}-"} if offset else {})

    @property
    def _name(self) -> str:
        return f"{self._reference.host}/{self._reference.repository}"

    def _request(self, path: str, headers: dict[str, str]) -> HTTPResponse:
        give_up_at = time.monotonic() + self._patience_s
        backoff_s = FIRST_BACKOFF_S
        asked_for_token = False
        while True:
            self._pause.wait(give_up_at, self._name)
            request = urllib.request.Request(f"{self._base}/{path}", headers=headers)
            authorization = self._authorization
            if authorization:  # only for this host, and not for a host that it redirects to
                request.add_unredirected_header("Authorization", authorization)
            try:
                answer: HTTPResponse = urllib.request.urlopen(request, timeout=READ_TIMEOUT_S)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code == 401 and not asked_for_token:
                        asked_for_token = True
                        self._authorize(error.headers.get("WWW-Authenticate", ""), authorization)
                        continue
                    if error.code not in _PASSING:
                        raise RegistryError(self._refusal(path, error)) from error
                    wait_s = _retry_after_s(error.headers.get("Retry-After"))
                    why = f"HTTP {error.code}"
                    if wait_s is not None or error.code == 429:
                        self._pause.until(time.time() + (backoff_s if wait_s is None else wait_s))
            except (OSError, http.client.HTTPException) as error:
                wait_s, why = None, str(getattr(error, "reason", error)) or type(error).__name__
            else:
                return answer
            asked_for_token = False
            wait_s = backoff_s * random.uniform(0.8, 1.2) if wait_s is None else wait_s
            if time.monotonic() + wait_s > give_up_at:
                raise RegistryError(
                    f"{self._name}: {path} was not had within {self._patience_s:g} s; the last answer: {why}, next try "
                    f"in {wait_s:.0f} s. What has been downloaded is kept: pull again later{_advice(why)}"
                )
            left_s = int(give_up_at - time.monotonic())
            left = f"{left_s // 60} min {left_s % 60} s"
            logger.warning("%s: %s; retrying in %.0f s, for %s more", self._name, why, wait_s, left)
            time.sleep(wait_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> str:
        said = error.read(500).decode(errors="replace").strip()
        advice = {
            401: "; its credentials are wrong, or there are none: `docker login` or `apptainer registry login`",
            403: "; these credentials may not read it",
            404: "; there is no such image, or it wants credentials: `docker login` or `apptainer registry login`",
        }.get(error.code, "")
        return f"{self._name}: {path} was refused with HTTP {error.code}{advice}. It said: {said or 'nothing'}"

    def _authorize(self, challenge: str, tried: str) -> None:
        """Obtain the token that `WWW-Authenticate` asks for, unless another thread has just done so."""
        with self._lock:
            if self._authorization != tried:
                return
            kind, _, rest = challenge.partition(" ")
            known = find_credentials(self._reference.host)
            if kind.lower() == "basic":
                if known is None:
                    raise RegistryError(f"{self._name} wants credentials: `docker login {self._reference.host}`")
                self._authorization = known.header
            elif kind.lower() == "bearer":
                fields = dict(_CHALLENGE.findall(rest))
                realm = fields.pop("realm", "")
                if urllib.parse.urlsplit(realm).scheme not in ("http", "https"):  # urllib also reads local files
                    raise RegistryError(f"{self._name} names no address for tokens, but {realm[:200]!r}")
                fields.setdefault("scope", f"repository:{self._reference.repository}:pull")
                if known is not None and known.is_identity_token:
                    fields |= {"grant_type": "refresh_token", "refresh_token": known.password}
                    fields["client_id"] = _CLIENT_ID
                    request = urllib.request.Request(realm, data=urllib.parse.urlencode(fields).encode())
                else:
                    request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(fields)}")
                if known is not None and not known.is_identity_token:
                    request.add_unredirected_header("Authorization", known.header)
                self._authorization = f"Bearer {self._token(request)}"
            else:
                raise RegistryError(
                    f"{self._name} wants a kind of authorization that is not known: {challenge[:200]!r}"
                )

    def _token(self, request: urllib.request.Request) -> str:
        try:
            with urllib.request.urlopen(request, timeout=READ_TIMEOUT_S) as answer:
                token = msgspec.json.decode(answer.read(MAX_MANIFEST_BYTES), type=_Token)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RegistryError(
                f"{self._name}: no token was given for it ({error}); are the credentials right? `docker login "
                f"{self._reference.host}`"
            ) from error
        return token.token or token.access_token


def _advice(why: str) -> str:
    return ", or log in for a higher limit" if why == "HTTP 429" else ""


def _retry_after_s(value: str | None) -> float | None:
    """Return the seconds of a `Retry-After`, which has seconds or a date; None if it has neither."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


class _Pause:
    """The time before which a registry wants no further request, as a file for all processes of the store."""

    def __init__(self, host: str) -> None:
        self._path = cache_dir() / "images" / ".hosts" / re.sub(r"[^A-Za-z0-9.]", "-", host)

    def until(self, time_s: float) -> None:
        """Store the Unix time that it has requested."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(f"{time_s}")

    def wait(self, give_up_at: float, name: str) -> None:
        """Wait for that time, unless it is later than `give_up_at` of the monotonic clock."""
        try:
            left_s = float(self._path.read_text()) - time.time()
        except (OSError, ValueError):
            return
        if left_s > give_up_at - time.monotonic():
            raise RegistryError(
                f"{name}: the registry limits requests, and wants none for {left_s:.0f} s more. What has been "
                "downloaded is kept: pull again later, or log in for a higher limit"
            )
        if left_s > 0:
            logger.warning("%s: the registry limits requests; waiting for %.0f s", name, left_s)
            time.sleep(left_s)
