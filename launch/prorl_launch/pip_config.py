"""The configuration of pip, converted for uv, which does not read it. Standard library only."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from prorl_launch.progress import SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ASK_TIMEOUT_S: Final = 60.0
_SECTIONS: Final = ("global", "install", ":env:")
"""The later ones win."""


def pip_settings(python: str = sys.executable) -> dict[str, str]:
    """Return the settings of pip's files and variables for `pip install`, by the option's long name without dashes.

    Raises:
        SetupError: pip is missing for this Python.
    """
    listed = ask([python, "-m", "pip", "config", "list"])
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in found and (text := str(ast.literal_eval(value))):  # pip ignores empty values
            found[section][option] = text
    return {option: text for section in _SECTIONS for option, text in found[section].items()}


def ask(argv: list[str]) -> str:
    """Return the output of a command. pip prints it even if its configuration says quiet.

    Raises:
        SetupError: it failed.
    """
    loud = os.environ | {"PIP_QUIET": "0"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False, env=loud)
    if done.returncode:
        raise SetupError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout


def index_options(settings: Mapping[str, str]) -> list[str]:
    """Return the options of `uv pip install` for the settings of pip that no variable of uv covers."""
    return ["--no-index"] * (settings.get("no-index", "").lower() in {"1", "true", "t", "yes", "y", "on"})


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return uv's environment variables for pip's indexes and network, without progress bars or Python downloads.

    Like pip, uv then uses the best version of any index, skips an extra local index that does not exist, and reads no
    configuration of its own. Indexes are variables, not options, because an address may contain a password.
    """
    named = {
        "UV_DEFAULT_INDEX": settings.get("index-url"),
        "UV_EXTRA_INDEX_URL": " ".join(filter(_may_exist, settings.get("extra-index-url", "").split())),
        "UV_FIND_LINKS": ",".join(settings.get("find-links", "").split()),
        "SSL_CERT_FILE": settings.get("cert"),
        "SSL_CLIENT_CERT": settings.get("client-cert"),
        "UV_HTTP_TIMEOUT": settings.get("timeout", settings.get("default-timeout")),
        "UV_INSECURE_HOST": " ".join(settings.get("trusted-host", "").split()),
        "ALL_PROXY": settings.get("proxy"),
    }
    ours = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_CONFIG": "1"}
    ours |= {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    return {name: value for name, value in named.items() if value} | ours


def _may_exist(url: str) -> bool:
    return not url.startswith("file:") or os.path.isdir(unquote(urlsplit(url).path))
