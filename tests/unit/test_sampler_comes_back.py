"""Trainers that come back to a run with more, or with less, than the one before them had."""

from __future__ import annotations

import msgspec
import pytest

from prorl_trio.sampling import GroupRules, JobTemplate
from prorl_trio.sampling.sampler import GroupSampler
from prorl_trio.sampling.state import Advanced, Arrived, Confirmed, GivenAgain, Opened, Returned, Taken
from support.sampled import make_rollout, make_task


def begin(**rules):
    rules = GroupRules(**{"size": 2, "groups_per_step": 1, **rules})
    return GroupSampler.begin("run", rules, "0")


def open_group(sampler):
    number = sampler.state.next_group
    effects = sampler.apply(Opened(make_task(number), JobTemplate()))
    return [job_id for job_id, _ in effects.submit]


def end(sampler, job_ids):
    version = sampler.state.versions[-1]
    for job_id in job_ids:
        right = job_id.split("-")[2] == "0"
        outcome = make_rollout(sampler.spec(job_id), float(right), versions=[version])
        sampler.apply(Arrived(outcome, right))


def take_a_step(sampler):
    """Take a batch of one group, and advance by the update that it is trained on in."""
    end(sampler, open_group(sampler))
    sampler.apply(Taken(sampler.choose(1), confirms=False))
    sampler.apply(Advanced(str(sampler.version + 1), confirms=False))


def come_back(sampler, trained):
    return sampler.apply(Returned(sampler.state.rules, trained))


@pytest.mark.parametrize(("trained", "version"), [(1, "1"), (2, "2"), (3, "3")])
def test_one_without_a_checkpoint_and_then_one_with_it(trained, version):
    sampler = begin()
    for _ in range(3):
        take_a_step(sampler)
    come_back(sampler, None)
    assert sampler.state.versions == ["0"]
    assert sampler.unconfirmed().number == 1
    come_back(sampler, trained)
    assert sampler.state.versions == ["0", "1", "2", "3"][: int(version) + 1]
    assert sampler.state.taken_at == [*[1] * trained, 0]
    assert (again := sampler.unconfirmed()) is None or again.number == trained + 1
    assert sampler.room() == (again is None)


def test_versions_of_another_path_replace_those_that_were_undone():
    sampler = begin()
    take_a_step(sampler)
    take_a_step(sampler)
    come_back(sampler, None)
    sampler.apply(GivenAgain(1, confirms=False))
    sampler.apply(Advanced("other", confirms=False))
    sampler.apply(Confirmed(1))
    come_back(sampler, None)
    assert sampler.state.versions == ["0", "other"]
    assert sampler.state.taken_at == [1, 0]
    assert sampler.unconfirmed().number == 2


def test_groups_to_give_again_leave_no_room_for_others():
    sampler = begin(groups_per_step=2)
    first, second = open_group(sampler), open_group(sampler)
    end(sampler, first)
    sampler.apply(Taken(sampler.choose(1), confirms=False))
    come_back(sampler, None)
    end(sampler, second)
    assert sampler.room() == 0  # the place of the first is taken by the batch that is given again


def test_groups_that_would_get_too_old_at_the_version_before_are_cancelled():
    sampler = begin()
    take_a_step(sampler)
    running = open_group(sampler)
    end(sampler, running[:1])
    effects = come_back(sampler, None)  # to version 0, at which batch 1 comes first; the group was begun at 1
    assert effects.cancel == running[1:]
    assert [(line.job_id, line.fate, line.why) for line in effects.lines] == [
        (job_id, "cancelled", "came_back") for job_id in running
    ]
    assert not sampler.state.running


def test_groups_that_are_not_too_old_at_the_version_before_go_on():
    sampler = begin(max_staleness=1)
    take_a_step(sampler)
    running = open_group(sampler)
    assert not come_back(sampler, None).cancel
    sampler.apply(GivenAgain(1, confirms=False))
    sampler.apply(Advanced("1", confirms=False))
    end(sampler, running)
    sampler.apply(Taken(sampler.choose(1), confirms=False))
    assert sampler.state.given[-1].groups[0].staleness <= 1


def test_a_step_that_took_too_many_keeps_none_from_being_sampled_later():
    sampler = begin()
    take_a_step(sampler)
    take_a_step(sampler)
    come_back(sampler, None)
    for number in (1, 2):
        sampler.apply(GivenAgain(number, confirms=False))  # without a step between
    sampler.apply(Advanced("1", confirms=False))
    assert sampler.room() == 1


def test_groups_that_would_get_too_old_at_the_version_after_are_cancelled():
    sampler = begin(groups_per_step=2)
    take_a_step(sampler)
    come_back(sampler, None)
    sampler.apply(GivenAgain(1, confirms=False))
    running = open_group(sampler)  # at version 0, after which another trainer has the checkpoint with batch 1
    assert come_back(sampler, 1).cancel == running
    assert (sampler.version, sampler.state.running) == (1, {})


def fill(sampler, groups):
    """Begin so many groups, and end all but the last two of them."""
    begun = [open_group(sampler) for _ in range(groups)]
    for job_ids in begun[:-2]:
        end(sampler, job_ids)
    return begun


def come_back_under(sampler, **changed):
    return sampler.apply(Returned(msgspec.structs.replace(sampler.state.rules, **changed), None))


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"max_staleness": 3}, [1, 2, 3, 4, 5]),
        ({"max_staleness": 4, "ahead": 3.0, "max_tries": 1}, [1, 2, 3, 4, 5]),
        ({"max_staleness": 2}, [1, 2, 3, 4]),
        ({"max_staleness": 1}, [1, 2]),
        ({"max_staleness": 0}, []),
        ({"groups_per_step": 1}, [1, 2, 3]),
    ],
)
def test_stricter_rules_hold_for_the_groups_that_are_there(changed, kept):
    sampler = begin(groups_per_step=2, max_staleness=3)
    begun = fill(sampler, 6)
    sampler.apply(Taken([0], confirms=True))
    sampler.apply(Advanced("1", confirms=True))
    effects = come_back_under(sampler, **changed)
    state = sampler.state
    assert sorted([*state.ready, *state.running]) == kept
    gone = {job_id for number in range(1, 6) if number not in kept for job_id in begun[number]}
    assert {line.job_id for line in effects.lines} == gone
    assert {(line.fate, line.why) for line in effects.lines} <= {("cancelled", "came_back")}
    assert set(effects.cancel) == gone & {job_id for job_ids in begun[4:] for job_id in job_ids}
    assert state.totals.cancelled == len(gone)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("groups_per_step", [1, 2])
def test_no_group_is_ever_older_than_the_present_rules_say(max_staleness, groups_per_step):
    sampler = begin(groups_per_step=2, max_staleness=3)
    waiting = fill(sampler, 8)[-2:]
    for version in ("1", "2"):
        sampler.apply(Taken(sampler.choose(2), confirms=True))
        sampler.check_advance(version)
        sampler.apply(Advanced(version, confirms=True))
    come_back_under(sampler, max_staleness=max_staleness, groups_per_step=groups_per_step)
    for version in range(3, 9):
        for job_ids in waiting:
            end(sampler, [job_id for job_id in job_ids if sampler.may_train(job_id)])
        waiting = [open_group(sampler) for _ in range(sampler.room())]
        for job_ids in waiting:
            end(sampler, job_ids)
        sampler.apply(Taken(sampler.choose(groups_per_step), confirms=True))
        assert all(group.staleness <= max_staleness for group in sampler.state.given[-1].groups)
        sampler.check_advance(str(version))
        sampler.apply(Advanced(str(version), confirms=True))


def test_groups_that_teach_nothing_are_left_out_when_the_rules_say_so_now():
    sampler = begin(groups_per_step=4, dynamic=False)
    solved, mixed, unsolved = (open_group(sampler) for _ in range(3))
    end(sampler, mixed)
    for job_ids, right in ((solved, True), (unsolved, False)):
        for job_id in job_ids:
            sampler.apply(Arrived(make_rollout(sampler.spec(job_id), float(right)), right))
    assert not come_back(sampler, None).lines
    lines = come_back_under(sampler, dynamic=True).lines
    assert [(line.job_id, line.fate, line.why) for line in lines] == [
        *((job_id, "uninformative", "solved") for job_id in solved),
        *((job_id, "uninformative", "unsolved") for job_id in unsolved),
    ]
    assert list(sampler.state.ready) == [1]


def test_a_batch_is_given_again_as_it_was_under_any_rules():
    sampler = begin(groups_per_step=2, max_staleness=3)
    fill(sampler, 4)
    sampler.apply(Advanced("1", confirms=True))
    sampler.apply(Taken([0, 1], confirms=False))
    given = sampler.state.given[-1]
    come_back_under(sampler, max_staleness=0)
    assert sampler.unconfirmed() == msgspec.structs.replace(given, again=True)
    assert not [*sampler.state.ready, *sampler.state.running]
