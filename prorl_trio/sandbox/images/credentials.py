"""Credentials of registries, from the files that `docker`, `podman` and `apptainer registry login` write."""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

_HELPER_TIMEOUT_S: Final = 30.0
_NO_USER: Final = "00000000-0000-0000-0000-000000000000"
_TOKEN_USER: Final = "<token>"
"""The user by which a helper says that its secret is an identity token."""
_DOCKER_HUB_KEYS: Final = ("https://index.docker.io/v1/", "index.docker.io", "docker.io", "registry-1.docker.io")


class Credentials(NamedTuple):
    """A user and a password, or an access token in the place of one.

    For an identity token, as `az acr login` leaves one, the registry's realm gives access tokens (OAuth 2, grant type
    `refresh_token`; Docker's "Registry v2 authentication using OAuth2").
    """

    user: str
    password: str
    is_identity_token: bool = False

    def __repr__(self) -> str:
        return f"<Credentials of {self.user}>"

    @property
    def header(self) -> str:
        """Return the value of an `Authorization` header."""
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


def find_credentials(host: str) -> Credentials | None:
    """The credentials for a registry's host; None if there are none. A credential helper is asked. Blocks.

    Keys are read as docker reads them: `https://HOST/v2/` and `http://HOST` are the host's, too.

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
    """Return the host of a key that is a URL of a registry's API; other keys as they are, such as podman's paths."""
    host, _, path = re.sub(r"^https?://", "", key).partition("/")
    return host if path.strip("/") in ("", "v1", "v2") else key


def _files() -> Iterator[Path]:
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    yield Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker", "config.json")
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime, "containers", "auth.json")
    yield Path.home() / ".config" / "containers" / "auth.json"
    yield Path.home() / ".apptainer" / "docker-config.json"


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
