"""The sampler under any order of events: one line for each rollout, whole groups, bounded staleness, the same again."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prorl_trio.sampling import GroupRules, JobTemplate, NothingToLearn, RolloutsFail
from prorl_trio.sampling.sampler import Effects, GroupSampler
from prorl_trio.sampling.state import (
    Advanced,
    Arrived,
    Confirmed,
    Event,
    Finished,
    GivenAgain,
    Lost,
    Opened,
    Renewed,
    Returned,
    SamplerState,
    Taken,
)
from support.sampled import make_failure, make_rollout, make_task

FINAL = {"trained", "uninformative", "resampled", "cancelled"}


def stored(state):
    """The state as it comes back from a disk."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SamplerState)


class Sampling(RuleBasedStateMachine):
    """A trainer and a node that do whatever may happen, within the rules of `take` and `advance`."""

    @initialize(
        size=st.integers(2, 4),
        per_step=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
        dynamic=st.booleans(),
        early_stop=st.sampled_from(["keep", "keep", "cancel"]),
        ahead=st.sampled_from([1.0, 1.5, 4.0]),
        explicit=st.booleans(),
    )
    def begin(self, explicit, per_step, **rules):
        self.rules = GroupRules(groups_per_step=per_step, max_tries=2, patience_groups=4, **rules)
        self.explicit = explicit
        self.sampler = GroupSampler.begin("run", self.rules, "0")
        self.events: list[Event] = []
        self.submitted: dict[str, object] = {}
        self.outstanding: dict[str, object] = {}  # specs the node works on
        self.cancelled: dict[str, object] = {}
        self.ended: list = []  # outcomes that may come twice
        self.lines = []
        self.decided: set[str] = set()
        self.born: dict[int, int] = {}
        self.given: dict[int, bytes] = {}
        self.trained_groups: set[int] = set()
        self.updates = 0

    def apply(self, event):
        event = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event)
        effects = self.sampler.apply(event)
        self.events.append(event)
        for job_id, _ in effects.submit:
            assert job_id not in self.submitted, "an id is used once"
            spec = self.sampler.spec(job_id)
            self.submitted[job_id] = self.outstanding[job_id] = spec
        for job_id in effects.cancel:
            if job_id in self.outstanding:  # and not one that is cancelled already
                self.cancelled[job_id] = self.outstanding.pop(job_id)
        self.lines += effects.lines
        return effects

    @rule(k=st.integers(0, 8))
    def replenish(self, k):
        room = self.sampler.room(k)
        for _ in range(room):
            number = self.sampler.state.next_group
            self.born[number] = self.sampler.version
            self.apply(Opened(make_task(number), JobTemplate()))
        live = len(self.sampler.state.running) + len(self.sampler.state.ready)
        assert live <= (self.rules.max_staleness + 1) * self.rules.groups_per_step

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def rollout_ends(self, data):
        job_id = data.draw(st.sampled_from(sorted(self.outstanding)))
        how = data.draw(st.sampled_from(["right", "right", "wrong", "wrong", "fails", "nan"]))
        self.end(data, job_id, how)

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data(), how=st.sampled_from(["mixed", "mixed", "mixed", "right", "wrong"]))
    def whole_group_ends(self, data, how):
        chosen = data.draw(st.sampled_from(sorted({spec.group_id for spec in self.outstanding.values()})))
        for index, job_id in enumerate(sorted(j for j, s in self.outstanding.items() if s.group_id == chosen)):
            self.end(data, job_id, ("right", "wrong")[index % 2] if how == "mixed" else how)

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def member_fails_for_good(self, data):
        job_id = data.draw(st.sampled_from(sorted(self.outstanding)))
        for _ in range(self.rules.max_tries):
            member, _, attempt = job_id.rpartition("-")
            self.end(data, job_id, "fails")
            job_id = f"{member}-{int(attempt) + 1}"
            if job_id not in self.outstanding:
                break
        assert isinstance(self.sampler.trouble(), NothingToLearn | RolloutsFail)

    def end(self, data, job_id, how):
        spec = self.outstanding.pop(job_id)
        if how == "fails":
            outcome = make_failure(spec)
        else:
            born = self.born[int(spec.group_id.rpartition("-g")[2])]
            versions = [str(v) for v in range(min(born, self.sampler.version), self.sampler.version + 1)]
            since = data.draw(st.integers(0, len(versions) - 1))
            reward = float("nan") if how == "nan" else 1.0 if how == "right" else 0.25
            outcome = make_rollout(spec, reward, versions=versions[since:])
        self.ended.append(outcome)
        self.apply(Arrived(outcome, how == "right"))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def comes_twice(self, data):
        outcome = data.draw(st.sampled_from(self.ended))
        before = msgspec.msgpack.encode(self.sampler.state)
        effects = self.apply(Arrived(outcome, True))
        assert effects == Effects()
        assert msgspec.msgpack.encode(self.sampler.state) == before

    @precondition(lambda self: self.cancelled)
    @rule(data=st.data(), gone=st.booleans())
    def cancel_arrives(self, data, gone):
        job_id = data.draw(st.sampled_from(sorted(self.cancelled)))
        spec = self.cancelled.pop(job_id)
        before = len(self.lines)
        self.apply(Lost(job_id) if gone else Arrived(make_failure(spec, status="cancelled"), False))
        assert len(self.lines) == before, "its line was written when it was cancelled"

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def is_lost(self, data):
        job_id = data.draw(st.sampled_from(sorted(self.outstanding)))
        self.outstanding.pop(job_id)
        self.apply(Lost(job_id))

    @rule(k=st.integers(1, 6))
    def take(self, k):
        k = min(k, (self.rules.max_staleness + 1) * self.rules.groups_per_step)
        if (again := self.sampler.unconfirmed()) is not None:
            assert msgspec.msgpack.encode(msgspec.structs.replace(again, again=False)) == self.given[again.number]
            self.apply(GivenAgain(again.number, confirms=not self.explicit))
            return
        numbers = self.sampler.choose(k)
        if numbers is None:
            return
        before = dict(self.sampler.state.ready)
        self.apply(Taken(numbers, confirms=not self.explicit))
        batch = self.sampler.state.given[-1]
        self.given[batch.number] = msgspec.msgpack.encode(batch)
        self.check(batch, k, before)

    def check(self, batch, k, before):
        numbers = [group.number for group in batch.groups]
        assert len(batch.groups) == k
        order = sorted(before, key=lambda number: (before[number].born, number))
        assert numbers == order[:k], "oldest first"
        assert not self.trained_groups & set(numbers), "once"
        self.trained_groups |= set(numbers)
        for group in batch.groups:
            assert len(group.outcomes) == self.rules.size
            assert all(outcome.reward is not None and outcome.reward >= 0 for outcome in group.outcomes)
            assert group.informative or not self.rules.dynamic
            assert group.correct == [outcome.reward == 1.0 for outcome in group.outcomes]
            assert group.staleness <= self.rules.max_staleness
        listed = [line.job_id for line in batch.manifest]
        assert sorted(listed) == sorted(set(self.submitted) - self.decided), "each rollout that was open, once"
        final = {line.job_id for line in batch.manifest if line.fate in FINAL}
        assert final == {line.job_id for line in self.lines} - self.decided
        self.decided |= final

    @rule()
    def advance(self):
        version = str(self.sampler.version + 1)
        try:
            self.sampler.check_advance(version)
        except ValueError:
            behind = self.sampler.unconfirmed() is not None
            assert behind or self.sampler.state.taken_at[-1] < self.rules.groups_per_step
            return
        self.apply(Advanced(version, confirms=not self.explicit))

    @precondition(lambda self: self.sampler.state.given)
    @rule(data=st.data())
    def confirm(self, data):
        given = self.sampler.state.given[: len(self.sampler.state.handed_at)]
        if given:
            self.apply(Confirmed(data.draw(st.sampled_from(given)).number))

    @precondition(lambda self: self.sampler.trouble() is not None)
    @rule()
    def is_told(self):
        trouble = self.sampler.trouble()
        assert isinstance(trouble, NothingToLearn | RolloutsFail)
        assert self.sampler.room() == 0, "nothing more is spent before the trainer has said so"
        self.apply(Renewed())
        assert self.sampler.trouble() is None

    @rule()
    def is_stored_and_read(self):
        self.sampler = GroupSampler(stored(self.sampler.state))
        pending = self.sampler.pending()
        assert {job_id for job_id, _ in pending.submit} == set(self.outstanding)
        assert set(self.cancelled) <= set(pending.cancel) | {
            job_id for job_id in self.cancelled if not self.sampler.state.leaving
        }

    @precondition(lambda self: self.sampler.state.given or self.updates < 3)
    @rule(data=st.data())
    def trainer_comes_back(self, data):
        self.updates += 1
        kept = [batch.number for batch in self.sampler.state.given]
        trained = data.draw(st.sampled_from([None, *kept]))
        self.apply(Returned(self.rules, trained))
        if (again := self.sampler.unconfirmed()) is not None:
            assert self.sampler.state.versions[-1] == again.version, "the run is where the trainer is"
        assert [batch.number for batch in self.sampler.state.given] == [n for n in kept if n > (trained or 0)]

    @invariant()
    def batches_count_at_the_version_at_which_they_are_given(self):
        state = self.sampler.state
        still_to_give = sum(len(batch.groups) for batch in state.given[len(state.handed_at) :])
        assert sum(state.taken_at) == state.totals.trained_groups - still_to_give
        assert len(state.taken_at) == len(state.versions)

    @invariant()
    def never_two_lines(self):
        names = [line.job_id for line in self.lines]
        assert len(names) == len(set(names))

    def teardown(self):
        if not hasattr(self, "sampler"):
            return
        self.replays()
        self.gets_on()
        self.apply(Finished())
        counts = self.sampler.state.totals
        assert counts.submitted == len(self.submitted)
        assert sorted(line.job_id for line in self.lines) == sorted(self.submitted), "each in exactly one line"

    def gets_on(self):
        """Whatever has happened: if rollouts end from now on, and the trainer keeps its rules, there are batches."""
        sampler, version = GroupSampler(stored(self.sampler.state)), 1000
        while (batch := sampler.unconfirmed()) is not None:
            sampler.apply(GivenAgain(batch.number, confirms=True))
        steps = 0
        while steps < 5:
            if sampler.trouble() is not None:
                sampler.apply(Renewed())
            for _ in range(sampler.room()):
                sampler.apply(Opened(make_task(0), JobTemplate()))
            missing = self.rules.groups_per_step - sampler.state.taken_at[-1]
            if missing <= 0:
                version += 1
                sampler.check_advance(str(version))
                sampler.apply(Advanced(str(version), confirms=True))
                steps += 1
                continue
            if (groups := sampler.choose(missing)) is not None:
                sampler.apply(Taken(groups, confirms=True))
                continue
            pending = sampler.pending().submit
            assert pending, sampler.progress()
            for job_id, _ in pending:
                right = job_id.split("-")[-2] == "0"
                sampler.apply(Arrived(make_rollout(sampler.spec(job_id), float(right)), right))

    def replays(self):
        """The journal, or any stored state and the journal after it, leads to the same state."""
        whole = msgspec.msgpack.encode(self.sampler.state)
        again = GroupSampler.begin("run", self.rules, "0")
        middle = len(self.events) // 2
        for number, event in enumerate(self.events):
            if number == middle:
                again = GroupSampler(stored(again.state))
            again.apply(event)
        assert msgspec.msgpack.encode(again.state) == whole


Sampling.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSampling = Sampling.TestCase
