"""Credentials of registries, from the files that `docker`, `podman` and `apptainer registry login` write."""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Credentials", "find_credentials"]

_HELPER_TIMEOUT_S: Final = 30.0
_DOCKER_HUB_KEYS: Final = ("https://index.docker.io/v1/", "index.docker.io", "docker.io", "registry-1.docker.io")


class Credentials(NamedTuple):
    """A user and a password, or an access token in the place of one."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"<Credentials of {self.user}>"

    @property
    def header(self) -> str:
        """Return the value of an `Authorization` header."""
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


def find_credentials(host: str) -> Credentials | None:
    """The credentials for a registry's host; None if there are none. A credential helper is asked. Blocks.

    In order: `REGISTRY_AUTH_FILE`; the `config.json` of `DOCKER_CONFIG`, or of ~/.docker; podman's `auth.json`;
    Apptainer's `docker-config.json`.
    """
    keys = _DOCKER_HUB_KEYS if host == "docker.io" else (host, f"https://{host}", f"https://{host}/v1/")
    for path in _files():
        try:
            settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError):
            continue
        for key in keys:
            if found := _from_entry(settings.get("auths", {}).get(key)) or _from_helper(settings, key):
                return found
    return None


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
    if isinstance(entry.get("username"), str) and isinstance(entry.get("password"), str):
        return Credentials(entry["username"], entry["password"])
    try:
        user, colon, password = base64.b64decode(entry.get("auth") or "").decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return Credentials(user, password.rstrip("\0")) if colon else None


def _from_helper(settings: dict[str, Any], key: str) -> Credentials | None:
    helper = settings.get("credHelpers", {}).get(key) or settings.get("credsStore")
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
    return Credentials(answer.get("Username", ""), answer.get("Secret", ""))
