"""What a policy makes of its sandbox, for every verb that handlers use: its doing, and never its handler's failure.

The same in a sandbox that no policy has used is the handler's failure, with no reward: a misspelt path, say.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from component.test_whose_doing import FAULT, SURVIVED, Tools, bash, open_bench, turns
from prorl_trio.handlers.base import Evaluation
from prorl_trio.pipeline.outcomes import blame
from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.sandbox.transfer import TransferOptions
from prorl_trio.types.errors import AgentFault
from prorl_trio.types.models import RetryPolicy

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
