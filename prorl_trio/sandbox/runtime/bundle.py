"""The self-contained runtime: a CPython with its own loader, libraries and the daemon's packages, in one folder.

Bound read-only at `BUNDLE_DIR` it runs in any Linux root of this machine's architecture: one with another glibc, with
musl, without a Python, without any library at all. What it starts uses the root's own libraries, for nothing in the
environment leads to ours. `prorl_launch.bundle` makes it, once, in the cache folder; here it is found.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import sys
from typing import TYPE_CHECKING, Final

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.types.errors import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


BUNDLE_DIR: Final = "/opt/prorl/runtime"
"""Its folder inside. Its interpreter names its loader by this path."""

BUNDLE_PYTHON: Final = f"{BUNDLE_DIR}/bin/python3"
BUNDLE_PACKAGES: Final = f"{BUNDLE_DIR}/packages"

_RECIPE: Final = 2
"""Raise it when `prorl_launch.bundle` makes something else of the same parts."""

_REQUIRED: Final = ("trio", "msgspec", "ptyprocess", "ipython")
_OPTIONAL: Final = ("jupyter-client",)

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_LEFT_OUT: Final = frozenset({"tests", "_tests"})
"""Folders of packages that nobody imports."""


def closure(required: Iterable[str], optional: Iterable[str] = ()) -> tuple[importlib.metadata.Distribution, ...]:
    """These, and what they need, by name. An optional one that is not installed is left out.

    A requirement that is not installed is one for another system or another Python. Extras are not followed.

    Raises:
        importlib.metadata.PackageNotFoundError: one of `required` is not installed.
    """
    required = frozenset(map(_normal, required))
    found: dict[str, importlib.metadata.Distribution] = {}
    pending = [*required, *map(_normal, optional)]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in required:
                raise
            continue
        needs = [text for text in found[name].requires or () if "extra ==" not in text]
        pending += [_normal(match[0]) for match in map(_NAME.match, needs) if match is not None]
    return tuple(found[name] for name in sorted(found))


def installed_files(distribution: importlib.metadata.Distribution) -> Iterator[importlib.metadata.PackagePath]:
    """Its files as its installer listed them, relative to the folder of packages, without its own tests.

    Raises:
        LookupError: there is no such list.
    """
    if not distribution.files:
        raise LookupError(f"{distribution.name} was not installed by pip: there is no list of its files")
    for file in distribution.files:
        if _LEFT_OUT.isdisjoint(file.parts[:-1]):
            yield file


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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
            f"the runtime for images other than `host` is not in {path}; make it with `prorl-trio setup runtime`"
        )
    return path
