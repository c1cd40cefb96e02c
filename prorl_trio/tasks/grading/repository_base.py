"""The single commit that an agent starts from, and the tests applied over it later, both made from the image.

The agent's and the evaluator's sandboxes are prepared in the same way, so that a patch from one applies in the other.
Only the evaluator's contains the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from prorl_trio.tasks.grading.row_patches import forms_of_patch
from prorl_trio.types.errors import SandboxCallFailed

if TYPE_CHECKING:
    from prorl_trio.sandbox.sandbox import Sandbox

BASE: Final = "prorl-base"
"""The tag of the single commit that the agent starts from."""
TESTS: Final = "prorl-tests"
"""A tag in the evaluator's repository: the row's version of its test files."""
STAMP: Final = "/tmp/prorl-stamp"
"""A file created before a patch, for comparison with folders that a patch may not touch."""
STEP_TIMEOUT_S: Final = 120.0
MAX_LISTED_BYTES: Final = 2 * 1024 * 1024

GIT: Final = (
    *("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false"),
    *("-c", "user.name=base", "-c", "user.email=base@localhost", "-c", "commit.gpgSign=false", "-c", "gc.auto=0"),
    *("-c", "core.autocrlf=false", "-c", "safe.directory=*", "-c", "init.defaultBranch=base"),
)
"""Git without the configuration of a repository, as far as a command line can override it."""
GIT_ENV: Final = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
}


class BaseNotMade(Exception):
    """The image or the row does not contain a usable repository."""


class RepositoryBase(msgspec.Struct, frozen=True, kw_only=True):
    """A task's repository and how it is made from its image.

    Attributes:
        repo_dir: absolute path of the repository.
        setup_patch: applied first: it introduces the bug if the task is made that way.
        hidden: files and folders that the agent never sees: paths in the repository, or absolute ones.
        unversioned: folders in the repository that are not part of it and that no patch may touch, such as an
            environment.
        sources: files in test folders that are not tests, and that a patch may change.
    """

    repo_dir: str
    setup_patch: str = ""
    hidden: tuple[str, ...] = ()
    unversioned: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def clean(self) -> str:
        """Return the shell command that resets the working tree to the last commit, except for empty folders."""
        kept = " ".join(f"-e {quote('/' + each)}" for each in self.unversioned)
        left = f"{git('status --porcelain --ignored')} -- . {self._others}"
        return f'{git("reset -q --hard")} && {{ {git("clean -q -fdx")} {kept}; [ -z "$({left})" ]; }}'

    @property
    def add(self) -> str:
        """Return the shell command that adds the whole working tree to the index, including ignored files."""
        return f"{git('add -A -f')} -- . {self._others}"

    @property
    def _others(self) -> str:
        return " ".join(quote(f":(exclude){each}") for each in self.unversioned)


class RowTests(NamedTuple):
    """Files in which the row's tests differ from the base: files in the commit `TESTS`, and files missing from it."""

    written: list[str]
    removed: list[str]


async def make_base(sandbox: Sandbox, base: RepositoryBase, *, test_patch: str | None = None) -> RowTests:
    """Turn the repository into one commit tagged `BASE`, without history, caches and hidden files.

    Args:
        sandbox: a sandbox that is still unused.
        base: how the repository is made.
        test_patch: for the evaluator's sandbox: it also gets the commit `TESTS`, with the hidden files and this patch.
            None skips that commit.

    Returns:
        The files in which the commit `TESTS` differs from `BASE`.

    Raises:
        BaseNotMade: the repository is missing, or a patch of the row does not apply to it.
        SandboxLost: the sandbox ended.
    """
    await _run(sandbox, base, f"{_forget(base)} && {git('init -q')}", "its history cannot be removed")
    if base.setup_patch:
        await _apply(sandbox, base, base.setup_patch, "setup_patch")
    if test_patch is not None:
        await _commit(sandbox, base, "whole")
        if test_patch:
            await _apply(sandbox, base, test_patch, "test_patch")
        await _commit(sandbox, base, TESTS)
        await _run(sandbox, base, git("reset -q --hard HEAD~1"), "the tests cannot be taken out again")
    if base.hidden:
        hidden = " ".join(quote(each if each.startswith("/") else f"./{each}") for each in base.hidden)
        script = f'rm -rf {hidden} || [ -z "$(find {hidden} ! -type d 2>/dev/null)" ]'
        await _run(sandbox, base, script, "what is to be hidden cannot be removed")
    await _commit(sandbox, base, BASE)
    if base.unversioned:  # later changes get another time than the stamp
        await _run(sandbox, base, f"touch {STAMP} && {{ sleep 0.1 || sleep 1; }}", "no file can be written in /tmp")
    if test_patch is None:
        return RowTests([], [])
    listed = await _run(
        sandbox, base, git(f"diff --name-status --no-renames -z {BASE} {TESTS}"), "the tests cannot be listed"
    )
    words = listed.split("\0")
    changes = list(zip(words[0::2], words[1::2], strict=False))
    return RowTests([path for how, path in changes if how != "D"], [path for how, path in changes if how == "D"])


def touched_unversioned(base: RepositoryBase) -> str:
    """Return a shell command that prints something if a file in `unversioned` folders changed since `make_base`."""
    return f"find {' '.join(quote('./' + each) for each in base.unversioned)} -cnewer {STAMP} -print 2>&1 | head -n 1"


def _forget(base: RepositoryBase) -> str:
    """Return the shell command that removes history, bytecode without sources, and pip's archives.

    Bytecode would reveal the repository before its bug was introduced, or hidden tests. Empty folders may remain,
    because Apptainer cannot remove folders of its image.
    """
    kept = "".join(f"-path {quote('./' + each)} -prune -o " for each in base.unversioned)
    found = f"find . {kept}\\( -name .git -o -name __pycache__ -o -name .pytest_cache \\) -prune -exec"
    return (
        f'{{ {found} rm -rf {{}} + || [ -z "$({found} find {{}} ! -type d \\;)" ]; }} && '
        "{ rm -rf ${HOME:+$HOME/.cache/pip $HOME/.cache/uv} /root/.cache/pip /root/.cache/uv 2>/dev/null || true; }"
    )


async def _commit(sandbox: Sandbox, base: RepositoryBase, name: str) -> None:
    """Commit everything and tag the commit."""
    script = f"{base.add} && {git(f'commit -q --allow-empty -m {name}')} && {git(f'tag {name}')}"
    await _run(sandbox, base, script, "it cannot be committed")


async def _apply(sandbox: Sandbox, base: RepositoryBase, patch: str, field: str) -> None:
    """Apply a patch of the row in the first form that works. Raises BaseNotMade with the error of the original form."""
    failed = None
    for form in forms_of_patch(patch, field):
        try:
            await _run(sandbox, base, git("apply --whitespace=nowarn -"), f"{field} does not apply", form)
        except BaseNotMade as exc:
            failed = failed or exc
        else:
            return
    if failed is not None:
        raise failed


async def _run(sandbox: Sandbox, base: RepositoryBase, script: str, failed: str, stdin: str = "") -> str:
    try:
        done = await sandbox.exec(
            ["sh", "-c", script],
            timeout_s=STEP_TIMEOUT_S,
            cwd=base.repo_dir,
            env=GIT_ENV,
            stdin=stdin.encode(errors="surrogateescape"),
            max_output_bytes=MAX_LISTED_BYTES,
        )
    except (OSError, SandboxCallFailed) as exc:
        raise BaseNotMade(f"the repository in {base.repo_dir} cannot be made ready: {exc}") from exc
    if done.exit_code != 0:
        said = done.stderr.decode(errors="replace").strip()[-2000:]
        ended = f"no end after {STEP_TIMEOUT_S:g} s" if done.timed_out else f"exit code {done.exit_code}"
        raise BaseNotMade(f"the repository in {base.repo_dir} cannot be made ready: {failed} ({ended}): {said}")
    return done.stdout.decode(errors="surrogateescape")


def git(words: str) -> str:
    """Return a git shell command."""
    return f"{' '.join(map(quote, GIT))} {words}"


def quote(word: str) -> str:
    """Return a word quoted for the shell, whatever it contains."""
    return "'" + word.replace("'", "'\"'\"'") + "'"
