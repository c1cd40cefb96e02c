"""The configuration of pip, converted for uv, which does not read it. Standard library only."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from prorl_launch.progress import SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ASK_TIMEOUT_S: Final = 60.0


def pip_settings(python: str = sys.executable) -> dict[str, str]:
    """Return the settings of pip's files and variables for all commands, by the option's long name without dashes.

    Raises:
        SetupError: pip is missing for this Python.
    """
    listed = ask([python, "-m", "pip", "config", "list"])
    of_files: dict[str, str] = {}
    of_variables: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        # A command's own section is skipped.
        if section in ("global", ":env:"):
            (of_files if section == "global" else of_variables)[option] = str(ast.literal_eval(value))
    return of_files | of_variables


def ask(argv: list[str]) -> str:
    """Return the output of a command.

    Raises:
        SetupError: it failed.
    """
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    if done.returncode:
        raise SetupError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout


def index_options(settings: Mapping[str, str]) -> list[str]:
    """Return the options of `uv pip install` for pip's settings: the indexes, and the selection of versions.

    Like pip, uv then uses the best version of any index, and skips a local index that does not exist.
    """
    options = ["--index-strategy", "unsafe-best-match"]
    for name in ("index-url", "extra-index-url"):
        found = [url for url in settings.get(name, "").split() if _may_exist(url)]
        options += [word for url in found for word in (f"--{name}", url)]
    options += [word for place in settings.get("find-links", "").split() for word in ("--find-links", place)]
    options += ["--no-index"] * (settings.get("no-index", "") in {"1", "true", "yes", "on"})
    return options


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return uv's environment variables for pip's network settings, and without progress bars or Python downloads."""
    named = {
        "SSL_CERT_FILE": settings.get("cert"),
        "SSL_CLIENT_CERT": settings.get("client-cert"),
        "UV_HTTP_TIMEOUT": settings.get("timeout", settings.get("default-timeout")),
        "UV_INSECURE_HOST": settings.get("trusted-host"),
        "ALL_PROXY": settings.get("proxy"),
    }
    ours = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    return {name: value for name, value in named.items() if value} | ours


def _may_exist(url: str) -> bool:
    return not url.startswith("file:") or os.path.isdir(urlsplit(url).path)
