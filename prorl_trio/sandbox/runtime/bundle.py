"""The self-contained runtime: a CPython with its own loader, libraries and the daemon's packages, in one folder.

Bound read-only at `BUNDLE_DIR` it runs in any Linux root of this machine's architecture: one with another glibc, with
musl, without a Python, without any library at all. What it starts uses the root's own libraries, for nothing in the
environment leads to ours. `prorl_launch.bundle` makes it, once, in the cache folder; here it is found.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from typing import TYPE_CHECKING, Final

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.sandbox.runtime.distributions import closure
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    import importlib.metadata
    from pathlib import Path

BUNDLE_DIR: Final = "/opt/prorl/runtime"
"""Its folder inside. Its interpreter names its loader by this path."""

BUNDLE_PYTHON: Final = f"{BUNDLE_DIR}/bin/python3"
BUNDLE_PACKAGES: Final = f"{BUNDLE_DIR}/packages"

_RECIPE: Final = 2
"""Raise it when `prorl_launch.bundle` makes something else of the same parts."""

_REQUIRED: Final = ("trio", "msgspec", "ptyprocess", "ipython")
_OPTIONAL: Final = ("jupyter-client",)


@functools.cache
def bundled_distributions() -> tuple[importlib.metadata.Distribution, ...]:
    """Return what the daemon and IPython need, and what that needs, as installed beside this project; by name.

    Jupyter's client too, where it is.

    Raises:
        importlib.metadata.PackageNotFoundError: one of the daemon's own is not installed.
    """
    return closure(_REQUIRED, _OPTIONAL)


def bundle_path() -> Path:
    """The folder, made or not: another set of versions, or another Python, is another folder."""
    return cache_dir() / "runtimes" / _key()


@functools.cache
def _key() -> str:
    versions = [f"{distribution.name}=={distribution.version}" for distribution in bundled_distributions()]
    facts = [_RECIPE, BUNDLE_DIR, sys.version, platform.machine(), versions]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def require_bundle() -> Path:
    """The folder of the runtime, which exists.

    Raises:
        SandboxUnavailable: it has not been made, or not of what is installed now.
    """
    path = bundle_path()
    if not path.is_dir():
        raise SandboxUnavailable(
            f"the runtime for images other than `host` is not in {path}; make it with `prorl-trio image runtime` "
            "(`make setup` does)"
        )
    return path
