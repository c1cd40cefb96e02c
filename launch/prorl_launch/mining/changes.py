"""Differences between two trees as patches for git, and their single hunks."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from prorl_launch.mining.sdist import file_kind, write_tree

if TYPE_CHECKING:
    from prorl_launch.mining.sdist import Tree

MAX_GOLD_LINES: Final = 400
MAX_GOLD_FILES: Final = 10
GIT_TIMEOUT_S: Final = 60.0
_GIT: Final = ("git", "-c", "core.autocrlf=false", "-c", "core.quotePath=false", "-c", "core.safecrlf=false")
_ENV: Final = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "PATH": "/usr/local/bin:/usr/bin:/bin"}
_HUNK: Final = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)")


class PatchSize(NamedTuple):
    """Lines added and removed, and files."""

    lines: int
    files: int


class Hunk(NamedTuple):
    """A hunk of a patch, as a separate patch against the new tree without it."""

    path: str
    number: int
    patch: bytes


def changed_files(old: Tree, new: Tree) -> list[str]:
    """Return the paths whose content or presence differs, sorted."""
    return sorted(path for path in {*old, *new} if old.get(path) != new.get(path))


def merge_source(old: Tree, new: Tree) -> Tree:
    """Return the old tree with the new tree's sources, as the gold patch changes it."""
    kept = {path: entry for path, entry in old.items() if file_kind(path) != "source"}
    return kept | {path: entry for path, entry in new.items() if file_kind(path) == "source"}


def make_patch(old: Tree, new: Tree) -> bytes:
    """Return the patch from one tree to another in the format of `git diff --binary`; empty if they are equal.

    Blocks.
    """
    paths = changed_files(old, new)
    if not paths:
        return b""
    with tempfile.TemporaryDirectory(prefix="prorl-diff-") as scratch:
        for name, tree in (("a", old), ("b", new)):
            (Path(scratch) / name).mkdir()
            write_tree({path: tree[path] for path in paths if path in tree}, Path(scratch) / name)
        argv = [*_GIT, "diff", "--no-index", "--no-prefix", "--binary", "--no-renames", "--no-color", "a", "b"]
        done = subprocess.run(argv, cwd=scratch, capture_output=True, timeout=GIT_TIMEOUT_S, env=_ENV, check=False)
    if done.returncode != 1:
        raise RuntimeError(f"git diff failed with {done.returncode}: {done.stderr.decode(errors='replace')}")
    # Without prefixes, git uses the folder names, which are `a/` and `b/` like its own prefixes.
    return done.stdout


def patch_size(patch: bytes) -> PatchSize:
    """Return the size of a patch. A binary file counts as one line."""
    lines = files = 0
    inside = False
    for line in patch.splitlines():
        if line.startswith(b"diff --git "):
            files, inside = files + 1, False
        elif line.startswith(b"@@ "):
            inside = True
        elif line.startswith(b"GIT binary patch") or (inside and line.startswith((b"+", b"-"))):
            lines += 1
    return PatchSize(lines, files)


def is_text(patch: bytes) -> bool:
    """Return whether a patch is UTF-8, as required for a row."""
    try:
        patch.decode()
    except UnicodeDecodeError:
        return False
    return True


def hunks_of(patch: bytes) -> list[Hunk]:
    """Return the hunks of Python files that exist before and after.

    Each is a patch against the new tree without that hunk. In both versions it begins at its line in the new tree.
    """
    found = []
    for section in re.split(rb"(?m)^(?=diff --git )", patch):
        head, *bodies = re.split(rb"(?m)^(?=@@ )", section)
        path = _path(head)
        if path.endswith(".py"):
            found += [Hunk(path, number, head + _moved(body)) for number, body in enumerate(bodies, 1)]
    return found


def _path(head: bytes) -> str:
    """Return the path of a section whose file exists before and after; empty otherwise."""
    names = re.search(rb"(?m)^--- a/(.*)\n\+\+\+ b/(.*)$", head)
    return names[1].decode(errors="replace").rstrip("\t") if names and names[1] == names[2] else ""


def _moved(body: bytes) -> bytes:
    line, newline, rest = body.partition(b"\n")
    found = _HUNK.fullmatch(line)
    assert found is not None, line
    old_lines, start, new_lines = found[2] or b"1", found[3], found[4] or b"1"
    return b"@@ -%s,%s +%s,%s @@%s" % (start, old_lines, start, new_lines, found[5]) + newline + rest


def without_hunk(new: Tree, hunk: Hunk) -> Tree | None:
    """Return the new tree without a hunk. None if the result does not parse, or differs only in imports. Blocks."""
    with tempfile.TemporaryDirectory(prefix="prorl-hunk-") as scratch:
        folder = Path(scratch)
        write_tree({hunk.path: new[hunk.path]}, folder)
        argv = [*_GIT, "apply", "--reverse", "--whitespace=nowarn", "-"]
        done = subprocess.run(
            argv, cwd=folder, input=hunk.patch, capture_output=True, timeout=GIT_TIMEOUT_S, env=_ENV, check=False
        )
        content = (folder / hunk.path).read_bytes()
    if done.returncode or _program(content) in (None, _program(new[hunk.path].content)):
        return None
    return new | {hunk.path: new[hunk.path]._replace(content=content)}


@functools.lru_cache(maxsize=4)
def _program(content: bytes) -> str | None:
    """Return a module without its comments, docstrings and imports at the top; None if it does not parse."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body = [*node.body[1:]]
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return ast.dump(tree)


def imports_patch(base: Tree, new: Tree, gold: bytes) -> bytes:
    """Return a patch that adds the gold patch's imports in `new` to modules of `base`; empty if none.

    Blocks. Only imports at the top of a module, or in its conditions there, are included.
    """
    changed: Tree = {}
    for path in {found.decode() for found in re.findall(rb"(?m)^\+\+\+ b/(.*?\.py)\t?$", gold)}:
        if path not in base or path not in new:
            continue
        try:
            before, after = ast.parse(base[path].content), ast.parse(new[path].content)
        except (SyntaxError, ValueError):
            continue
        known = {ast.unparse(node) for node in _imports(before.body)}
        added = [each for node in _imports(after.body) if (each := ast.unparse(node)) not in known]
        if added:
            lines = base[path].content.splitlines(keepends=True)
            at = _first_line(before)
            text = "".join(f"{each}\n" for each in added).encode()
            changed[path] = base[path]._replace(content=b"".join([*lines[:at], text, *lines[at:]]))
    return make_patch({path: base[path] for path in changed}, changed)


def _imports(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If | ast.Try):
            found += _imports([*node.body, *node.orelse])
    return found


def _first_line(module: ast.Module) -> int:
    """Return the number of lines before the first statement other than a docstring or a `__future__` import."""
    at = 0
    for number, node in enumerate(module.body):
        docstring = not number and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        at = node.end_lineno or at
    return at
