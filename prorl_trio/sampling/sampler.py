"""The state machine of dynamic sampling. Pure: no I/O, no clock; its inputs are the events of `state`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from prorl_trio.sampling.accounts import (
    batch_statistics,
    carried_lines,
    count,
    duration_s,
    fate_of,
    keep_latest,
    run_statistics,
    whole_group,
)
from prorl_trio.sampling.admission import (
    RECENT,
    capacity,
    expected_share,
    groups_wanted,
    keeps_deadlines,
    pick,
)
from prorl_trio.sampling.batch import Batch, ManifestLine
from prorl_trio.sampling.state import (
    Advanced,
    Arrived,
    Confirmed,
    Event,
    Finished,
    GivenAgain,
    GroupState,
    Lost,
    MemberState,
    Opened,
    Renewed,
    Returned,
    SamplerState,
    Taken,
    Totals,
    group_id,
    job_id,
)
from prorl_trio.types.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prorl_trio.sampling.batch import Why
    from prorl_trio.sampling.rules import GroupRules
    from prorl_trio.types.models import JobSpec, Outcome


NOT_FINITE: Final = "reward_not_finite"
"""The cause recorded for a reward that is not a finite number."""


class NothingToLearn(ServiceError):
    """Too many consecutive groups were uninformative: the tasks have nothing to teach this policy.

    `take` may be called again, with fresh patience.

    Attributes:
        solved: number of these groups with only correct rollouts.
        unsolved: number of these groups without correct rollouts.
    """

    code = "nothing_to_learn"

    def __init__(self, solved: int, unsolved: int) -> None:
        what = "nothing is solved" if not solved else "everything is solved" if not unsolved else "nothing in between"
        super().__init__(
            f"{solved + unsolved} groups in a row are uninformative, {what}: in {solved} all rollouts are correct, in "
            f"{unsolved} none. Give easier or harder tasks, look at rewards and `correct`, or raise patience_groups"
        )
        self.solved = solved
        self.unsolved = unsolved


class RolloutsFail(ServiceError):
    """A member of a group was sampled repeatedly without ever getting a reward: the infrastructure is broken.

    `take` may be called again, with fresh tries for the member.

    Attributes:
        job_id: the last failed rollout.
        causes: number of tries of this member that ended with each `cause/error_code`.
    """

    code = "rollouts_fail"

    def __init__(self, job_id: str, tries: int, causes: dict[str, int], error: str) -> None:
        counts = ", ".join(f"{count} x {cause}" for cause, count in causes.items())
        super().__init__(
            f"rollout {job_id}: {tries} tries in a row ended without a reward ({counts}); the last: {error}. Repair "
            "what fails, then go on, or raise max_tries"
        )
        self.job_id = job_id
        self.causes = causes


class Effects(msgspec.Struct, kw_only=True):
    """The actions required by an event.

    Attributes:
        submit: ids of jobs to submit, each with its number of consecutive failures so far.
        cancel: ids of jobs to cancel.
        lines: fates that are now final, in order.
    """

    submit: list[tuple[str, int]] = []
    cancel: list[str] = []
    lines: list[ManifestLine] = []


class GroupSampler:
    """The state of a run: running groups, waiting groups, unconfirmed batches.

    Only `apply` changes it. The same events in the same order lead to the same state, so it can be rebuilt from a
    journal of events, or from `state` and later events.
    """

    def __init__(self, state: SamplerState) -> None:
        self.state = state
        self._jobs: dict[str, tuple[GroupState, int]] = {}
        """Jobs with a pending outcome, and jobs whose submission waits for `Renewed`."""
        for group in (*state.running.values(), *state.leaving.values()):
            for index, member in enumerate(group.members):
                if member.outcome is None and not member.gone:
                    self._jobs[job_id(state.run, group, index)] = (group, index)

    @classmethod
    def begin(cls, run: str, rules: GroupRules, version: str) -> GroupSampler:
        """Return the sampler of a new run. The ids of its jobs begin with `run`."""
        return cls(SamplerState(run=run, rules=rules, versions=[version], taken_at=[0]))

    @property
    def version(self) -> int:
        """Return the number of policy updates so far."""
        return len(self.state.versions) - 1

    def owns(self, job_id: str) -> bool:
        """Return True if the id belongs to this run, whatever the job's fate."""
        return job_id.startswith(f"{self.state.run}-g")

    def awaits(self, job_id: str) -> bool:
        """Return True if the job's outcome is pending."""
        return job_id in self._jobs

    def may_train(self, job_id: str) -> bool:
        """Return True if the job's outcome is pending and may become part of a batch."""
        found = self._jobs.get(job_id)
        return found is not None and found[0].number in self.state.running

    def spec(self, job_id: str) -> JobSpec | None:
        """Return the job to submit; None if its outcome is no longer awaited."""
        found = self._jobs.get(job_id)
        if found is None or found[0].number in self.state.leaving:
            return None
        group = found[0]
        return group.template.spec(job_id, group_id(self.state.run, group.number), group.instance)

    def pending(self) -> Effects:
        """Return everything pending: jobs to submit and to cancel again after a restart."""
        effects = Effects()
        for name, (group, index) in self._jobs.items():
            if group.number in self.state.leaving:
                effects.cancel.append(name)
            elif not group.members[index].stuck:
                effects.submit.append((name, 0))
        return effects

    def room(self, k: int = 0) -> int:
        """Return how many groups to start now; `k`: the size of the awaited batch, 0 if none is awaited."""
        state, rules = self.state, self.state.rules
        if self.trouble() is not None:
            return 0
        wanted = groups_wanted(
            target=max(rules.ahead * rules.groups_per_step, k),
            ready=len(state.ready),
            running=len(state.running),
            share=expected_share(state.recent) if rules.dynamic else 1.0,
        )
        return max(0, min(wanted, self._capacity()))

    def trouble(self) -> ServiceError | None:
        """Return why sampling is stopped until the trainer reacts, if it is. `Renewed` is that reaction."""
        state = self.state
        streak = state.solved_streak + state.unsolved_streak
        if streak >= state.rules.patience_groups:
            return NothingToLearn(state.solved_streak, state.unsolved_streak)
        for number, index in state.stuck:
            group = state.running[number]
            member = group.members[index]
            return RolloutsFail(job_id(state.run, group, index), member.failures, member.causes, member.error)
        return None

    def choose(self, k: int) -> list[int] | None:
        """Return the numbers of the `k` groups for the next batch; None while it is incomplete.

        Raises:
            ValueError: `k` groups never exist at once.
        """
        state, rules = self.state, self.state.rules
        most = (rules.max_staleness + 1) * rules.groups_per_step
        if not 1 <= k <= most:
            raise ValueError(f"k must be in [1, {most}] ((max_staleness + 1) * groups_per_step), got {k}")
        if len(state.ready) < k:
            return None
        return pick(
            [(group.born + rules.max_staleness, number) for number, group in state.ready.items()],
            self._deadlines(state.running.values()) if rules.early_stop == "keep" else [],
            k=k,
            version=self.version,
            per_step=rules.groups_per_step,
            slots=rules.groups_per_step - state.taken_at[-1],
        )

    def waits_for_advance(self) -> bool:
        """Return True if nothing runs and nothing may start: only a new version can change that."""
        return not self.state.running and self._capacity() <= 0

    def progress(self) -> str:
        """Return a human-readable clause about the progress of the next batch."""
        state = self.state
        return (
            f"{len(state.ready)} whole groups, {len(state.running)} at work, room for {max(0, self._capacity())} more "
            f"at version {state.versions[-1]!r}, where {state.taken_at[-1]} were taken"
        )

    def check_advance(self, version: str) -> None:
        """Raise ValueError if the policy cannot move to `version` without breaking the staleness bound."""
        state, rules = self.state, self.state.rules
        if version in state.versions:
            raise ValueError(f"version {version!r} was announced before; each update needs a new name")
        if (batch := self.unconfirmed()) is not None and batch.version == state.versions[-1]:
            raise ValueError(f"advance to version {version!r}: batch {batch.number} is to be taken again before")
        taken, per_step = state.taken_at[-1], rules.groups_per_step
        left = self._deadlines((*state.ready.values(), *state.running.values()))
        slots = per_step - self._to_give()  # batches to return again come first
        if taken >= per_step or keeps_deadlines(left, version=self.version + 1, per_step=per_step, slots=slots):
            return
        raise ValueError(
            f"advance to version {version!r}: {taken} groups were taken at version {state.versions[-1]!r}, and "
            f"groups_per_step is {per_step}; of the {len(left)} groups that are left some would get older than "
            f"max_staleness = {rules.max_staleness}. Take them first, or set groups_per_step to what a step trains on"
        )

    def unconfirmed(self) -> Batch | None:
        """Return the batch to return again to a resuming trainer; None if it has all batches."""
        state = self.state
        if len(state.handed_at) == len(state.given):
            return None
        return msgspec.structs.replace(state.given[len(state.handed_at)], again=True)

    def statistics(self) -> dict[str, int | float | None]:
        """Return the run's statistics, flat, for a log."""
        return run_statistics(self.state)

    # ------------------------------------------------------------------------------------------------------- events

    def apply(self, event: Event) -> Effects:
        """Change the state by `event`, and return the required actions."""
        effects = Effects()
        match event:
            case Arrived():
                self._arrive(event.outcome, event.correct, effects)
            case Opened():
                self._open(event, effects)
            case Lost():
                self._lose(event.job_id, effects)
            case Taken():
                self._take(event, effects)
            case GivenAgain():
                self._give_again(event)
            case Advanced():
                self._advance(event)
            case Confirmed():
                self._confirm(event.number)
            case Renewed():
                self._renew(effects)
            case Returned():
                self._return(event, effects)
            case Finished():
                self._finish(effects)
        return effects

    def _open(self, event: Opened, effects: Effects) -> None:
        state = self.state
        group = GroupState(
            number=state.next_group,
            instance=event.instance,
            template=event.template,
            born=self.version,
            born_version=state.versions[-1],
            members=[MemberState() for _ in range(state.rules.size)],
        )
        state.running[group.number] = group
        state.next_group += 1
        for index in range(state.rules.size):
            self._submit(group, index, effects)

    def _submit(self, group: GroupState, index: int, effects: Effects) -> None:
        name = job_id(self.state.run, group, index)
        self._jobs[name] = (group, index)
        count(self.state, "submitted")
        effects.submit.append((name, group.members[index].failures))

    def _arrive(self, outcome: Outcome, correct: bool, effects: Effects) -> None:
        """Process an outcome. An outcome that is not pending is ignored: it is a duplicate, or already has a line."""
        found = self._jobs.pop(outcome.job_id, None)
        if found is None:
            return
        group, index = found
        member = group.members[index]
        count(self.state, "ended")
        if group.number in self.state.leaving:
            member.outcome = outcome
            self._leave_if_ended(group)
        elif outcome.reward is None or not math.isfinite(outcome.reward):
            cause = NOT_FINITE if outcome.reward is not None else f"{outcome.cause}/{outcome.error_code}"
            self._add(effects, fate_of(self.state, group, index, "resampled", "failed", outcome=outcome))
            self._sample_again(group, index, cause, outcome.error, effects)
        else:
            member.outcome, member.correct = outcome, correct
            if all(each.outcome is not None for each in group.members):
                self._decide(group, effects)

    def _lose(self, name: str, effects: Effects) -> None:
        found = self._jobs.pop(name, None)
        if found is None:
            return
        group, index = found
        if group.number in self.state.leaving:
            group.members[index].gone = True
            self._leave_if_ended(group)
            return
        self._add(effects, fate_of(self.state, group, index, "resampled", "lost"))
        self._sample_again(group, index, "lost", "the node has delivered it, and it is in no journal", effects)

    def _sample_again(self, group: GroupState, index: int, cause: str, error: str, effects: Effects) -> None:
        member = group.members[index]
        count(self.state, "resampled")
        member.attempt += 1
        member.failures += 1
        member.causes = {**member.causes, cause: member.causes.get(cause, 0) + 1}
        member.error = error
        if member.failures < self.state.rules.max_tries:
            self._submit(group, index, effects)
            return
        member.stuck = True
        self.state.stuck.append((group.number, index))
        self._jobs[job_id(self.state.run, group, index)] = (group, index)

    def _decide(self, group: GroupState, effects: Effects) -> None:
        """Classify a complete group: it waits for a batch, or is uninformative."""
        state, size = self.state, len(group.members)
        del state.running[group.number]
        right = _right(group)
        informative = 0 < right < size
        state.recent = [*state.recent[1 - RECENT :], informative]
        count(state, "decided_groups")
        count(state, "informative_groups", informative)
        count(state, "solved_groups", right == size)
        count(state, "unsolved_groups", right == 0)
        keep_latest(state.submitted_s, duration_s(group))
        if informative or not state.rules.dynamic:
            state.solved_streak = state.unsolved_streak = 0
            keep_latest(state.eligible_s, duration_s(group))
            state.ready[group.number] = group
            return
        state.solved_streak += right > 0
        state.unsolved_streak += right == 0
        self._discard(group, effects)

    def _discard(self, group: GroupState, effects: Effects) -> None:
        """Discard a complete, uninformative group."""
        size = len(group.members)
        count(self.state, "uninformative", size)
        why: Why = "solved" if _right(group) else "unsolved"
        self._add(effects, *(fate_of(self.state, group, index, "uninformative", why) for index in range(size)))

    def _take(self, event: Taken, effects: Effects) -> None:
        state = self.state
        self._confirm_handed_out(event.confirms)
        taken = []
        for group in [state.ready.pop(number) for number in event.groups]:
            whole = whole_group(state, group)
            taken.append(whole)
            keep_latest(state.trained_s, duration_s(group))
            indices = range(len(group.members))
            self._add(effects, *(fate_of(state, group, i, "trained", staleness=whole.staleness) for i in indices))
            count(state, "trained", len(group.members))
        count(state, "trained_groups", len(taken))
        if state.rules.early_stop == "cancel":
            self._cancel(list(state.running.values()), "early_stop", effects)
        state.taken_at[-1] += len(taken)
        batch = Batch(
            number=state.next_batch,
            version=state.versions[-1],
            groups=taken,
            manifest=[*state.lines, *carried_lines(state)],
            statistics=batch_statistics(state, taken),
        )
        state.given.append(batch)
        state.handed_at.append(self.version)
        state.next_batch += 1
        state.since_batch = Totals()
        state.lines = []

    def _give_again(self, event: GivenAgain) -> None:
        state = self.state
        self._confirm_handed_out(event.confirms)
        state.taken_at[-1] += len(state.given[len(state.handed_at)].groups)
        state.handed_at.append(self.version)

    def _cancel(self, groups: Iterable[GroupState], why: Why, effects: Effects) -> None:
        """Cancel running groups. They are remembered until their outcomes report their durations."""
        state = self.state
        for group in groups:
            state.leaving[group.number] = state.running.pop(group.number)
            for index, member in enumerate(group.members):
                name = job_id(state.run, group, index)
                if member.stuck:  # it was not submitted
                    del self._jobs[name]
                    member.stuck, member.gone = False, True
                    continue
                self._add(effects, fate_of(state, group, index, "cancelled", why))
                count(state, "cancelled")
                if member.outcome is None:
                    effects.cancel.append(name)
            self._leave_if_ended(group)
        state.stuck = [each for each in state.stuck if each[0] in state.running]

    def _drop(self, groups: Iterable[GroupState], effects: Effects) -> None:
        """Discard complete groups that would be too old for a resuming trainer."""
        for group in groups:
            del self.state.ready[group.number]
            count(self.state, "cancelled", len(group.members))
            indices = range(len(group.members))
            self._add(effects, *(fate_of(self.state, group, index, "cancelled", "came_back") for index in indices))

    def _leave_if_ended(self, group: GroupState) -> None:
        state = self.state
        if any(job_id(state.run, group, index) in self._jobs for index in range(len(group.members))):
            return
        del state.leaving[group.number]
        keep_latest(state.submitted_s, duration_s(group))
        keep_latest(state.eligible_s, duration_s(group))

    def _confirm_handed_out(self, confirms: bool) -> None:
        state = self.state
        if confirms and state.handed_at:
            self._confirm(state.given[len(state.handed_at) - 1].number)

    def _confirm(self, number: int) -> None:
        state = self.state
        confirmed = sum(batch.number <= number for batch in state.given)
        state.given, state.handed_at = state.given[confirmed:], state.handed_at[confirmed:]

    def _renew(self, effects: Effects) -> None:
        state = self.state
        state.solved_streak = state.unsolved_streak = 0
        stuck, state.stuck = state.stuck, []
        for number, index in stuck:
            member = state.running[number].members[index]
            member.stuck, member.failures, member.causes = False, 0, {}
            self._submit(state.running[number], index, effects)

    def _return(self, event: Returned, effects: Effects) -> None:
        """Move to the trainer's position: the version at which its first missing batch was taken.

        That version may be earlier or later than the current one, because the previous trainer may have had less. Its
        rules also apply to groups started under other rules.
        """
        state = self.state
        former, state.rules = state.rules, event.rules
        trained, present = event.trained or 0, len(state.versions)
        names = [*state.versions, *state.undone]
        taken_at = [*state.taken_at, *(0 for _ in state.undone)]
        for place, batch in enumerate(state.given):
            groups = len(batch.groups)
            if place < len(state.handed_at):
                taken_at[state.handed_at[place]] -= groups * (batch.number > trained)
            elif batch.number <= trained:
                taken_at[names.index(batch.version) if batch.version in names else present - 1] += groups
        state.given, state.handed_at = [batch for batch in state.given if batch.number > trained], []
        kept = len(names)
        if state.given:
            kept = names.index(state.given[0].version) + 1 if state.given[0].version in names else present
        state.versions, state.undone = names[:kept], names[kept:]
        state.taken_at = [*taken_at[: kept - 1], sum(taken_at[kept - 1 :])]
        early = [group for group in state.running.values() if group.born > self.version]
        for group in early:  # tokens sampled from now on have this version
            group.born, group.born_version = self.version, state.versions[-1]
        if state.rules.dynamic and not former.dynamic:
            for group in [each for each in state.ready.values() if not 0 < _right(each) < len(each.members)]:
                del state.ready[group.number]
                self._discard(group, effects)
        others = [each for each in state.running.values() if each not in early]
        overdue = self._overdue([*state.ready.values(), *others, *early])
        self._drop([each for each in overdue if each.number in state.ready], effects)
        self._cancel([each for each in overdue if each.number in state.running], "came_back", effects)

    def _overdue(self, groups: Sequence[GroupState]) -> list[GroupState]:
        """Return the `groups` that would get too old after batches to return again and earlier groups."""
        state, per_step = self.state, self.state.rules.groups_per_step
        slots = max(0, per_step - state.taken_at[-1]) - self._to_give()
        kept: list[int] = []
        overdue = []
        for group in groups:
            kept += self._deadlines([group])
            if not keeps_deadlines(kept, version=self.version, per_step=per_step, slots=slots):
                del kept[-1]
                overdue.append(group)
        return overdue

    def _advance(self, event: Advanced) -> None:
        state = self.state
        self._confirm_handed_out(event.confirms)
        state.undone = state.undone[1:] if state.undone[:1] == [event.version] else []
        state.versions.append(event.version)
        state.taken_at.append(0)

    def _finish(self, effects: Effects) -> None:
        state = self.state
        for group in state.ready.values():
            indices = range(len(group.members))
            self._add(effects, *(fate_of(state, group, index, "carried", "waiting") for index in indices))
        state.ready = {}
        self._cancel(list(state.running.values()), "finished", effects)
        effects.cancel = list(self._jobs)
        self._jobs, state.leaving = {}, {}
        state.lines = []

    def _add(self, effects: Effects, *lines: ManifestLine) -> None:
        effects.lines += lines
        self.state.lines += lines

    def _capacity(self) -> int:
        state, rules = self.state, self.state.rules
        return capacity(
            per_step=rules.groups_per_step,
            max_staleness=rules.max_staleness,
            taken_here=state.taken_at[-1],
            ready=len(state.ready) + self._to_give(),
            running=len(state.running),
        )

    def _to_give(self) -> int:
        """Return the number of groups in batches to return again; they count at the version of that moment."""
        return sum(len(batch.groups) for batch in self.state.given[len(self.state.handed_at) :])

    def _deadlines(self, groups: Iterable[GroupState]) -> list[int]:
        return [group.born + self.state.rules.max_staleness for group in groups]


def _right(group: GroupState) -> int:
    """Return the number of correct rollouts in a group."""
    return sum(member.correct for member in group.members)
