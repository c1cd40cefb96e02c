"""Source archives as trees of files in memory, and the purpose of each file."""

from __future__ import annotations

import email
import email.policy
import re
import tarfile
import tomllib
import zipfile
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from prorl_launch.mining.index import normal_name
from prorl_trio.tasks.grading.repository import belongs_to_tests
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MAX_FILES: Final = 5_000
MAX_TREE_BYTES: Final = 64 * 1024 * 1024

FileKind = Literal["source", "test", "documentation", "packaging"]
"""`test`: tests, their data, and configuration of pytest. `packaging`: files generated for the release."""

_DOCUMENT_DIRS: Final = frozenset({"doc", "docs", "example", "examples"})
_DOCUMENT_NAME: Final = re.compile(
    r"(?i)((readme|changes|changelog|history|news|authors|contributors|contributing|licen[cs]e|copying|todo|security"
    r"|code_of_conduct)(\b.*)?)|.*\.(md|rst)"
)
_PACKAGING: Final = re.compile(r"(PKG-INFO|MANIFEST(\.in)?|setup\.py|Makefile|\.[^/]*|.*\.lock)")
_TESTS_EXTRAS: Final = ("test", "tests", "testing")


class Entry(NamedTuple):
    """A file of a tree."""

    content: bytes
    executable: bool = False


Tree = dict[str, Entry]
"""Files by their path in the repository."""


class Metadata(NamedTuple):
    """A release's own metadata. `requires` includes the requirements of its tests."""

    licence: str
    requires: tuple[str, ...]


def read_sdist(path: Path) -> Tree:
    """Return the files of a source archive, without its outermost folder, bytecode and links. Blocks.

    Raises:
        ConfigError: it cannot be read, or contains more than 5,000 files or 64 MiB.
    """
    tree: Tree = {}
    total = 0
    try:
        for name, content, executable in _members(path):
            parts = name.split("/")
            if len(parts) < 2 or ".." in parts or "__pycache__" in parts or name.endswith((".pyc", ".pyo")):
                continue
            total += len(content)
            tree["/".join(parts[1:])] = Entry(content, executable)
            if len(tree) > MAX_FILES or total > MAX_TREE_BYTES:
                raise ConfigError(f"{path.name} has more than {MAX_FILES} files or {MAX_TREE_BYTES} bytes in it")
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as exc:
        raise ConfigError(f"{path}: it cannot be read: {exc}") from exc
    return tree


def _members(path: Path) -> Iterator[tuple[str, bytes, bool]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir() and info.file_size <= MAX_TREE_BYTES:
                    yield info.filename, archive.read(info), False
        return
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isfile() and member.size <= MAX_TREE_BYTES and (file := tar.extractfile(member)) is not None:
                yield member.name.removeprefix("./"), file.read(), bool(member.mode & 0o100)


def write_tree(tree: Mapping[str, Entry], folder: Path) -> None:
    """Write a tree into a folder. Blocks."""
    for name, entry in tree.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(entry.content)
        target.chmod(0o755 if entry.executable else 0o644)


def file_kind(path: str) -> FileKind:
    """Return the purpose of a repository's file, by its path. Everything that grading restores is `test`."""
    *folders, name = path.split("/")
    if belongs_to_tests(path):
        return "test"
    if any(folder.endswith(".egg-info") for folder in folders) or folders[:1] in ([".github"], [".git"]):
        return "packaging"
    if _DOCUMENT_DIRS.intersection(folders) or _DOCUMENT_NAME.fullmatch(name):
        return "documentation"
    return "packaging" if _PACKAGING.fullmatch(name) else "source"


def read_metadata(package: str, tree: Tree) -> Metadata:
    """Return the release's licence, and its requirements and its tests' requirements, without the package itself."""
    said = email.message_from_bytes(tree.get("PKG-INFO", Entry(b"")).content, policy=email.policy.compat32)
    licences = [str(value).strip() for value in said.get_all("License-Expression") or []]
    licences += [
        str(value).rpartition("::")[2].strip() for value in said.get_all("Classifier") or [] if "License" in value
    ]
    licences += [str(value).strip().partition("\n")[0] for value in said.get_all("License") or []]
    licence = next((value for value in licences if value and value not in ("UNKNOWN", "OSI Approved")), "")
    listed = [str(value) for value in said.get_all("Requires-Dist") or []]
    if not listed:
        listed = [*_required_txt(tree)]
    wanted = [*filter(None, map(_without_extra, listed)), *_test_group(tree)]
    own = normal_name(package)
    return Metadata(licence, tuple(dict.fromkeys(each for each in wanted if _package(each) != own)))


def _without_extra(requirement: str) -> str:
    """Return a requirement without the condition of a test extra; empty if it belongs to another extra."""
    what, _, marker = requirement.partition(";")
    extra = re.search(r"""\(?\s*extra\s*==\s*['"]([^'"]+)['"]\s*\)?""", marker)
    if extra is None:
        return requirement.strip()
    if normal_name(extra[1]) not in _TESTS_EXTRAS:
        return ""
    rest = re.sub(r"\s*\b(and|or)\s*$|^\s*(and|or)\b\s*", "", (marker[: extra.start()] + marker[extra.end() :]).strip())
    return f"{what.strip()}; {rest}" if rest.strip() else what.strip()


def _required_txt(tree: Tree) -> Iterator[str]:
    """Yield the requirements of an older release, which are in a separate file."""
    name = next((each for each in tree if each.endswith(".egg-info/requires.txt")), "")
    section = ""
    for line in tree.get(name, Entry(b"")).content.decode(errors="replace").splitlines():
        if heading := re.fullmatch(r"\[([^\]:]*)(:(.*))?\]", line.strip()):
            section = heading[1]
        elif line.strip() and (not section or normal_name(section) in _TESTS_EXTRAS):
            yield line.strip()


def _test_group(tree: Tree) -> list[str]:
    try:
        groups = tomllib.loads(tree.get("pyproject.toml", Entry(b"")).content.decode()).get("dependency-groups", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return []
    found = [item for name in _TESTS_EXTRAS for item in groups.get(name, [])]
    return [item for item in found if isinstance(item, str)]


def _package(requirement: str) -> str:
    found = re.match(r"\s*([\w.-]+)", requirement)
    return normal_name(found[1]) if found else ""
