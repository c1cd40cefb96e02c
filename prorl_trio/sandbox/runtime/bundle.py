"""The self-contained runtime: a CPython with its own loader, libraries and the daemon's packages, in one folder.

Bound read-only at `BUNDLE_DIR` it runs in any Linux root of this machine's architecture: with another glibc, with musl,
without a Python, without any library. Its child processes use the root's own libraries, because the environment does
not refer to ours. `prorl_launch.bundle` makes it, once, in the cache folder; this module finds it.
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
"""Its folder inside the sandbox. Its interpreter refers to its loader by this path."""

BUNDLE_PYTHON: Final = f"{BUNDLE_DIR}/bin/python3"
BUNDLE_PACKAGES: Final = f"{BUNDLE_DIR}/packages"

_RECIPE: Final = 2
"""Increase it when `prorl_launch.bundle` builds something else from the same parts."""

_REQUIRED: Final = ("trio", "msgspec", "ptyprocess", "ipython")
_OPTIONAL: Final = ("jupyter-client",)

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_LEFT_OUT: Final = frozenset({"tests", "_tests"})
"""Folders of packages that are never imported."""


def closure(required: Iterable[str], optional: Iterable[str] = ()) -> tuple[importlib.metadata.Distribution, ...]:
    """Return these distributions and their dependencies, by name. Missing optional ones are omitted.

    A missing requirement is one for another system or another Python. Extras are not followed.

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
    """Yield its files as listed by its installer, relative to the folder of packages, without its own tests.

    Raises:
        LookupError: the list is missing.
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
    """Return the distributions of the daemon and IPython with their dependencies, as installed here; by name.

    Jupyter's client is included if it is installed.

    Raises:
        importlib.metadata.PackageNotFoundError: a dependency of the daemon is not installed.
    """
    return closure(_REQUIRED, _OPTIONAL)


def bundle_path() -> Path:
    """Return the folder, existing or not; its name depends on the versions and the Python."""
    return cache_dir() / "runtimes" / _key()


@functools.cache
def _key() -> str:
    versions = [f"{distribution.name}=={distribution.version}" for distribution in bundled_distributions()]
    facts = [_RECIPE, BUNDLE_DIR, sys.version, platform.machine(), versions]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def require_bundle() -> Path:
    """Return the existing folder of the runtime.

    Raises:
        SandboxUnavailable: it was not made for the currently installed versions.
    """
    path = bundle_path()
    if not path.is_dir():
        raise SandboxUnavailable(
            f"the runtime for images other than `host` is not in {path}; make it with `prorl-trio setup runtime`"
        )
    return path
