"""The problems that a learning run trains on: seldom solved families come up more often, and none is left out."""

from __future__ import annotations

from collections import Counter

import msgspec

from prorl_launch.learning.curriculum import LEAST, WINDOW, Curriculum, Sums
from prorl_trio.sampling import ManifestLine
from prorl_trio.tasks.sets.word_problems import EASY, FAMILIES, word_problem

NAMES = [family.name for family in FAMILIES]


def lines(curriculum, rates, groups=12 * 8, size=6):
    """The manifest of groups of a policy that solves each family at its rate."""
    solved = Counter()
    for number in range(groups):
        problem = curriculum.problem(number)
        for member in range(size):
            solved[problem.family] += rates[problem.family]
            right = solved[problem.family] >= 1.0
            solved[problem.family] -= right
            yield ManifestLine(
                job_id=f"run-g{number}-{member}-0",
                group=number,
                member=member,
                attempt=1,
                instance_id=problem.problem_id,
                batch=1,
                fate="trained",
                reward=float(right),
            )


def drawn(curriculum, count):
    return Counter(curriculum.problem(number).family for number in range(count))


def test_families_take_turns_before_anything_is_known():
    curriculum = Curriculum(3)
    for start in range(0, 48, 12):
        assert sorted(curriculum.problem(start + n).family for n in range(12)) == sorted(NAMES)
    problem = curriculum.problem(5)
    assert problem == word_problem(5, seed=3, family=problem.family)


def test_families_come_up_in_proportion_to_their_failures():
    curriculum = Curriculum(0)
    rates = dict.fromkeys(NAMES, 1.0) | {"share": 0.0, "rate": 0.5}
    curriculum.observe(list(lines(curriculum, rates)))
    assert curriculum.success_rate("share") == 0.0
    assert curriculum.success_rate("gain") == 1.0
    assert curriculum.success_rate("rate") == 0.5
    whole = 10 * LEAST + (1.0 + LEAST) + (0.5 + LEAST)
    counts = drawn(curriculum, 2700)
    for name, rate in rates.items():
        assert abs(counts[name] - 2700 * (1.0 + LEAST - rate) / whole) <= 2, name


def test_only_the_last_rollouts_of_a_family_count():
    curriculum = Curriculum(0)
    curriculum.observe(list(lines(curriculum, dict.fromkeys(NAMES, 0.0))))
    assert curriculum.success_rate("gain") == 0.0
    newest = [line for line in lines(Curriculum(0), dict.fromkeys(NAMES, 1.0)) if line.instance_id.startswith("gain-")]
    curriculum.observe(newest[: WINDOW // 2])
    assert curriculum.success_rate("gain") == 0.5
    assert curriculum.success_rate("loss") == 0.0


def test_rollouts_that_were_not_decided_do_not_count():
    curriculum = Curriculum(0)
    for line in lines(curriculum, dict.fromkeys(NAMES, 1.0)):
        for fate in ("carried", "cancelled", "resampled"):
            curriculum.observe([msgspec.structs.replace(line, fate=fate)])
    assert drawn(curriculum, 24) == Counter(NAMES * 2)


def test_a_run_that_goes_on_knows_what_was_solved(tmp_path):
    before = Curriculum(0)
    written = list(lines(before, dict.fromkeys(NAMES, 1.0) | {"share": 0.0}))
    before.observe(written)
    manifest = tmp_path / "manifest.jsonl"
    torn = msgspec.json.encode(written[0])[:40]
    manifest.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in written) + torn)
    after, fresh = Curriculum(0), Curriculum(0)
    after.observe_file(manifest)
    fresh.observe_file(tmp_path / "none.jsonl")
    assert [after.success_rate(name) for name in NAMES] == [before.success_rate(name) for name in NAMES]
    assert fresh.success_rate("gain") == 0.0


def test_sums_for_a_program_are_the_same_again_and_others_with_another_seed():
    tasks = [Sums(3).instance(number) for number in range(60)]
    assert tasks == [Sums(3).instance(number) for number in range(60)]
    assert len({task.instance_id for task in tasks}) == 60
    assert {task.family for task in tasks} == {family.name for family in EASY}
    assert all(task.payload["plain_answer"] for task in tasks)
    others = {task.instance_id for task in map(Sums(0).instance, range(60))}
    assert not others & {task.instance_id for task in tasks}
