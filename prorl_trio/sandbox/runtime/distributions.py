"""Packages installed beside this project that a sandbox may be shown: those named, and what they need."""

from __future__ import annotations

import importlib.metadata
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
