"""Tasks in a shell: an agent with bash and an editor, and the task's own verifiers."""

from __future__ import annotations

import posixpath
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import msgspec
import trio

from prorl_trio.agent.loop import run_agent
from prorl_trio.agent.style import AgentStyle
from prorl_trio.tasks.grading.reward_file import MAX_REWARD_BYTES, REWARD_FILES, parse_rewards, scalar_reward
from prorl_trio.tasks.grading.verifier import ProgramKilled, again_if_killed, backstop_s, check_end
from prorl_trio.tasks.handlers.base import AgentHandler, Evaluation, worded
from prorl_trio.tasks.handlers.shell.artifacts import MAX_KEPT_CHARS, NotTaken, collect, pack, put, unpack
from prorl_trio.tasks.handlers.shell.environment import (
    CLEAR,
    begin_step,
    make_ready,
    make_root_layer,
    noticing_kills,
    spec_of,
    start_shell,
)
from prorl_trio.tasks.handlers.shell.payload import FOR_PROGRAMS, HOME, SYSTEM_PROMPT, read_payload
from prorl_trio.tasks.handlers.shell.steps import Progress, StepRecord, is_unanswered, meets, reward_of
from prorl_trio.threads import run_sync
from prorl_trio.tools import BashTool, EditorTool, FinishTool, ToolSet
from prorl_trio.types.errors import (
    EvaluationError,
    HandlerError,
    MalformedJob,
    SandboxCallFailed,
    SandboxLost,
    SandboxUnavailable,
)
from prorl_trio.types.models import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prorl_trio.agent.context import Resources, RolloutContext
    from prorl_trio.sandbox.provider import SandboxSpec
    from prorl_trio.sandbox.sandbox import Sandbox
    from prorl_trio.tasks.handlers.shell.payload import Environment, ShellPayload, Solution, Step, Verification
    from prorl_trio.tools.base import Observation
    from prorl_trio.types.models import Recorded


NUDGE: Final = "Go on with the tools. When the task is done, call finish."


# The verifier of a task in a shell is the task's own script. It runs in the agent's sandbox, or in a fresh one.
#
# If the script leaves no reward, the task or the agent may be at fault. A control run decides: the same script in a
# fresh sandbox without any of the agent's files. If that leaves no reward either, no verdict is possible. Otherwise the
# agent prevented its verdict, and the reward is 0.
#
# If the script is killed (SIGKILL) without reaching a limit, the cause is unknown as well: it is run once more.
#
# The script's limit applies to its own time (`prorl_daemon.exec`). It does not advance while the script waits for a
# CPU, so the script may take up to twice as long. Wall time is a backstop; a script that reaches it lacked CPU, and no
# verdict is possible.
#
# A script that runs the agent's programs may leave a reward written by those programs. Signs of that are processes that
# outlive the script (they are killed before the reward is read) or write the reward after its end, a signal that ended
# it, a `reward.json` next to `reward.txt`, a reward that is no longer writable, and a modified test file. The script
# may also cause such signs itself. So a reward with such a sign counts only if the control run has the same sign;
# otherwise it is 0.

VERIFIER_DIR: Final = "/logs/verifier"
FIRST_SHARE: Final = 0.6
"""Share of the remaining evaluation time; the rest is for a control run."""
EVAL_MARGIN_S: Final = 10.0
STEP_TIMEOUT_S: Final = 60.0
MAX_LOG_BYTES: Final = 64 * 1024
LINGER_S: Final = 0.5
"""Time for processes that exit together with the script, such as the `tee` of its output."""

KILL_OTHERS: Final = """\
for round in 1 2 3 4 5; do
    left=
    for entry in /proc/[0-9]*; do
        pid=${entry#/proc/}
        [ "$pid" = 1 ] || [ "$pid" = $$ ] || [ "$pid" = "$PPID" ] || { kill -9 "$pid" 2>/dev/null && left=1; }
    done
    [ -n "$left" ] || exit 0
done
exit 0
"""
"""Kills everything except the sandbox's own processes, using only shell builtins."""

LIST: Final = "cd /proc && echo [0-9]*"
AFTER: Final = """\
before=" 1 $$ $PPID $1 "
for round in 1 2 3 4 5; do
    found=
    for entry in /proc/[0-9]*; do
        pid=${entry#/proc/}
        case $before in *" $pid "*) continue;; esac
        { read -r stat <"$entry/stat"; } 2>/dev/null || continue
        case ${stat##*) } in [ZX]*) continue;; esac
        kill -9 "$pid" 2>/dev/null && found=1 left=1
    done
    [ -n "$found" ] || break
done
[ -z "$left" ] || echo outlived
cd /logs/verifier 2>/dev/null || exit 0
if [ -e reward.json ] && [ -e reward.txt ]; then echo both; fi
for path in . reward.json reward.txt; do
    if [ -e $path ] && [ ! -w $path ]; then echo sealed; break; fi
done
exit 0
"""
"""Kills the processes that are not in the list `$1`, and prints signs that the reward is not the script's own."""
SIGNS: Final = {
    "outlived": "a process outlived the verifier's script, or wrote the reward after its end",
    "killed": "a signal ended the verifier's script",
    "both": "there is a reward.json beside reward.txt",
    "sealed": "the reward cannot be written any more",
    "altered": "a file of the tests was changed while they ran",
}


class Case(NamedTuple):
    """A step to be graded: its verifier, the agent's environment, and the sandboxes of the agent and the verifier.

    `max_kept_chars` limits its artefacts in the record of the rollout. `is_counted`: its rewards count towards the
    task's, so the key `reward` or a single key is required.
    """

    verifier: Verification
    environment: Environment
    agents: SandboxSpec
    own: SandboxSpec
    max_kept_chars: int
    is_counted: bool = True

    @property
    def where(self) -> Environment:
        """Return the environment in which the verifier runs."""
        return self.verifier.environment or self.environment


class _NoVerdict(Exception):
    """The verifier left no reward. The message gives the reason."""


class _Verdict(NamedTuple):
    """The rewards of a run of the verifier, and `SIGNS` that they were forged."""

    rewards: dict[str, float]
    signs: frozenset[str]


async def verify(context: RolloutContext, case: Case, record: StepRecord) -> None:
    """Run a step's verifier on the agent's work, and store its verdict in `record`.

    If artefacts are recorded, they replace the agent's sandbox.

    Raises:
        EvaluationError, SandboxUnavailable, SandboxLost: no verdict is possible.
    """

    async def grade(*, last_try: bool) -> _Verdict:
        if case.verifier.separate:
            return await _in_own_sandbox(context, case, record, last_try=last_try)
        return await _in_agents_sandbox(context, case, record.answer, last_try=last_try)

    try:
        verdict = await again_if_killed(context, grade)
    except _NoVerdict as exc:
        context.log_evaluation(f"no reward: {exc}\n")
        await _control(context, case, str(exc))
        record.spoilt = str(exc)
        return
    signs = verdict.signs
    if signs and any(value > 0 for value in verdict.rewards.values()):
        signs -= await _signs_of_control(context, case)
    else:
        signs = frozenset()
    if signs:
        record.spoilt = "; ".join(SIGNS[sign] for sign in sorted(signs))
        context.log_evaluation(f"the reward does not count: {record.spoilt}, and not so without the agent\n")
    else:
        record.rewards = verdict.rewards


async def _in_agents_sandbox(context: RolloutContext, case: Case, answer: str | None, *, last_try: bool) -> _Verdict:
    sandbox = context.sandbox
    assert sandbox is not None
    with context.waiting("the verifier, where the agent was", "agent_budget"):
        try:
            await sandbox.restart_bash()
            ended = await sandbox.exec(["/bin/sh", "-c", KILL_OTHERS], timeout_s=STEP_TIMEOUT_S)
        except (OSError, SandboxCallFailed) as exc:
            raise _NoVerdict(f"the agent's processes cannot be ended: {exc}") from exc
        if not last_try:
            check_end("sh", ended)
        if ended.exit_code != 0:
            raise _NoVerdict(f"the agent's processes cannot be ended: {ended.exit_code}")
        return await _run(context, sandbox, case, answer, last_try=last_try)


async def _in_own_sandbox(context: RolloutContext, case: Case, record: StepRecord, *, last_try: bool) -> _Verdict:
    with tempfile.TemporaryDirectory(prefix="artifacts-") as folder:
        if record.artifacts is None:
            carried = await collect(context, case.verifier, case.environment, Path(folder))
            record.artifacts = await run_sync(pack, carried, case.max_kept_chars)
        else:
            carried = await run_sync(unpack, record.artifacts, Path(folder))
        async with context.open_sandbox(case.own) as sandbox:
            with context.waiting("the verifier's environment", "evaluator"), noticing_kills(last_try=last_try):
                await make_ready(sandbox, case.where)
            try:
                with context.waiting("the verifier", "agent_budget"):
                    for remote, local in carried:
                        await put(sandbox, local, remote)
                    return await _run(context, sandbox, case, record.answer, last_try=last_try)
            except SandboxLost as exc:
                if not exc.from_inside:
                    raise
                raise _NoVerdict(f"the verifier's sandbox was ended from inside: {exc}") from exc
            except (NotTaken, ProgramKilled) as exc:
                if isinstance(exc, ProgramKilled) and not last_try:
                    raise
                raise _NoVerdict(str(exc)) from exc


async def _signs_of_control(context: RolloutContext, case: Case) -> frozenset[str]:
    """Return the signs of a run without any of the agent's files; empty for a run without a reward.

    Raises:
        SandboxUnavailable, SandboxLost: its sandbox does not start. No verdict is possible.
    """
    with context.waiting("the verifier's control run", "evaluator"):
        async with context.open_sandbox(case.own if case.verifier.separate else case.agents) as sandbox:
            await make_ready(sandbox, case.where)
            try:
                return (await _run(context, sandbox, case, "", is_control=True)).signs
            except _NoVerdict:
                return frozenset()


async def _control(context: RolloutContext, case: Case, problem: str) -> None:
    """Run the verifier without any of the agent's files.

    Raises:
        EvaluationError: it leaves no reward there either. No verdict is possible.
        SandboxUnavailable, SandboxLost: its sandbox does not start, or is lost. No verdict is possible.
    """
    with context.waiting("the verifier's control run", "evaluator"):
        try:
            async with context.open_sandbox(case.own if case.verifier.separate else case.agents) as sandbox:
                await make_ready(sandbox, case.where)
                await _run(context, sandbox, case, "", is_control=True)
        except _NoVerdict as exc:
            raise EvaluationError(f"{problem}; nor is there a reward without the agent: {exc}") from exc


async def _run(
    context: RolloutContext,
    sandbox: Sandbox,
    case: Case,
    answer: str | None,
    *,
    is_control: bool = False,
    last_try: bool = True,
) -> _Verdict:
    """Place the tests, run the script, read its reward. Raises _NoVerdict, and ProgramKilled except on the last try."""
    verifier = case.verifier
    try:
        await _place(sandbox, verifier, answer)
        isolated = context.resources.config.sandbox.provider != "process"  # "process" isolates nothing
        before = await _say(sandbox, LIST)
        limit_s = _time_for(context, verifier.timeout_s, 1.0 if is_control else FIRST_SHARE)
        most_s = backstop_s(limit_s)
        with context.standing_in_line("the verifier's script", "agent_budget", at_most_s=most_s + STEP_TIMEOUT_S):
            result = await sandbox.exec(
                ["/bin/sh", "-c", 'exec "$0"', verifier.script],
                timeout_s=most_s,
                own_limit_s=limit_s,
                lenient=True,
                cwd=case.where.workdir or HOME,
                env=verifier.env,
                max_output_bytes=MAX_LOG_BYTES,
                linger_s=LINGER_S,
                watch=[f"{VERIFIER_DIR}/{name}" for name in REWARD_FILES],
            )
        context.leave_uncharged(-min(result.own_s, limit_s))  # only its own time is charged, not the machine's load
        if not is_control:
            context.log_evaluation(result.stdout.decode(errors="replace"))
            context.log_evaluation(result.stderr.decode(errors="replace"))
        if result.timed_out:
            if result.own_s <= limit_s and not result.breach:
                raise EvaluationError(f"the machine had no CPU for {verifier.script} in {result.duration_s:.0f} s")
            raise _NoVerdict(f"{verifier.script} has no end in {limit_s:g} s")
        check_end(verifier.script, result)
        signs = set((await _say(sandbox, AFTER, before)).split() if isolated else ()) & set(SIGNS)
        signs |= {"killed"} if result.was_killed else set()
        signs |= {"outlived"} if result.outlived else set()
        rewards = await _read_rewards(sandbox, is_counted=case.is_counted)
        if (is_control or any(value > 0 for value in rewards.values())) and await _is_altered(sandbox, verifier):
            signs.add("altered")
        return _Verdict(rewards, frozenset(signs))
    except ProgramKilled as exc:
        if not last_try:
            raise
        raise _NoVerdict(str(exc)) from exc
    except (OSError, SandboxCallFailed) as exc:
        raise _NoVerdict(f"the sandbox does not do what the verifier needs: {exc}") from exc


async def _say(sandbox: Sandbox, script: str, *arguments: str) -> str:
    """Return the output of our own script. Raises ProgramKilled; _NoVerdict if it fails."""
    result = await sandbox.exec(["/bin/sh", "-c", script, "sh", *arguments], timeout_s=STEP_TIMEOUT_S)
    check_end("sh", result)
    if result.exit_code != 0:
        raise _NoVerdict(f"the sandbox cannot be looked at: {result.stderr.decode(errors='replace').strip()}")
    return result.stdout.decode(errors="replace").strip()


async def _is_altered(sandbox: Sandbox, verifier: Verification) -> bool:
    """Return whether a test file was modified after it was placed: a shell reads its script while running it."""
    for path, file in verifier.files.items():
        try:
            if await sandbox.read_file(path, max_bytes=len(file.content) + 1) != file.content:
                return True
        except (OSError, ValueError, SandboxCallFailed):
            return True
    return False


def _time_for(context: RolloutContext, wanted_s: float, share: float) -> float:
    if context.stage_scope is None:
        return wanted_s
    left_s = context.stage_scope.deadline - trio.current_time() - EVAL_MARGIN_S
    return max(1.0, min(wanted_s, left_s * share))


async def _place(sandbox: Sandbox, verifier: Verification, answer: str | None) -> None:
    """Write the tests over the agent's files, after removing old rewards and links that lead elsewhere."""
    await _say(sandbox, CLEAR)
    for path, file in verifier.files.items():
        await sandbox.write_file(path, file.content, mode=file.mode | 0o111 if path == verifier.script else file.mode)
    if verifier.answer_path and answer is not None:
        await sandbox.write_file(verifier.answer_path, answer.encode(errors="replace"))


async def _read_rewards(sandbox: Sandbox, *, is_counted: bool) -> dict[str, float]:
    paths = [f"{VERIFIER_DIR}/{name}" for name in REWARD_FILES]
    links = " || ".join(f"[ -h {path} ]" for path in (VERIFIER_DIR, *paths))
    looked = await sandbox.exec(["/bin/sh", "-c", links], timeout_s=STEP_TIMEOUT_S)
    check_end("sh", looked)
    if looked.exit_code != 1:
        raise _NoVerdict(
            "the reward file is a link" if looked.exit_code == 0 else "the reward file cannot be looked at"
        )
    for path in paths:
        try:
            found = parse_rewards(posixpath.basename(path), await sandbox.read_file(path, max_bytes=MAX_REWARD_BYTES))
            if is_counted:
                scalar_reward(found)
            return found
        except FileNotFoundError:
            continue
        except ValueError as exc:
            raise _NoVerdict(str(exc)) from exc
    raise _NoVerdict(f"the verifier has written neither {' nor '.join(paths)}")


async def run_solution(context: RolloutContext, solution: Solution, environment: Environment) -> None:
    """Run a solution as the agent would, with the agent's time limit. The verifier grades the result.

    Its output goes to the evaluation's log. Its exit status is ignored, as in Harbor.

    Raises:
        HandlerError: the sandbox does not accept the solution.
    """
    assert context.sandbox is not None
    config = context.resources.config
    timeout_s = config.budgets.of_agent(context.spec.budgets)
    try:
        for path, file in solution.files.items():
            mode = file.mode | 0o111 if path == solution.script else file.mode
            await context.sandbox.write_file(path, file.content, mode=mode)
        with context.standing_in_line("the solution", "handler", at_most_s=timeout_s):
            result = await context.sandbox.exec(
                ["/bin/sh", "-c", solution.script],
                timeout_s=timeout_s,
                cwd=environment.workdir or HOME,
                env={"DEBIAN_FRONTEND": "noninteractive", **solution.env},
                max_output_bytes=MAX_LOG_BYTES,
            )
    except (OSError, SandboxCallFailed) as exc:
        raise HandlerError(f"{solution.script} cannot be run: {exc}") from exc
    for said in (result.stdout, result.stderr):
        context.log_evaluation(said.decode(errors="replace"))
    if result.timed_out:
        context.log_evaluation(f"{solution.script} had no end in {timeout_s:g} s\n")


class ShellHandler(AgentHandler):
    """Tasks from Harbor folders, and any other task that a script in a sandbox can check.

    `RolloutContext.handler_state` is the `Progress` of the rollout. When the agent finishes a step, the step is graded
    within RUN, and the agent gets the next one. The last step that it works on is graded in EVAL.
    """

    name = "shell"
    after_run = "keep"  # it contains the artefacts, and a shared verifier runs in it

    def __init__(self) -> None:
        self._has_network = True
        self._root_layer = Path()

    async def prepare(self, resources: Resources) -> None:
        """Create the layer that makes `/` of the host's image writable."""
        self._has_network = resources.config.sandbox.network
        self._root_layer = await trio.to_thread.run_sync(make_root_layer)

    def validate(self, payload: Mapping[str, Any]) -> None:
        """See `AgentHandler.validate`. A node without network refuses a task that needs one."""
        task = read_payload(payload)
        asked = [("environment", task.environment)]
        for number, step in enumerate(task.steps):
            if step.verifier.environment is not None:
                asked.append((f"steps[{number}].verifier.environment", step.verifier.environment))
        for field, environment in asked:
            if environment.network and not self._has_network:
                raise MalformedJob(
                    "the task asks for a network, and this node gives sandboxes none: set sandbox.network in its "
                    "node.toml, or network_mode in the task",
                    f"$.instance.payload.{field}",
                )

    def sandbox_spec(self, context: RolloutContext) -> SandboxSpec:
        """Return the task's environment, within the node's limits."""
        environment = read_payload(context.spec.instance.payload).environment
        return spec_of(environment, context.resources.config.sandbox, self._root_layer)

    async def init(self, context: RolloutContext) -> None:
        """Build the environment and the first step's setup, and start the shell in its working directory."""
        assert context.sandbox is not None
        task = read_payload(context.spec.instance.payload)
        with context.waiting("build of the environment", "sandbox"):
            await make_ready(context.sandbox, task.environment)
            await start_shell(context.sandbox, task.environment)
            await begin_step(context.sandbox, task.steps[0], task.environment, verified_here=False)
        context.handler_state = Progress(steps=[StepRecord(name=task.steps[0].name)])

    async def run(self, context: RolloutContext) -> None:
        """See `prorl_trio.agent.loop.run_agent`. If the task contains a solution, it runs instead of the policy."""
        task = read_payload(context.spec.instance.payload)
        if task.agent_timeout_s is not None:
            asked = context.spec.budgets
            agent_s = min(task.agent_timeout_s, asked.agent_s or task.agent_timeout_s)
            budgets = msgspec.structs.replace(asked, agent_s=agent_s)
            context.spec = msgspec.structs.replace(context.spec, budgets=budgets)
        if task.steps[0].solution is not None:
            await self._solve(context, task)
            return
        messages = [
            ChatMessage(role="system", content=worded(context, task.system_prompt, SYSTEM_PROMPT, FOR_PROGRAMS)),
            ChatMessage(role="user", content=task.steps[0].instruction),
        ]
        tools = ToolSet(
            [BashTool(), EditorTool(), _StepEndTool() if len(task.steps) > 1 else FinishTool()],
            max_observation_chars=context.resources.config.agent.max_observation_chars,
        )
        await run_agent(context, messages, tools, _ShellStyle(), after_answer=partial(self._next_step, context, task))
        last: StepRecord = context.handler_state.steps[-1]
        if not last.is_graded:
            last.answer = context.answer

    async def _solve(self, context: RolloutContext, task: ShellPayload) -> None:
        """Run the task's own solutions, step by step."""
        for step in task.steps:
            assert step.solution is not None
            await run_solution(context, step.solution, task.environment)
            if await self._next_step(context, task, "") is None:
                break

    async def _next_step(self, context: RolloutContext, task: ShellPayload, answer: str) -> list[ChatMessage] | None:
        """Grade the finished step and begin the next one; None if it was the last.

        Raises:
            EvaluationError, SandboxUnavailable, SandboxLost: no verdict is possible, or the next step cannot begin, and
                the agent is not the cause.
        """
        progress: Progress = context.handler_state
        number, record = len(progress.steps), progress.steps[-1]
        if number == len(task.steps):
            return None
        record.answer = answer
        with context.evaluating(f"step {record.name}"):
            await self._grade(context, task, task.steps[number - 1], record)
            progress.gated = not record.spoilt and not meets(task.steps[number - 1], record)
            if progress.gated or record.spoilt:
                return None
            begun = StepRecord(name=task.steps[number].name)
            begun.spoilt = await self._begin(context, task, number)
            progress.steps.append(begun)
        if begun.spoilt:
            return None
        return [ChatMessage(role="user", content=task.steps[number].instruction)]

    async def _begin(self, context: RolloutContext, task: ShellPayload, number: int) -> str:
        """Prepare the agent's sandbox for a step; return how the agent prevented that, if it did."""
        step, verified_here = task.steps[number], not task.steps[number - 1].verifier.separate

        async def begin(sandbox: Sandbox) -> None:
            await begin_step(sandbox, step, task.environment, verified_here=verified_here)

        async def begin_with_the_agents(*, last_try: bool) -> None:
            assert context.sandbox is not None
            with noticing_kills(last_try=last_try):
                await begin(context.sandbox)

        try:
            await again_if_killed(context, begin_with_the_agents)
        except SandboxUnavailable as exc:
            async with context.open_sandbox(self.sandbox_spec(context)) as fresh:
                await make_ready(fresh, task.environment)
                await begin(fresh)
            return f"the step could not begin where the agent had been: {exc}"
        return ""

    async def eval(self, context: RolloutContext) -> Evaluation:
        """Return the reward of all steps; a missing required answer gets 0.0 at once."""
        task, progress = read_payload(context.spec.instance.payload), context.handler_state
        blocked = False
        for number, (step, record) in enumerate(zip(task.steps, progress.steps, strict=False), start=1):
            if not record.is_graded:
                await self._grade(context, task, step, record)
            blocked = not record.spoilt and not meets(step, record)
            if blocked and number < len(progress.steps):  # graded again, with a worse result than before
                progress.steps, progress.gated = progress.steps[:number], True
                break
        if progress.gated and not blocked:
            raise EvaluationError(
                f"step {progress.steps[-1].name} has its min_reward now, and had it not when it was recorded: nobody "
                "knows what the agent would have done in the steps after it"
            )
        reward, rewards = reward_of(task.steps, progress, task.reward_strategy)
        details = {"resolved": reward >= 1.0, "rewards": rewards, **progress.details()}
        return Evaluation(reward=reward, details=details)

    async def _grade(self, context: RolloutContext, task: ShellPayload, step: Step, record: StepRecord) -> None:
        if is_unanswered(step, record):
            record.rewards = {"reward": 0.0}
            return
        node = context.resources.config.sandbox
        own = spec_of(step.verifier.environment or task.environment, node, self._root_layer)
        kept = sum(len(each.artifacts or "") for each in context.handler_state.steps)
        agents = self.sandbox_spec(context)
        is_counted = task.reward_strategy == "mean" or step is task.steps[-1]
        case = Case(step.verifier, task.environment, agents, own, MAX_KEPT_CHARS - kept, is_counted)
        await verify(context, case, record)

    def gradable(self, context: RolloutContext) -> dict[str, Any]:
        """Return the steps so far, with artefacts. See `AgentHandler.gradable`."""
        progress: Progress | None = context.handler_state
        return {} if progress is None else progress.details(is_over=False)

    def restore(self, context: RolloutContext, recorded: Recorded) -> None:
        """Restore the reached steps, if their verifiers have separate sandboxes."""
        context.handler_state = Progress.restored(read_payload(context.spec.instance.payload), recorded.details)


class _ShellStyle(AgentStyle):
    def nudge(self) -> str:
        return NUDGE


class _StepEndTool(FinishTool):
    """Ends one of several steps."""

    description = "Say that you are done with what was asked for last. You may then be asked for more."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer, or what you have done."}},
        "required": ["answer"],
    }

    async def call(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, *, timeout_s: float) -> Observation:
        ended = await super().call(arguments, sandbox, timeout_s=timeout_s)
        return ended.with_text("This step has ended.")
