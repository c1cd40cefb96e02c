"""The errors by which `take` says that sampling does not get on."""

from __future__ import annotations

from prorl_trio.types.errors import ServiceError


class NothingToLearn(ServiceError):
    """So many groups in a row were uninformative that the tasks have nothing to teach this policy.

    `take` may be called again: it has the same patience once more.

    Attributes:
        solved: how many of them had only correct rollouts.
        unsolved: how many had none.
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
    """A member of a group was sampled again and again, and never had a reward: the infrastructure does not work.

    `take` may be called again: the member has as many tries once more.

    Attributes:
        job_id: the rollout that failed last.
        causes: how often each `cause/error_code` ended a try of this member.
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
