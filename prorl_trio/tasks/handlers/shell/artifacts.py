"""Artefacts: files of an agent's sandbox passed to its verifier and recorded in an outcome."""

from __future__ import annotations

import base64
import errno
import os
import posixpath
import zlib
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_ipc.file_calls import TreePart
from prorl_ipc.tree import TreeLimits, TreeRefused
from prorl_ipc.tree_reader import TreeReader
from prorl_ipc.tree_writer import TreeWriter
from prorl_trio.sandbox.transfer import TransferOptions
from prorl_trio.tasks.grading.verifier import check_end
from prorl_trio.tasks.handlers.shell.payload import HOME
from prorl_trio.types.errors import EvaluationError, SandboxCallFailed

if TYPE_CHECKING:
    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.tasks.handlers.shell.payload import Environment, Verification

ARTIFACTS_DIR: Final = "/logs/artifacts"
MAX_KEPT_BYTES: Final = 4 * 1024 * 1024
"""Limit of the artefacts of a step kept in an outcome. Beyond it, the rollout cannot be graded again."""
MAX_KEPT_CHARS: Final = 8 * 1024 * 1024
"""Limit of the artefacts of all steps as stored in an outcome: compressed and in base64."""
MAX_KEPT_ENTRIES: Final = 10_000
PUT_TIMEOUT_S: Final = 60.0
STAGED: Final = "/tmp/.carried"
CARRIED: Final = TransferOptions(overwrite=True, max_bytes=1024**3, max_entries=100_000, remote_roots=("/",))
_LEVEL: Final = 1
_OURS: Final = (errno.EMFILE, errno.ENFILE, errno.EIO)
"""Errors of this machine, not of a sandbox."""

Carried = list[tuple[str, Path]]
"""Artefacts: their paths in a sandbox, and their paths here."""

LAY_OVER: Final = """\
above=$(dirname -- "$2")
while [ ! -e "$above" ] && [ ! -h "$above" ]; do above=$(dirname -- "$above"); done
[ -d "$above" ] || rm -f -- "$above"
if [ -d "$1" ] && [ ! -h "$1" ]; then
    [ -d "$2" ] || rm -f -- "$2"
    mkdir -p -- "$2" && (cd -- "$1" && find . -type d -exec sh -c '
        for path; do [ -d "$0/$path" ] || rm -f -- "$0/$path"; done' "$2" {} + && find . ! -type d -exec sh -c '
        for path; do if [ -d "$0/$path" ] && [ ! -h "$0/$path" ]; then rm -rf -- "$0/$path"; fi; done' "$2" {} +) &&
    cp -a -- "$1/." "$2"
else
    if [ -d "$2" ] && [ ! -h "$2" ]; then rm -rf -- "$2"; fi
    mkdir -p -- "$(dirname -- "$2")" && cp -a -- "$1" "$2"
fi && rm -rf -- "$1"
"""
"""Folders are merged. If one side is a file and the other a folder, the agent's replaces the other."""


class NotTaken(Exception):
    """An artefact cannot be placed into a verifier's sandbox."""


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A recorded artefact: its place in a sandbox, and its tree."""

    remote: str
    parts: list[TreePart]


async def collect(context: RolloutContext, verifier: Verification, environment: Environment, folder: Path) -> Carried:
    """Copy artefacts out of the agent's sandbox.

    Missing or oversized artefacts are the agent's fault and are left out.
    """
    assert context.sandbox is not None
    start = environment.workdir or HOME
    found: Carried = []
    with context.waiting("the agent's artefacts", "agent_budget"):
        for number, path in enumerate(dict.fromkeys([ARTIFACTS_DIR, *verifier.artifacts])):
            remote, local = posixpath.normpath(posixpath.join(start, path)), folder / f"{number}"
            try:
                await context.sandbox.download(remote, local, options=CARRIED)
                found.append((remote, local))
            except (OSError, ValueError, SandboxCallFailed) as exc:
                if path != ARTIFACTS_DIR:
                    context.log_evaluation(f"artefact {path}: {exc}\n")
    return found


async def put(sandbox: Sandbox, local: Path, remote: str) -> None:
    """Place an artefact over existing files of the sandbox; folders are merged, as in Harbor.

    Raises:
        NotTaken: the sandbox does not accept it. The artefact may be the reason.
        EvaluationError: this machine cannot read it.
        ProgramKilled: the program that places it was killed.
    """
    try:
        await sandbox.upload(local, STAGED, options=CARRIED)
        argv = ["/bin/sh", "-c", LAY_OVER, "sh", STAGED, remote]
        result = await sandbox.exec(argv, timeout_s=PUT_TIMEOUT_S)
    except (OSError, ValueError, SandboxCallFailed) as exc:
        kind = EvaluationError if isinstance(exc, OSError) and exc.errno in _OURS else NotTaken
        raise kind(f"the verifier's sandbox does not take {remote}: {exc}") from exc
    check_end("sh", result)
    if result.exit_code != 0:
        said = result.stderr.decode(errors="replace").strip()
        raise NotTaken(f"the verifier's sandbox does not take {remote}: {said}")


def pack(carried: Carried, max_chars: int) -> str | None:
    """Return artefacts as text for an outcome's details. Blocks on the disk.

    Returns None if they exceed `MAX_KEPT_BYTES`, or the text exceeds `max_chars`.
    """
    kept: list[_Kept] = []
    left_bytes, left_entries = MAX_KEPT_BYTES, MAX_KEPT_ENTRIES
    for remote, local in carried:
        limits = TreeLimits(max_bytes=left_bytes, max_entries=left_entries)
        parts: list[TreePart] = []
        try:
            with closing(TreeReader(os.fsencode(local.resolve()), limits)) as reader:
                done = False
                while not done:
                    more, done = reader.next_parts()
                    parts += more
        except TreeRefused:
            return None
        left_bytes, left_entries = left_bytes - reader.counts.size_bytes, left_entries - reader.counts.entries
        kept.append(_Kept(remote, parts))
    packed = base64.b64encode(zlib.compress(msgspec.msgpack.encode(kept), _LEVEL)).decode()
    return packed if len(packed) <= max_chars else None


def unpack(packed: str, folder: Path) -> Carried:
    """Write the artefacts of `pack` into `folder`. Blocks on the disk.

    Raises:
        EvaluationError: the text is invalid. Nothing outside of `folder` is written.
    """
    limits = TreeLimits(max_bytes=MAX_KEPT_BYTES, max_entries=MAX_KEPT_ENTRIES)
    found: Carried = []
    try:
        inflate = zlib.decompressobj()
        content = inflate.decompress(base64.b64decode(packed, validate=True), 8 * MAX_KEPT_BYTES)
        for number, kept in enumerate(msgspec.msgpack.decode(content, type=list[_Kept])):
            local = folder / f"{number}"
            with closing(TreeWriter(os.fsencode(local.resolve()), limits, overwrite=False)) as writer:
                writer.take(kept.parts)
                writer.finish()
            found.append((kept.remote, local))
    except (ValueError, zlib.error, msgspec.DecodeError, TreeRefused) as exc:
        raise EvaluationError(f"the recorded artefacts cannot be read: {exc}") from exc
    return found
