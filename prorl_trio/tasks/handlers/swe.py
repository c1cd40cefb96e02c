"""Software engineering: an agent with bash and an editor changes a repository, which is tested in another sandbox."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from prorl_trio.agent.loop import run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.sandbox.provider import SandboxSpec
from prorl_trio.tasks.grading.repository import Suite, grade_repository
from prorl_trio.tasks.grading.repository_base import BASE, GIT, GIT_ENV, BaseNotMade, RepositoryBase, make_base
from prorl_trio.tasks.grading.repository_tests import RepositoryTests
from prorl_trio.tasks.grading.row_patches import read_patch
from prorl_trio.tasks.grading.verifier import again_if_killed, check_end
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation, worded
from prorl_trio.tools import BashTool, EditorTool, FinishTool, ToolSet
from prorl_trio.types.errors import NotRestorable, SandboxCallFailed, SandboxUnavailable, malformed_job
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.context import RolloutContext
    from prorl_trio.config import SandboxConfig
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.tasks.grading.repository import Graded
    from prorl_trio.tasks.grading.verifier import Bench
    from prorl_trio.types.models import Recorded

MAX_PATCH_BYTES: Final = 4 * 1024 * 1024
"""Longer patches are treated as no patch."""
MAX_NEW_FILE_BYTES: Final = 1024 * 1024
"""A larger new file is left out of the patch."""
MAX_NEW_BYTES: Final = 2 * 1024 * 1024
"""The limit of all new files together. Beyond it, the largest folders are left out."""
MAX_LEFT_OUT: Final = 50
"""Number of paths listed in `details`."""
LEFT_OUT: Final = ("left_out", "left_out_paths")
MAX_LEFT_OUT_BYTES: Final = 1024 * 1024
GIT_TIMEOUT_S: Final = 120.0

SYSTEM_PROMPT: Final = "You are a careful software engineer. You find the cause of a problem before you change code."

FOR_PROGRAMS: Final = """\
The repository is in {repo_dir}. Change it so that the problem is solved: find the cause, mend it, and try what you \
changed. Hidden tests decide; changes to tests and to their configuration do not count."""
INSTRUCTION: Final = f"{FOR_PROGRAMS} Call finish when it is done."

NUDGE: Final = "Go on with the tools. When the problem is solved, call finish."


class SwePayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`TaskInstance.payload` of a repository to change.

    Attributes:
        problem_statement: the agent's assignment.
        tests: the deciding tests. The agent learns neither their names nor their locations.
        image: for all sandboxes; empty selects the node's default. It contains git, and `python3` with the test runner.
        layers: over it, lowest first, as in `SandboxSpec.layers`: an environment, the repository.
        repo_dir: absolute path of the repository.
        env: environment variables for all programs in the sandbox (such as PATH).
        setup_patch: applied first to the image's repository: it introduces the bug if the task is made that way.
        hidden: files and folders missing in the agent's sandbox: paths in the repository, or absolute ones. Paths in
            the repository are restored for the tests.
        unversioned: folders in the repository that are not part of it and that no patch may change, such as an
            environment.
        sources: files in test folders that are not tests, and that the patch may change. Hooks are always the base's.
        test_patch: the row's change to its tests, a unified diff. The changed files are written over the agent's.
        test_files: content of files written over the agent's, by path in the repository.
        removed_test_files: files removed after the agent's work.
        source: the row's origin and licence; not used.
        system_prompt: replaces the handler's own.
        instruction: follows the statement in the user's message; replaces the handler's own. `{repo_dir}` is
            substituted.
    """

    problem_statement: str
    tests: RepositoryTests
    image: str = ""
    layers: tuple[str, ...] = ()
    repo_dir: str = "/testbed"
    env: dict[str, str] = {}
    setup_patch: str = ""
    hidden: tuple[str, ...] = ()
    unversioned: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    test_patch: str = ""
    test_files: dict[str, str] = {}
    removed_test_files: list[str] = []
    source: dict[str, Any] = {}
    system_prompt: str = SYSTEM_PROMPT
    instruction: str = INSTRUCTION

    def __post_init__(self) -> None:
        if not self.problem_statement.strip():
            raise ValueError("problem_statement is empty")
        if not self.repo_dir.startswith("/") or self.repo_dir == "/":
            raise ValueError(f"repo_dir must be the absolute path of a folder, got {self.repo_dir!r}")
        for path in (*self.test_files, *self.removed_test_files, *self.unversioned, *self.sources):
            if path.startswith("/") or ".." in path.split("/") or not path:
                raise ValueError(f"{path!r} is no path in the repository")
        read_patch(self.setup_patch, "setup_patch")
        read_patch(self.test_patch, "test_patch")
        for path in self.hidden:
            if ".." in path.split("/") or not path.strip("/"):
                raise ValueError(f"hidden: {path!r} is no path of a file or folder")

    @property
    def base(self) -> RepositoryBase:
        """Return how the repository is prepared."""
        return RepositoryBase(
            repo_dir=self.repo_dir,
            setup_patch=self.setup_patch,
            hidden=self.hidden,
            unversioned=self.unversioned,
            sources=self.sources,
        )


class SweHandler(AgentHandler):
    """Tasks like SWE-bench: the answer is a patch from the agent's sandbox, tested in another sandbox."""

    name = "swe"

    def validate(self, payload: Mapping[str, Any]) -> None:
        _payload(payload)

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        """Return the instance's image and layers, without a network unless the node allows it."""
        return _sandbox_spec(_payload(context.spec.instance.payload), context.resources.config.sandbox)

    async def init(self, context: RolloutContext) -> None:
        """Turn the repository into one commit, so that the history does not reveal the solution."""
        assert context.sandbox is not None
        try:
            await make_base(context.sandbox, _payload(context.spec.instance.payload).base)
        except BaseNotMade as exc:
            raise SandboxUnavailable(str(exc)) from exc

    async def run(self, context: RolloutContext) -> None:
        """Let the agent work and compute its patch, even if a budget has ended the work."""
        payload = _payload(context.spec.instance.payload)
        instruction = worded(context, payload.instruction, INSTRUCTION, FOR_PROGRAMS)
        instruction = instruction.replace("{repo_dir}", payload.repo_dir)
        messages = [
            ChatMessage(role="system", content=payload.system_prompt),
            ChatMessage(role="user", content=f"{payload.problem_statement}\n\n{instruction}".strip()),
        ]
        tools = ToolSet(
            [BashTool(), EditorTool(), FinishTool()],
            max_observation_chars=context.resources.config.agent.max_observation_chars,
        )
        await run_agent(context, messages, tools, _SweStyle())
        await self.collect(context)

    async def collect(self, context: RolloutContext) -> None:
        """Set `answer` to the patch in base64: text, binary files, modes, new files. None if it cannot be computed."""
        assert context.sandbox is not None
        context.answer = None
        try:
            base = _payload(context.spec.instance.payload).base
            patch, left_out = await again_if_killed(context, partial(_difference, context.sandbox, base))
        except (OSError, ValueError, SandboxCallFailed) as exc:  # the policy broke the repository or its git
            context.log_evaluation(f"the difference cannot be taken: {exc}\n")
        else:
            context.answer = base64.b64encode(patch).decode() if patch else None
            context.handler_state = left_out if left_out["left_out"] else {}

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Return 1.0 if the required tests pass, else 0.0; an empty patch gets 0.0 without a sandbox."""
        payload = _payload(context.spec.instance.payload)
        left_out: dict[str, Any] = context.handler_state or {}
        if context.answer is None:
            return Evaluation(reward=0.0, details={"patch": None, "resolved": False, **left_out})
        patch = base64.b64decode(context.answer)
        patch += b"" if patch.endswith(b"\n") else b"\n"  # git rejects a last line without newline
        grade = partial(grade_change, context, payload, patch, context.resources.config.sandbox)
        graded = await again_if_killed(context, grade)
        context.log_evaluation(graded.run.log)
        return Evaluation(
            reward=float(graded.verdict.resolved),
            details={
                "patch": patch.decode(errors="replace"),
                "patch_base64": context.answer,
                "applied_by": graded.run.applied_by,
                "needed_fuzz": "fuzz" in graded.run.applied_by,
                "restored": [*graded.run.restored],
                **left_out,
                **graded.verdict.details(),
            },
        )

    def gradable(self, context: RolloutContext) -> dict[str, Any]:
        """Return the patch. See `AgentHandler.gradable`."""
        return {"patch_base64": context.answer}

    def restore(self, context: RolloutContext, recorded: Recorded) -> None:
        """Restore the patch. See `AgentHandler.restore`."""
        if "patch" in recorded.details and recorded.details["patch"] is None:
            context.answer = None
            return
        stored = recorded.details.get("patch_base64", "")
        try:
            base64.b64decode(stored, validate=True)
        except (binascii.Error, TypeError, ValueError) as exc:
            raise NotRestorable(f"details.patch_base64 is no base64: {exc}") from exc
        context.answer = stored
        context.handler_state = {key: recorded.details[key] for key in LEFT_OUT if key in recorded.details}


async def grade_change(
    bench: Bench, payload: SwePayload, patch: bytes | None, config: SandboxConfig, *, last_try: bool = True
) -> Graded:
    """Grade a change to a row's repository as in an evaluation. Arguments and errors as in `grade_repository`."""
    suite = Suite(
        spec=_sandbox_spec(payload, config),
        base=payload.base,
        arguments=payload.tests.arguments,
        test_timeout_s=payload.tests.test_timeout_s,
        timeout_s=payload.tests.timeout_s,
        test_files=payload.test_files,
        removed_test_files=payload.removed_test_files,
        test_patch=payload.test_patch,
        script=payload.tests.script,
        runner=payload.tests.runner,
    )
    return await grade_repository(bench, patch, payload.tests, suite, last_try=last_try)


def _sandbox_spec(payload: SwePayload, sandbox: SandboxConfig) -> SandboxSpec:
    return SandboxSpec(
        image=payload.image or sandbox.image,
        layers=payload.layers,
        env=payload.env,
        network=sandbox.network,
        start_timeout_s=sandbox.start_timeout_s,
        limits=sandbox.limits,
    )


class _LeftOut(msgspec.Struct, frozen=True):
    """The output of `drivers/take_changes.py`, in a sandbox whose Python may be the policy's."""

    left_out: dict[str, str]
    left_out_paths: Annotated[int, msgspec.Meta(ge=0, le=2**62)]


def _portable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


class _SweStyle(AgentStyle):
    def nudge(self) -> str:
        return NUDGE


async def _difference(sandbox: Sandbox, base: RepositoryBase, *, last_try: bool) -> tuple[bytes, dict[str, Any]]:
    """Return the difference from the base and, for `Outcome.details`, the omitted paths with the reasons.

    The difference is computed in a separate repository with the objects of the agent's, because the agent may have
    staged, committed and configured anything.

    Raises:
        ValueError: git failed, Python's output is invalid, or the patch exceeds `MAX_PATCH_BYTES`.
        OSError, SandboxCallFailed: git could not be started.
        ProgramKilled: git was killed, and another try is left.
    """
    git_dir = f"/tmp/changes-{secrets.token_hex(8)}.git"
    env = {
        **GIT_ENV,
        "GIT_DIR": git_dir,
        "GIT_WORK_TREE": base.repo_dir,
        "GIT_INDEX_FILE": f"{git_dir}/index",
        "HOME": git_dir,  # for git versions without GIT_CONFIG_GLOBAL
        "XDG_CONFIG_HOME": git_dir,
    }
    job = {
        "git": GIT,
        "base": BASE,
        "unversioned": base.unversioned,
        "max_file_bytes": MAX_NEW_FILE_BYTES,
        "max_new_bytes": MAX_NEW_BYTES,
        "max_named": MAX_LEFT_OUT,
    }
    program = (files("prorl_trio.tasks.grading") / "drivers" / "take_changes.py").read_text()
    argv = ["python3", "-I", "-c", f"{program}\n\nmain()\n"]
    done = await sandbox.exec(
        argv,
        timeout_s=GIT_TIMEOUT_S,
        cwd=base.repo_dir,
        env=env,
        stdin=msgspec.json.encode(job),
        max_output_bytes=MAX_LEFT_OUT_BYTES,
    )
    if not last_try:
        check_end("git", done)
    if done.exit_code != 0:
        raise ValueError(done.stderr.decode(errors="replace").strip())
    try:
        found = msgspec.convert(json.loads(done.stdout), _LeftOut)
    except RecursionError as exc:
        raise ValueError(f"python3 is none any more: {exc}") from exc
    # A name that is not valid Unicode cannot be part of an outcome.
    named = {_portable(path): _portable(why) for path, why in found.left_out.items()}
    left_out = {"left_out": named, "left_out_paths": found.left_out_paths}
    patch = bytearray()

    def take(stream: str, data: bytes) -> None:
        if stream == "stdout":
            patch.extend(data)
            if len(patch) > MAX_PATCH_BYTES:
                raise ValueError(f"the patch has more than {MAX_PATCH_BYTES} bytes")

    words = ("diff", "--cached", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color", BASE)
    done = await sandbox.exec([*GIT, *words], timeout_s=GIT_TIMEOUT_S, cwd=base.repo_dir, env=env, on_output=take)
    if not last_try:
        check_end("git", done)
    if done.exit_code != 0:
        raise ValueError(f"diff: {done.stderr.decode(errors='replace').strip()}")
    return bytes(patch), left_out


def _payload(payload: Mapping[str, Any]) -> SwePayload:
    try:
        return msgspec.convert(payload, SwePayload)
    except msgspec.ValidationError as exc:
        raise malformed_job(exc, prefix="$.instance.payload") from exc
