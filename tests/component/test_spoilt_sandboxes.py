"""What a policy makes of its sandbox, for every verb that handlers use: its doing, and never its handler's failure.

The same in a sandbox that no policy has used is the handler's failure, with no reward: a misspelt path, say.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from component.test_whose_doing import FAULT, SURVIVED, Tools, bash, open_bench, turns
from prorl_ipc.sandbox_calls import ExecResult
from prorl_trio.pipeline.outcomes import blame
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.transfer import TransferOptions
from prorl_trio.tasks.grading.repository_base import RepositoryBase, make_base
from prorl_trio.tasks.handlers.base import Evaluation
from prorl_trio.tasks.handlers.swe import _difference
from prorl_trio.types.errors import AgentFault, SandboxCallFailed
from prorl_trio.types.models import Budgets, RetryPolicy

pytestmark = pytest.mark.timeout(180)
RETRY = RetryPolicy(max_attempts=3, causes=("sandbox", "inference", "evaluator", "handler", "node"), backoff_s=0.0)
FEW = TransferOptions(max_entries=20, max_bytes=1024**2)

WAYS = {
    "nothing there": "true",
    "a file": "echo x > $t",
    "a folder": "mkdir $t",
    "a file in place of the parent": "rm -r $p; echo x > $p",
    "a dangling link": "ln -s /nowhere/at/all $t",
    "a dangling link in place of the parent": "rm -r $p; ln -s /nowhere $p",
    "a loop of links": "ln -s $t $t",
    "a pipe": "mkfifo $t",
    "a device": "ln -s /dev/zero $t",
    "a full device": "ln -s /dev/full $t",
    "a socket": 'python3 -c "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])" $t',
    "too large a file": "truncate -s 65M $t",
    "no rights": "echo x > $t; chmod 0 $t",
    "no rights in the parent": "chmod 0 $p",
    "too deep a tree": "python3 -c \"import os, sys; os.makedirs(sys.argv[1] + '/d' * 80)\" $t",
    "too many files": "mkdir $t; for i in {1..40}; do : > $t/$i; done",
    "names that are no text": "mkdir $t; : > $t/$'\\xff\\n'",
    "a link that leads out": "ln -s /proc/1 $t",
    "a program that is none": "printf '\\177ELF' > $t; chmod +x $t",
    "an interpreter that is not there": "printf '#!/nowhere\\n' > $t; chmod +x $t",
    "a file of the kernel": "ln -s /proc/self/mem $t",
}
"""Commands that make `$t`, in the folder `$p`."""


def verbs(sandbox, folder, local):
    """Every verb on a path of its own."""

    def at(name):
        return f"{folder}/{name}/it"

    return {
        "read_file": lambda: sandbox.read_file(at("read_file"), max_bytes=1024**2),
        "write_file": lambda: sandbox.write_file(at("write_file"), b"x"),
        "write_below": lambda: sandbox.write_file(at("write_below") + "/x", b"x"),
        "upload": lambda: sandbox.upload(local / "some", at("upload")),
        "upload_over": lambda: sandbox.upload(
            local / "some", at("upload_over"), options=TransferOptions(overwrite=True)
        ),
        "upload_below": lambda: sandbox.upload(local / "some", at("upload_below") + "/x"),
        "download": lambda: sandbox.download(at("download"), local / f"out-{folder.replace('/', '-')}", options=FEW),
        "exec_in": lambda: sandbox.exec(["true"], timeout_s=5, cwd=at("exec_in")),
        "exec": lambda: sandbox.exec([at("exec"), "-x"], timeout_s=5),
        "open_program": lambda: talk(sandbox, at("open_program")),
    }


async def talk(sandbox, program):
    async with sandbox.open_program([program], timeout_s=5) as running:
        await running.wait()


async def tried(actions):
    """What each action raised."""
    raised = {}
    for name, action in actions.items():
        try:
            await action()
        except Exception as exc:
            raised[name] = exc
    return raised


def setting(folder, way):
    names = " ".join(verbs(None, "", Path()))
    return f"for v in {names}; do p={folder}/$v; t=$p/it; mkdir -p $p; ( {WAYS[way]} ) </dev/null; done"


class Uses(Tools):
    """Uses every verb in the agent's sandbox, and in one that nobody has used."""

    def __init__(self, local):
        super().__init__("keep")
        self.local, self.found = local, {}

    async def eval(self, context):
        way = context.spec.instance.instance_id
        folder = f"/tmp/{way.replace(' ', '-')}"
        theirs = await tried(verbs(context.sandbox, folder, self.local))
        async with context.open_sandbox(self.sandbox_spec(context)) as fresh:
            with context.waiting("what nobody but the handler has made", "evaluator"):
                await fresh.exec(["bash", "-c", setting(f"{folder}-2", way)], timeout_s=30)
                ours = await tried(verbs(fresh, f"{folder}-2", self.local))
        self.found[way] = theirs, ours
        if theirs:
            raise ExceptionGroup("all of them", list(theirs.values()))
        return Evaluation(reward=1.0, details={})


@pytest.fixture
async def provider():
    provider = PROVIDERS["bubblewrap"]()
    report = await provider.probe()
    if not report.usable:
        pytest.skip(f"bubblewrap cannot run here: {report.problem}. What to do: {report.remedy}")
    return provider


async def test_what_a_policy_makes_of_a_path_is_its_doing_for_every_verb(rig, provider, tmp_path):
    (tmp_path / "some").write_text("x")
    handler, outcomes = Uses(tmp_path), {}
    with trio.fail_after(150):
        async with open_bench(rig, provider) as play, trio.open_nursery() as nursery:

            async def one(way):
                says = turns(bash(setting(f"/tmp/{way.replace(' ', '-')}", way)))
                outcomes[way] = await play(way, says, handler, retry=RETRY)

            for way in WAYS:
                nursery.start_soon(one, way)
    failed_in_all = set()
    for way, (theirs, ours) in handler.found.items():
        assert {*theirs} == {*ours}, way
        for name, error in theirs.items():
            assert isinstance(blame(error, has_acted=True), AgentFault), (way, name, repr(error))
        for name, error in ours.items():
            assert blame(error, has_acted=True) is error, (way, name, repr(error))
        failed_in_all |= {*theirs}
    assert failed_in_all == {*verbs(None, "", Path())}, "each verb fails in some way"
    assert sum(len(theirs) for theirs, _ in handler.found.values()) > 90
    for way, outcome in outcomes.items():
        assert (outcome.status, outcome.cause, outcome.reward) in (FAULT, SURVIVED), (way, outcome.error)
        assert outcome.attempt == 1


# ---------------------------------------------------------------- answers


ANSWERS = {"a NUL": "print(1)\0", "half a pair": "print('\udcff')", "too long": "#" * 200_000, "right": "print(1)"}


class Runs(Tools):
    """Passes the answer on as it is to a program in a fresh sandbox."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    async def eval(self, context):
        async with context.open_sandbox(self.sandbox_spec(context)) as fresh:
            done = await fresh.exec(["python3", "-c", self.answer], timeout_s=10)
        return Evaluation(reward=float(done.stdout == b"1\n"), details={})


async def test_an_answer_that_no_sandbox_takes_is_the_policys_doing(rig, provider):
    found = {}
    with trio.fail_after(100):
        async with open_bench(rig, provider) as play:
            for name, answer in ANSWERS.items():
                outcome = await play(name, turns(), Runs(answer), retry=RETRY)
                found[name] = (outcome.status, outcome.cause, outcome.reward)
    assert found == dict.fromkeys(ANSWERS, FAULT) | {"right": SURVIVED}


# ---------------------------------------------------------------- repositories

FILTER = '[filter "x"]\n\tclean = sleep 60\n\tsmudge = sleep 60\n\tprocess = sleep 60\n\trequired = true\n'
OTHERS = (
    "[core]\n\tfsmonitor = sleep 60\n\thooksPath = /tmp/hooks\n\tattributesFile = /tmp/attributes\n\tpager = sleep 60\n"
    '[diff]\n\texternal = sleep 60\n[diff "x"]\n\tcommand = sleep 60\n\ttextconv = sleep 60\n'
    "[credential]\n\thelper = !sleep 60\n"
)
TAKEN, NOT_TAKEN = ("completed", None, 1.0), ("completed", None, 0.0)
OUT_OF_TIME = ("timed_out", "agent_budget", 0.0)
NONSENSE = {
    "no JSON": "git: not found",
    "nothing": "",
    "a list": "[]",
    "no names": "{}",
    "a number of names": '{"left_out": 5, "left_out_paths": 1}',
    "null for names": '{"left_out": null, "left_out_paths": 0}',
    "a reason that is none": '{"left_out": {"a": [1, NaN]}, "left_out_paths": 1}',
    "a count beyond 64 bits": '{"left_out": {}, "left_out_paths": 123456789012345678901234567890}',
    "a count of 5,000 digits": '{"left_out": {}, "left_out_paths": ' + "9" * 5000 + "}",
    "deep lists": "[" * 100_000,
}
"""What a program prints that a policy has put in the place of `python3`."""
GIT_TRICKS = {
    "none": ("true", TAKEN),
    "a filter": (f"printf '%s' '{FILTER}' >> .git/config; echo '* filter=x diff=x merge=x' > .gitattributes", TAKEN),
    "a filter in .git": (f"printf '%s' '{FILTER}' >> .git/config; echo '* filter=x' > .git/info/attributes", TAKEN),
    "a filter at home": (f"printf '%s' '{FILTER}' > ~/.gitconfig; echo '* filter=x' > .gitattributes", TAKEN),
    "everything else that is run": (
        f"printf '%s' '{OTHERS}' >> .git/config; echo '* diff=x' > .gitattributes; mkdir /tmp/hooks; "
        "for h in post-index-change pre-commit fsmonitor-watchman; do "
        "printf '#!/bin/sh\\nsleep 60\\n' > /tmp/hooks/$h; cp /tmp/hooks/$h .git/hooks/; done; chmod +x /tmp/hooks/*",
        TAKEN,
    ),
    "another working tree": ("git config core.worktree /usr", TAKEN),
    "no working tree": ("git config core.bare true", TAKEN),
    "a format of later versions": ("git config core.repositoryformatversion 99; git config extensions.x 1", TAKEN),
    "an endless include": ("mkfifo /tmp/fifo; git config include.path /tmp/fifo", TAKEN),
    "no configuration": ("echo '[[' > .git/config", TAKEN),
    "a pipe for the configuration": ("rm .git/config; mkfifo .git/config", TAKEN),
    "a locked index": ("touch .git/index.lock .git/HEAD.lock .git/config.lock", TAKEN),
    "a pipe for the index": ("rm .git/index; mkfifo .git/index", TAKEN),
    "packed references": ("git pack-refs --all; git gc -q", TAKEN),
    "a folder of its own": ("mkdir /tmp/g; mv .git /tmp/g/x; echo 'gitdir: /tmp/g/x' > .git", NOT_TAKEN),
    "no repository": ("rm -rf .git", NOT_TAKEN),
    "no tag": ("git tag -d prorl-base", NOT_TAKEN),
    "a tag that is none": ("rm -r .git/refs/tags; echo x > .git/refs/tags", NOT_TAKEN),
    "no objects": ("rm -rf .git/objects", NOT_TAKEN),
    "no folder": ("cd /; rm -rf /tmp/repo", NOT_TAKEN),
    "a file for the folder": ("cd /; rm -rf /tmp/repo; echo > /tmp/repo", NOT_TAKEN),
    "a pipe for the tag": ("rm -f .git/refs/tags/prorl-base; mkfifo .git/refs/tags/prorl-base", OUT_OF_TIME),
    "a pipe for the objects": ("mkdir -p .git/objects/info; mkfifo .git/objects/info/alternates", OUT_OF_TIME),
}


class Changes(Tools):
    """Takes the difference that was made in a repository, as the handler `swe` does."""

    async def init(self, context):
        script = "mkdir /tmp/repo && cd /tmp/repo && echo theirs > a && git init -q"
        assert (await context.sandbox.exec(["sh", "-c", script], timeout_s=20)).exit_code == 0
        await make_base(context.sandbox, REPO)

    async def run(self, context):
        await super().run(context)
        context.answer = None
        try:
            context.answer = (await _difference(context.sandbox, REPO, last_try=True))[0].decode()
        except (OSError, ValueError, SandboxCallFailed) as exc:
            context.log_evaluation(str(exc))

    async def eval(self, context):
        is_taken = "\n+mine" in (context.answer or "")
        return Evaluation(reward=float(is_taken), details={"answer": context.answer})


REPO = RepositoryBase(repo_dir="/tmp/repo")


async def test_what_a_policy_configures_in_its_repository_is_not_run_and_its_time_is_its_own(rig, provider):
    found = {}
    with trio.fail_after(150):
        async with open_bench(rig, provider) as play, trio.open_nursery() as nursery:

            async def one(name):
                script = f"cd /tmp/repo && echo mine >> a; {GIT_TRICKS[name][0]}"
                budgets = Budgets(run_s=12.0, agent_s=20.0)
                outcome = await play(name, turns(bash(script)), Changes(), retry=RETRY, budgets=budgets)
                ended = (outcome.status, outcome.cause, outcome.reward)
                found[name] = ended if ended == GIT_TRICKS[name][1] else (*ended, outcome.error, outcome.evaluation_log)

            for name in GIT_TRICKS:
                nursery.start_soon(one, name)
    assert found == {name: ended for name, (_, ended) in GIT_TRICKS.items()}


class Prints:
    """A sandbox in which every program prints the same."""

    def __init__(self, text):
        self._stdout = text.encode()

    async def exec(self, _argv, *, on_output=None, **_options):
        await trio.lowlevel.checkpoint()
        if on_output is not None:
            on_output("stdout", b"")
        return ExecResult(exit_code=0, stdout=self._stdout, stderr=b"", duration_s=0.0)


@pytest.mark.parametrize("name", NONSENSE)
async def test_what_replaces_python_makes_no_change_and_no_failure(name):
    with pytest.raises(ValueError, match=r"."):
        await _difference(Prints(NONSENSE[name]), REPO, last_try=True)


async def test_names_and_reasons_that_are_no_text_can_be_part_of_an_outcome():
    said = json.dumps({"left_out": {"a\udcff": "b\ud800"}, "left_out_paths": 7, "more": [[]]})
    _, left_out = await _difference(Prints(said), REPO, last_try=True)
    assert left_out == {"left_out": {"a\\udcff": "b\\ud800"}, "left_out_paths": 7}
