"""Groups over a node's real edge, with trio: whole batches, one line for each rollout, and trainers that come back."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from random import Random

import msgspec
import pytest
import trio

from prorl_trio.client import connect
from prorl_trio.sampling import (
    GroupRules,
    JobTemplate,
    ManifestLine,
    NothingToLearn,
    RolloutsFail,
    open_groups,
)
from prorl_trio.sampling.journal import JOURNAL, MANIFEST, read_session_id
from prorl_trio.types.errors import ConfigError, ServiceError
from prorl_trio.types.models import SamplingParams
from support.fake_node import FakeNode
from support.fake_service import TOKEN, open_service
from support.sampled import make_failure, make_rollout, make_task

TASKS = [make_task(n) for n in range(10)]
RULES = GroupRules(size=4, groups_per_step=3, max_staleness=1)
SESSION = "s"


def mixed(spec):
    """Two rollouts of each group are right, and two are not."""
    return make_rollout(spec, float(int(spec.job_id.split("-")[-2]) % 2))


def lines_in(folder):
    return msgspec.json.Decoder(ManifestLine).decode_lines((folder / MANIFEST).read_bytes())


@asynccontextmanager
async def opened(node, rules=RULES, tasks=TASKS, **options):
    with trio.fail_after(20):
        async with (
            open_service(node) as service,
            connect(service.url, TOKEN, session_id=SESSION) as client,
            open_groups(client, tasks, rules, **options) as groups,
        ):
            yield groups


async def test_batches_are_whole_and_their_manifests_complete(tmp_path, monkeypatch):
    monkeypatch.setattr("prorl_trio.sampling.journal.HISTORY_BYTES", 1_000)  # it is written anew all the time
    node = FakeNode(mixed)
    template = JobTemplate(sampling=SamplingParams(max_output_tokens=7), max_turns=3, tags={"run": "a"})
    largest_bytes = 0
    async with opened(node, folder=tmp_path, job=template) as groups:
        for step in range(1, 5):
            batch = await groups.take()
            largest_bytes = max(largest_bytes, len(msgspec.msgpack.encode(groups._sampler.state)))
            assert (batch.number, batch.version, batch.again) == (step, str(step - 1), False)
            assert len(batch.groups) == 3
            assert all(group.rewards.tolist() == [0, 1, 0, 1] for group in batch.groups)
            assert len(batch.outcomes) == 12
            assert {o.tags["run"] for o in batch.outcomes} == {"a"}
            final = [line for line in batch.manifest if line.fate != "carried"]
            assert [line for line in lines_in(tmp_path) if line.batch == step] == final
            await groups.advance(str(step))
            assert (tmp_path / JOURNAL).stat().st_size < 3 * largest_bytes + 10_000
        assert groups.last_batch == 4
        assert groups.version == "4"
    assert {spec.max_turns for spec in node.submitted} == {3}
    assert {spec.sampling.max_output_tokens for spec in node.submitted} == {7}
    names = [line.job_id for line in lines_in(tmp_path)]
    assert sorted(names) == sorted(spec.job_id for spec in node.submitted)
    assert not node.live, "the end of the run cancels what is at work"
    fates = Counter(line.fate for line in lines_in(tmp_path))
    assert fates["trained"] == 48
    assert set(fates) <= {"trained", "carried", "cancelled"}


async def test_only_the_member_that_failed_is_sampled_again():
    random = Random(0)
    failed: list[tuple[int, int]] = []
    trained: list[ManifestLine] = []

    def fails_sometimes(spec):
        return make_failure(spec) if random.random() < 0.3 else mixed(spec)

    node = FakeNode(fails_sometimes)
    rules = msgspec.structs.replace(RULES, max_tries=20)
    async with opened(node, rules) as groups:
        for step in range(1, 4):
            batch = await groups.take()
            assert all(o.reward is not None for o in batch.outcomes)
            again = [line for line in batch.manifest if line.fate == "resampled"]
            assert all(
                (line.cause, line.error_code, line.why) == ("sandbox", "sandbox_lost", "failed") for line in again
            )
            failed += [(line.group, line.member) for line in again]
            trained += [line for line in batch.manifest if line.fate == "trained"]
            await groups.advance(str(step))
        assert groups.statistics()["resampled"] >= len(failed) > 0
    assert all(line.attempt == 1 + failed.count((line.group, line.member)) for line in trained)
    per_member = Counter((spec.group_id, spec.job_id.split("-")[-2]) for spec in node.submitted)
    assert all(per_member[line.job_id.rsplit("-", 2)[0], str(line.member)] == line.attempt for line in trained)


@pytest.mark.parametrize(("reward", "what"), [(1.0, "everything is solved"), (0.5, "nothing is solved")])
async def test_nothing_to_learn_is_said_with_counts(reward, what):
    node = FakeNode(lambda spec: make_rollout(spec, reward))
    rules = msgspec.structs.replace(RULES, patience_groups=7)
    async with opened(node, rules) as groups:
        for _ in range(2):  # who asks again has the same patience once more
            with pytest.raises(NothingToLearn, match=what) as caught:
                await groups.take()
            assert 7 <= caught.value.solved + caught.value.unsolved <= 7 + 6
        node._on_submit = mixed
        assert len((await groups.take()).groups) == 3


async def test_an_infrastructure_that_does_not_work_is_said_with_its_causes(monkeypatch):
    monkeypatch.setattr("prorl_trio.sampling.groups.MAX_BACKOFF_S", 0.001)
    node = FakeNode(make_failure)
    rules = msgspec.structs.replace(RULES, max_tries=3)
    async with opened(node, rules) as groups:
        with pytest.raises(RolloutsFail, match="3 x sandbox/sandbox_lost") as caught:
            await groups.take()
        assert caught.value.causes == {"sandbox/sandbox_lost": 3}
        assert len(node.submitted) <= 2 * RULES.groups_per_step * RULES.size * 3
        node._on_submit = mixed
        assert len((await groups.take()).groups) == 3


async def test_a_rejected_job_is_an_error_that_names_it():
    tasks = [msgspec.structs.replace(make_task(0), handler="nobody")]
    async with opened(FakeNode(), tasks=tasks, cancel_at_end=False) as groups:
        for _ in range(2):
            with pytest.raises(ServiceError, match="no handler 'nobody'"):
                await groups.take()
        with pytest.raises(ServiceError, match="no handler 'nobody'"):
            await groups.advance("1")


async def test_early_stop_cancels_the_rest():
    ended = []

    def only_the_first(spec):
        number = int(spec.group_id.rpartition("-g")[2])
        if number < 3:
            ended.append(spec)
            return mixed(spec)
        return None

    node = FakeNode(only_the_first)
    rules = msgspec.structs.replace(RULES, early_stop="cancel", ahead=2.0)
    async with opened(node, rules) as groups:
        batch = await groups.take()
        assert [group.number for group in batch.groups] == [0, 1, 2]
        cancelled = [line for line in batch.manifest if line.fate == "cancelled"]
        assert {line.why for line in cancelled} == {"early_stop"}
        assert len(cancelled) == 4 * batch.statistics.cancelled // 4 == len(node.submitted) - len(ended)
        while any(spec.job_id in node.live for spec in node.submitted[: len(ended) + len(cancelled)]):
            await trio.sleep(0.01)


async def test_the_batch_that_was_not_confirmed_is_given_again(tmp_path):
    node = FakeNode(mixed)
    with trio.fail_after(20):
        async with open_service(node) as service:
            given = []
            for wanted_again in ([], [2], [2]):
                with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the trainer ends in the middle
                    async with (
                        connect(service.url, TOKEN, session_id=SESSION) as client,
                        open_groups(client, TASKS, RULES, folder=tmp_path) as groups,
                    ):
                        if not wanted_again:
                            given.append(await groups.take())
                            await groups.advance("1")
                        given.append(await groups.take())
                        assert [b.number for b in given if b.again] == wanted_again * (len(given) - 2)
                        raise KeyboardInterrupt
            encoded = [msgspec.msgpack.encode(msgspec.structs.replace(b, again=False)) for b in given[1:]]
            assert encoded == [encoded[0]] * 3
            # A checkpoint has it: then it is not given again.
            async with (
                connect(service.url, TOKEN, session_id=read_session_id(tmp_path)) as client,
                open_groups(client, TASKS, RULES, folder=tmp_path, trained=2) as groups,
            ):
                await groups.advance("2")
                batch = await groups.take()
                assert (batch.number, batch.again) == (3, False)
    numbers = [group.number for b in (*given[:2], batch) for group in b.groups]
    assert len(set(numbers)) == 9
    names = [line.job_id for line in lines_in(tmp_path)]
    assert sorted(names) == sorted(spec.job_id for spec in node.submitted)


async def test_batches_are_kept_until_a_checkpoint_has_them(tmp_path):
    node = FakeNode(mixed)
    with trio.fail_after(20):
        async with open_service(node) as service:
            given, again = [], []
            for batches, trained in ((given, None), (again, 1)):
                async with (
                    connect(service.url, TOKEN, session_id=SESSION) as client,
                    open_groups(
                        client, TASKS, RULES, folder=tmp_path, confirm="explicit", trained=trained, cancel_at_end=False
                    ) as groups,
                ):
                    for step in range(trained or 0, 4):
                        assert groups.version == str(step)
                        batches.append(await groups.take())
                        await groups.advance(str(step + 1))
                    await groups.confirm(0)
            assert [(b.number, b.version, b.again) for b in again] == [(n, str(n - 1), True) for n in (2, 3, 4)]
            assert [b.groups[0].group_id for b in again] == [b.groups[0].group_id for b in given[1:]]


async def test_a_folder_is_refused_that_does_not_fit(tmp_path):
    node = FakeNode(mixed)
    with trio.fail_after(20):
        async with open_service(node) as service, connect(service.url, TOKEN, session_id=SESSION) as client:
            async with open_groups(client, TASKS, RULES, folder=tmp_path, cancel_at_end=False) as groups:
                await groups.take()
                with pytest.raises(ConfigError, match="in use by another trainer"):
                    async with open_groups(client, TASKS, RULES, folder=tmp_path):
                        pass
            with pytest.raises(ConfigError, match="of groups of 4"):
                async with open_groups(client, TASKS, msgspec.structs.replace(RULES, size=8), folder=tmp_path):
                    pass
            with pytest.raises(ConfigError, match="the last one of this run is 1"):
                async with open_groups(client, TASKS, RULES, folder=tmp_path, trained=7):
                    pass
            async with connect(service.url, TOKEN, session_id="other") as other:
                with pytest.raises(ConfigError, match="connect with session_id='s'"):
                    async with open_groups(other, TASKS, RULES, folder=tmp_path):
                        pass
            (tmp_path / JOURNAL).write_bytes(b"\x00" * 100 + (tmp_path / JOURNAL).read_bytes()[100:])
            with pytest.raises(ConfigError, match="damaged"):
                async with open_groups(client, TASKS, RULES, folder=tmp_path):
                    pass
            with pytest.raises(ValueError, match="tasks is empty"):
                async with open_groups(client, [], RULES):
                    pass


async def test_a_step_that_is_not_taken_is_refused(caplog):
    async with opened(FakeNode(mixed)) as groups:
        batch = await groups.take(1)
        await groups.take(2)
        assert batch.statistics.groups == 1
        with pytest.raises(ValueError, match="announced before"):
            await groups.advance("0")
        await groups.advance("1")
        with pytest.raises(ValueError, match=r"k must be in \[1, 6\]"):
            await groups.take(7)
        await groups.take(6)
        with trio.move_on_after(0.1) as waiting:
            await groups.take(1)
        assert waiting.cancelled_caught
        assert "waits for advance: 0 whole groups, 0 at work, room for 0 more at version '1'" in caplog.text


async def test_advancing_past_groups_that_would_get_stale_is_refused():
    node = FakeNode()
    async with opened(node, msgspec.structs.replace(RULES, max_staleness=0)) as groups:
        await node.wait_live(12)
        with pytest.raises(ValueError, match=r"0 groups were taken at version '0'.* max_staleness = 0"):
            await groups.advance("1")
        assert groups.version == "0"
        node.finish_all = [node.finish(job_id, mixed(spec)) for job_id, spec in list(node.live.items())]
        assert len((await groups.take()).groups) == 3
        await groups.advance("1")


async def test_outcomes_of_others_are_handed_over():
    node, others = FakeNode(), []
    with trio.fail_after(20):
        async with open_service(node) as service, connect(service.url, TOKEN, session_id=SESSION) as client:
            spec = JobTemplate().spec("mine", "g", make_task(0))
            await client.submit([spec])
            node.finish("mine", make_rollout(spec, 1.0))
            node._on_submit = mixed
            async with open_groups(client, TASKS, RULES, on_other=others.append) as groups:
                await groups.take()
    assert [outcome.job_id for outcome in others] == ["mine"]


async def test_an_error_of_the_callers_own_function_comes_out():
    def broken(outcome):
        raise ZeroDivisionError(outcome.job_id)

    with pytest.raises(ZeroDivisionError):
        async with opened(FakeNode(mixed), correct=broken) as groups:
            await groups.take()


@pytest.mark.parametrize("kept", [False, True])
async def test_after_an_error_only_a_run_with_a_folder_stays_at_the_node(tmp_path, kept):
    node = FakeNode()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the trainer ends in the middle
        async with opened(node, folder=tmp_path if kept else None):
            await node.wait_live(24)
            raise ZeroDivisionError
    assert bool(node.live) == kept


async def test_a_node_that_forgot_its_jobs_gets_them_again(tmp_path):
    with trio.fail_after(20):
        async with open_service(before := FakeNode()) as service:
            port = service.port
            async with (
                connect(service.url, TOKEN, session_id=SESSION) as client,
                open_groups(client, TASKS, RULES, folder=tmp_path, cancel_at_end=False) as groups,
            ):
                await before.wait_live(24)
                first = min(before.live)
                before.finish(first, mixed(before.live[first]))
                while not groups.statistics()["ended"]:
                    await trio.sleep(0.01)
        node = FakeNode(mixed)
        async with (
            open_service(node, port=port) as service,
            connect(service.url, TOKEN, session_id=SESSION) as client,
            open_groups(client, TASKS, RULES, folder=tmp_path) as groups,
        ):
            assert len((await groups.take()).groups) == 3
        again = {spec.job_id for spec in node.submitted} & {spec.job_id for spec in before.submitted}
        assert again == {spec.job_id for spec in before.submitted} - {first}
    names = [line.job_id for line in lines_in(tmp_path)]
    assert sorted(names) == sorted({spec.job_id for spec in (*before.submitted, *node.submitted)})
