"""Candidates for tasks from pairs of releases, before any test is run. Blocks on disk and network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from prorl_launch.mining.changes import (
    MAX_GOLD_FILES,
    MAX_GOLD_LINES,
    changed_files,
    hunks_of,
    is_text,
    make_patch,
    merge_source,
    patch_size,
    without_hunk,
)
from prorl_launch.mining.index import download, list_sdists
from prorl_launch.mining.sdist import file_kind, read_metadata, read_sdist
from prorl_launch.mining.statements import changelog_section
from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.tasks.grading.repository import is_test_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prorl_launch.mining.index import IndexFile, IndexSettings
    from prorl_launch.mining.sdist import Metadata, Tree

MAX_HUNKS: Final = 12
"""Maximum number of hunks to try per release, spread evenly."""


class Release(NamedTuple):
    """A release of a package: its archive and the content."""

    package: str
    file: IndexFile
    sha256: str
    tree: Tree
    metadata: Metadata


class Candidate(NamedTuple):
    """A repository to change, and the change. `section` is the changelog's text; `path` is set for a single hunk."""

    instance_id: str
    kind: Literal["release", "hunk"]
    old: Release
    new: Release
    base: Tree
    gold: bytes
    section: str = ""
    path: str = ""


def read_releases(package: str, count: int, settings: IndexSettings) -> list[Release]:
    """Return the newest `count` final releases of a package, oldest first.

    Raises:
        ConfigError: the index has none, or a release cannot be downloaded or read.
    """
    found = []
    for file in list_sdists(package, settings)[-count:]:
        path, sha256 = download(file, cache_dir() / "mining" / "sdists", settings)
        tree = read_sdist(path)
        found.append(Release(package, file, sha256, tree, read_metadata(package, tree)))
    return found


def candidates_of(old: Release, new: Release, *, hunks: int = MAX_HUNKS) -> Iterator[Candidate]:
    """Yield the whole release as a candidate, followed by single hunks, spread evenly."""
    package, version = new.package, new.file.version
    gold = make_patch(old.tree, merge_source(old.tree, new.tree))
    section = changelog_section(new.tree, version)
    yield Candidate(f"{package}__{old.file.version}-{version}", "release", old, new, old.tree, gold, section)
    found = hunks_of(gold)
    step = max(1, -(-len(found) // max(1, hunks)))
    left = hunks
    for number in (number for first in range(step) for number in range(first, len(found), step)):
        if left and (tree := without_hunk(new.tree, found[number])) is not None:
            left -= 1
            name, hunk = f"{package}__{version}-hunk-{number + 1}", found[number]
            yield Candidate(name, "hunk", old, new, _with_old_tests(tree, old.tree), hunk.patch, "", hunk.path)


def _with_old_tests(tree: Tree, old: Tree) -> Tree:
    """Return a tree with the tests of the previous release, because the new tests would reveal the missing code."""
    kept = {path: entry for path, entry in tree.items() if file_kind(path) != "test"}
    return kept | {path: entry for path, entry in old.items() if file_kind(path) == "test"}


def refusal(candidate: Candidate) -> str:
    """Return why a candidate is unusable, whatever its tests report; empty if it is usable."""
    size = patch_size(candidate.gold)
    if not size.lines:
        return "no source file differs"
    if size.lines > MAX_GOLD_LINES or size.files > MAX_GOLD_FILES:
        return (
            f"the gold patch has {size.lines} lines in {size.files} files; the limits are {MAX_GOLD_LINES} and "
            f"{MAX_GOLD_FILES}"
        )
    if not changed_tests(candidate):
        return "no module of tests differs"
    if not candidate.new.metadata.licence:
        return f"{candidate.new.file.name} states no licence"
    if not is_text(candidate.gold):
        return "the gold patch is no UTF-8 text"
    if candidate.kind == "release" and not candidate.section:
        return f"no changelog has a section on {candidate.new.file.version}"
    return ""


def changed_tests(candidate: Candidate) -> list[str]:
    """Return the test modules that the newer release added or changed.

    Only these are run, as for the rows of SWE-bench: all other tests are in the repository that the agent gets.
    """
    old, new = candidate.old.tree, candidate.new.tree
    return [path for path in changed_files(old, new) if path in new and is_test_module(path)]


def source_folders(tree: Mapping[str, object]) -> list[str]:
    """Return the folders of a repository from which its modules are imported, nearest first."""
    own = {path.split("/")[0] for path in tree if path.endswith(".py")}
    layouts = [name for name in ("src", "lib") if name in own and f"{name}/__init__.py" not in tree]
    return [*layouts, "."]
