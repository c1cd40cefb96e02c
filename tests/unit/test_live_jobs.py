"""Live jobs by status, session and group: the same answers as a walk over all, and no walk where none is needed."""

from __future__ import annotations

import random
from types import SimpleNamespace

from prorl_trio.pipeline.live import JobFilter, LiveJobs
from prorl_trio.types.models import JobSpec

STATUSES = ("queued", "init", "run", "eval")


class Walked(dict):
    """A dict that counts the values it hands out."""

    walked = 0

    def values(self):
        for value in super().values():
            Walked.walked += 1
            yield value


def make(number):
    spec = JobSpec(job_id=f"{number}", instance=None, group_id=f"g{number % 7}", tags={"part": f"{number % 3}"})
    return SimpleNamespace(spec=spec, session_id=f"s{number % 5}", status="queued", accepted_s=number)


def test_every_filter_finds_what_a_walk_finds():
    rng, live, all_jobs = random.Random(3), LiveJobs(), {}
    for number in range(2_000):
        job = all_jobs[f"{number}"] = make(number)
        live.add(job)
        moved = rng.choice([*all_jobs.values()])
        moved.status = rng.choice(STATUSES)
        live.moved(moved)
        if number % 3 == 0:
            ended = rng.choice([*all_jobs])
            assert live.remove(ended) is all_jobs.pop(ended)
    for _ in range(300):
        wanted = JobFilter(
            status=rng.choice([None, *STATUSES]),
            session_id=rng.choice([None, "s1", "s4", "nobody's"]),
            group_id=rng.choice([None, "g2", "none"]),
            tags=rng.choice([{}, {"part": "1"}, {"part": "x"}]),
        )
        expected = {
            job.spec.job_id
            for job in all_jobs.values()
            if wanted.status in (None, job.status)
            and wanted.session_id in (None, job.session_id)
            and wanted.group_id in (None, job.spec.group_id)
            and wanted.tags.items() <= job.spec.tags.items()
        }
        total, found = live.find(wanted, 10_000)
        assert {job.spec.job_id for job in found} == expected
        assert total == len(expected)
        assert live.find(wanted, 5) == (total, found[:5])
    assert live.by_status() == {status: live.find(JobFilter(status=status), 0)[0] for status in live.by_status()}
    assert sum(live.by_status().values()) == len(live) == len(all_jobs)
    assert live.count("s1") == live.find(JobFilter(session_id="s1"), 0)[0]
    for job_id in all_jobs:
        live.remove(job_id)
    assert (len(live), live.by_status(), live.count("s1")) == (0, {}, 0)
    assert not live._by_session
    assert not live._by_group


def test_one_condition_looks_at_no_more_jobs_than_it_returns():
    live = LiveJobs()
    live._by_id = Walked()
    for number in range(1_000):
        live.add(make(number))
    for index in (live._by_status, live._by_session, live._by_group):
        for key, jobs in index.items():
            index[key] = Walked(jobs)
    for wanted in (JobFilter(), JobFilter(status="queued"), JobFilter(session_id="s1"), JobFilter(group_id="g1")):
        Walked.walked = 0
        total, found = live.find(wanted, 10)
        assert total > 100
        assert (len(found), Walked.walked) == (10, 10)
    Walked.walked = 0
    assert len(live.most_advanced(20)) == 20
    assert Walked.walked == 20
