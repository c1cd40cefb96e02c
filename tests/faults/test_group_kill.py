"""A trainer on groups and its node are killed with -9 at random points: each rollout has one line, no group is lost."""

from __future__ import annotations

import random
import secrets
import socket
import sys
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_ipc.nursery import open_single_nursery
from prorl_trio.sampling import ManifestLine
from prorl_trio.sampling.journal import SamplerJournal
from prorl_trio.sampling.sampler import GroupSampler
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from support.soak import KeptProcess, kill_at_random, rig_environment
from support.soak.group_trainer import RULES, TakenLine, checkpoints

pytestmark = pytest.mark.alone

FINISH = '<tool_call>{"name": "finish", "arguments": {"answer": "42"}}</tool_call>'
FINAL = {"trained", "uninformative", "resampled", "cancelled", "carried"}


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="groups-") as path:
        yield Path(path)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def progress(folder):
    """Return how many batches were taken, again or not, and how many checkpoints there are."""
    taken = folder / "taken"
    lines = taken.read_bytes().count(b"\n") if taken.exists() else 0
    return lines + len(list(folder.glob("step-*.json")))


async def train(folder, *, steps, kills, seed, deadline_s):
    """Run node and trainer until the trainer has all steps, killing them meanwhile."""
    tiny = make_tiny_model(folder / "model")
    answer = tiny.turn(FINISH)
    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    port, token = free_port(), secrets.token_hex(8)
    env = rig_environment(TMPDIR=str(folder), XDG_STATE_HOME=str(folder / "state"))
    with trio.fail_after(deadline_s):
        async with (
            open_fake_engine(script=lambda _: (answer, [-0.5] * len(answer), "stop"), config=engine_config) as engine,
            open_single_nursery() as nursery,
        ):
            node_toml = {
                "node_id": "groups",
                "model": {"path": str(folder / "model")},
                "listen": {"port": port, "token": token},
                "backends": {"urls": [engine.url]},
                "sandbox": {"provider": "process", "max_warm": 0},
                "ledger": {"max_attempts": 100},
            }
            (folder / "node.toml").write_bytes(msgspec.toml.encode(node_toml))
            arguments = [f"ws://127.0.0.1:{port}", token, str(folder), str(steps)]
            processes = {
                "node": KeptProcess(
                    "node",
                    "support.soak.group_node",
                    [str(folder / "node.toml")],
                    env=env,
                    log=folder / "node.log",
                ),
                "trainer": KeptProcess(
                    "trainer", "support.soak.group_trainer", arguments, env=env, log=folder / "trainer.log"
                ),
            }
            for process in processes.values():
                nursery.start_soon(process.run)
            times = {processes[name]: count for name, count in kills.items()}
            await kill_at_random(times, random.Random(seed), lambda: progress(folder), 2 * steps)
            await processes["trainer"].done.wait()
            nursery.cancel_scope.cancel()
    assert {name: processes[name].kills for name in kills} == kills


def read_state(folder):
    journal = SamplerJournal(folder / "sampling")
    sampler = GroupSampler(journal.beginning.state)
    for event in journal.events():
        sampler.apply(event)
    journal.close()
    return sampler.state


def check(folder, steps):
    lines = msgspec.json.Decoder(ManifestLine).decode_lines((folder / "sampling" / "manifest.jsonl").read_bytes())
    state = read_state(folder)
    # Each rollout has one line: every try of every member of every group.
    assert len({line.job_id for line in lines}) == len(lines) == state.totals.submitted
    assert {line.fate for line in lines} <= FINAL
    tries = Counter((line.group, line.member) for line in lines)
    assert set(tries) == {(group, member) for group in range(state.next_group) for member in range(RULES.size)}
    last = {(line.group, line.member): line for line in lines if line.fate != "resampled"}
    assert {key: line.attempt for key, line in last.items()} == tries, "one final line behind those of the failures"
    # What was trained on is what the checkpoints say, each rollout once.
    done = checkpoints(folder)
    assert [checkpoint.step for checkpoint in done] == list(range(1, steps + 1))
    trained = [job_id for checkpoint in done for job_id in checkpoint.job_ids]
    assert len(set(trained)) == len(trained) == steps * RULES.groups_per_step * RULES.size
    assert sorted(trained) == sorted(line.job_id for line in lines if line.fate == "trained")
    # A batch that was given again was the same.
    taken = msgspec.json.Decoder(TakenLine).decode_lines((folder / "taken").read_bytes())
    checksums = {(line.number, line.checksum) for line in taken}
    assert len(checksums) == steps
    return lines, len(taken) - steps


def waste(lines):
    """Return the share of rollouts sampled in vain: by members sampled again, and if whole groups were discarded."""
    ended = [line for line in lines if line.reward is not None or line.fate == "resampled"]
    by_member = sum(line.fate == "resampled" for line in ended) / len(ended)
    # The same failures, without a second try: a group in which one first try failed is sampled anew as a whole.
    first = [line for line in lines if line.attempt == 1]
    hit = {line.group for line in first if line.fate == "resampled"}
    return by_member, len(hit) / len({line.group for line in first})


def report(capsys, lines, again):
    by_member, by_group = waste(lines)
    fates = dict(Counter(line.fate for line in lines))
    with capsys.disabled():
        sys.stderr.write(
            f"\n{fates}; {again} batches given again; wasted by resampling {by_member:.1%}, "
            f"by discarding whole groups {by_group:.1%}\n"
        )
    return by_member, by_group


async def test_trainer_and_node_killed_at_random(folder, capsys):
    await train(folder, steps=8, kills={"trainer": 3, "node": 1}, seed=1, deadline_s=200)
    lines, again = check(folder, 8)
    by_member, by_group = report(capsys, lines, again)
    assert by_member <= 0.08 < by_group  # of some 1,000 rollouts; see the large run


@pytest.mark.soak
async def test_a_thousand_groups(folder, capsys):
    await train(folder, steps=125, kills={"trainer": 12, "node": 8}, seed=2, deadline_s=1_500)
    lines, again = check(folder, 125)
    by_member, by_group = report(capsys, lines, again)
    assert by_member <= 0.06
    assert by_group > 0.25
