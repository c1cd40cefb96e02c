"""Adds an agent's changes to a git index, without unwanted files: `python -c ... < JOB`, in the repository.

The job is JSON: `git` (its command line), `base` (the commit), `unversioned`, `max_file_bytes`, `max_new_bytes` and
`max_named`. The output is `{"left_out": {PATH: WHY}, "left_out_paths": COUNT}`, with the first `max_named` paths. These
files are left out: new files in virtual environments and nested repositories, new files that git ignores, unreadable
files, and very large new files. If the new files are too large together, the largest folders are left out first. Files
of the base are always included.

Git works in its own folder, `$GIT_DIR`, which is created here. Nothing that the agent configured in the repository
takes effect (filters, hooks, attributes, includes, another working tree). Only the repository's objects are read.

Runs in sandboxes: uses only the syntax and the standard library of Python 3.5.
"""

import json
import os
import subprocess
import sys
from typing import Any

IGNORED = "ignored by git"
_MAX_REF_BYTES = 4096
_SPECIAL = set("\\*?[]!# \t")


class GitFailed(Exception):
    """Git exited with a non-zero code. The argument is its exit code, negative for a signal."""


def main() -> None:
    """Run the job. If git fails, exit with its exit code, as a shell would."""
    job = json.loads(sys.stdin.read())
    try:
        _make_git_dir(os.environ["GIT_DIR"], job["base"])
        left_out = _take(job, os.path.join(os.environ["GIT_DIR"], "exclude"))
    except GitFailed as exc:
        code = int(exc.args[0])
        sys.exit(128 - code if code < 0 else code)
    named = {path: left_out[path] for path in list(left_out)[: job["max_named"]]}
    sys.stdout.write(json.dumps({"left_out": named, "left_out_paths": len(left_out)}))


def _make_git_dir(folder: str, base: str) -> None:
    """Create a repository without configuration, with the objects and the tag `base` of the current repository."""
    files = {
        "HEAD": "ref: refs/heads/base",
        "config": "[core]\n\trepositoryformatversion = 0\n\tbare = false",
        "objects/info/alternates": os.path.join(os.getcwd(), ".git", "objects"),
        "refs/tags/" + base: _commit_of(base),
    }
    for name, content in files.items():
        path = os.path.join(folder, name)
        if not os.path.isdir(os.path.dirname(path)):
            os.makedirs(os.path.dirname(path))
        with open(path, "wb") as file:
            file.write(os.fsencode(content + "\n"))


def _commit_of(tag: str) -> str:
    """Return the commit of a tag of the current repository. Raises GitFailed."""
    name = "refs/tags/" + tag
    try:
        with open(os.path.join(".git", name), "rb") as file:
            return os.fsdecode(file.read(_MAX_REF_BYTES)).strip()
    except OSError:
        pass
    try:
        with open(os.path.join(".git", "packed-refs"), "rb") as file:
            for line in file:
                words = os.fsdecode(line).split()
                if len(words) == 2 and words[1] == name:
                    return words[0]
    except OSError:
        pass
    sys.stderr.write("there is no tag {} in .git\n".format(tag))  # noqa: UP032 - Python 3.5
    raise GitFailed(128)


def _take(job: Any, exclude: str) -> Any:
    git = job["git"] + ["-c", "core.excludesFile=" + exclude]
    others = [":(exclude)" + each for each in job["unversioned"]]
    _run([*git, "read-tree", job["base"]])
    tracked = set(_run([*git, "ls-files", "-z"]))
    folders = _folders(tracked)
    left_out, unreadable = _walk(job["unversioned"])
    kept = [each for each in unreadable if each in tracked or each in folders]  # git ignores patterns for these
    others += [":(exclude,literal)" + each for each in kept]
    _write_patterns(exclude, [path for path in left_out if path not in kept])
    ignored = _run([*git, "ls-files", "-o", "-i", "--exclude-standard", "--directory", "-z"])
    for path in ignored:
        if not _within(path, left_out) and not _within(path, job["unversioned"]):
            left_out[path.rstrip("/")] = IGNORED
    new = [path for path in _run([*git, "ls-files", "-o", "--exclude-standard", "-z"]) if path not in unreadable]
    left_out.update(_too_large([each for each in new if not _within(each, job["unversioned"])], folders, job))
    _write_patterns(exclude, [path for path, why in left_out.items() if why != IGNORED and path not in kept])
    _run([*git, "add", "-A", "--", ".", *others])
    return left_out


def _walk(unversioned: Any) -> Any:
    """Return the folders and files to leave out, each with the reason, and the unreadable ones among them."""
    left_out = {}  # type: Any
    unreadable = []
    for folder, names, files in os.walk("."):
        here = os.path.relpath(folder, ".")
        inside = []
        for name in names:
            path = os.path.normpath(os.path.join(here, name))
            whole = os.path.join(folder, name)
            if path == ".git" or path in unversioned or os.path.islink(whole):
                continue
            if not os.access(whole, os.R_OK | os.X_OK):
                left_out[path] = "it cannot be read"
                unreadable.append(path)
            elif os.path.exists(os.path.join(whole, "pyvenv.cfg")):
                left_out[path] = "a virtual environment"
            elif os.path.lexists(os.path.join(whole, ".git")):
                left_out[path] = "a repository of its own"
            else:
                inside.append(name)
        names[:] = inside
        for name in files:
            path = os.path.normpath(os.path.join(here, name))
            whole = os.path.join(folder, name)
            if not os.path.islink(whole) and not os.access(whole, os.R_OK):
                left_out[path] = "it cannot be read"
                unreadable.append(path)
    return left_out, unreadable


def _folders(paths: Any) -> Any:
    folders = set()
    for path in paths:
        while "/" in path:
            path = path.rpartition("/")[0]
            folders.add(path)
    return folders


def _too_large(new: Any, folders: Any, job: Any) -> Any:
    """Return the new files left out for their size: very large files first, then whole new folders."""
    left_out = {}
    sizes = {}  # type: Any
    for path in new:
        size = os.lstat(path).st_size if os.path.lexists(path) else 0
        if size > job["max_file_bytes"]:
            left_out[path] = "{} bytes".format(size)  # noqa: UP032 - Python 3.5
            continue
        parts = path.split("/")
        top = path
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) not in folders:
                top = "/".join(parts[:depth])
                break
        sizes[top] = sizes.get(top, 0) + size + 100
    total = 0
    for top in sorted(sizes, key=lambda each: (sizes[each], each)):
        total += sizes[top]
        if total > job["max_new_bytes"]:
            left_out[top] = "too many bytes of new files"
    return left_out


def _within(path: str, folders: Any) -> bool:
    parts = path.rstrip("/").split("/")
    return any("/".join(parts[: depth + 1]) in folders for depth in range(len(parts)))


def _write_patterns(exclude: str, paths: Any) -> None:
    """Write git's ignore patterns. A path with a line break cannot be expressed."""
    with open(exclude, "wb") as file:
        for path in paths:
            if "\n" not in path:
                escaped = "".join("\\" + each if each in _SPECIAL else each for each in path)
                file.write(os.fsencode("/" + escaped + "\n"))


def _run(argv: Any) -> Any:
    """Return git's output, split at the NULs. Raises GitFailed."""
    done = subprocess.Popen(argv, stdout=subprocess.PIPE)
    printed = done.communicate()[0]
    if done.returncode:
        raise GitFailed(done.returncode)
    return [os.fsdecode(each) for each in printed.split(b"\0") if each]
