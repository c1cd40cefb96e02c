"""`perf.ablation_here` without engines: its work, its steps over a scripted node, and what its tables say of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest
import trio

from perf.ablation import VARIANTS
from perf.ablation_here import FULL, QUICK, ExtraAction, ablation_here_report, extra_of, systems_of, take_steps
from perf.trace import Answered
from perf.training import ACTIONS, LEVELS, Conditions, Steps, TaskPayload, instance_of, mean_of
from prorl_ipc.session import Accepted
from prorl_trio.types.models import Outcome, Timing

pytestmark = pytest.mark.timeout(60)

WORKERS = 4
SMALL = msgspec.structs.replace(FULL, groups=2, size=2, workers=WORKERS, ahead=2)
EXTRA = ExtraAction(seconds=0.5, measured=29)


class ScriptedNode:
    """A client whose jobs end one by one as they are asked for: every second member of a group is right.

    What is cancelled ends at once. Instances with an even number are slow: they end when no other is left.
    """

    def __init__(self) -> None:
        self.specs: dict[str, Any] = {}
        self.live: deque[str] = deque()
        self.cancelled: list[str] = []
        self.most_live = 0

    async def submit(self, specs: Any) -> list[Accepted]:
        await trio.lowlevel.checkpoint()
        for spec in specs:
            assert spec.job_id not in self.specs
            self.specs[spec.job_id] = spec
            self.live.append(spec.job_id)
        self.most_live = max(self.most_live, len(self.live))
        return [Accepted(request_id=0, index=0, job_id=spec.job_id) for spec in specs]

    async def cancel(self, job_ids: Any, reason: str) -> None:
        await trio.lowlevel.checkpoint()
        assert reason
        self.cancelled += [job_id for job_id in job_ids if job_id in self.live]

    def results(self, *, follow: bool) -> ScriptedNode:
        assert follow
        return self

    def __aiter__(self) -> ScriptedNode:
        return self

    async def __anext__(self) -> Outcome:
        await trio.sleep(1)
        ready = [each for each in self.live if each in self.cancelled]
        ready += [each for each in self.live if self.number(each) % 2] or list(self.live)
        self.live.remove(ready[0])
        return self.outcome(ready[0], cancelled=ready[0] in self.cancelled)

    def number(self, job_id: str) -> int:
        return int(self.specs[job_id].instance.payload["number"])

    def outcome(self, job_id: str, *, cancelled: bool) -> Outcome:
        spec = self.specs[job_id]
        member = int(job_id.split("-")[-2])
        return Outcome(
            job_id=job_id,
            instance_id=spec.instance.instance_id,
            group_id=spec.group_id,
            status="cancelled" if cancelled else "completed",
            reward=None if cancelled else float(member % 2),
            cause="cancelled" if cancelled else None,
            error="",
            trajectory=None,
            details={ACTIONS: [0.25, 0.75]},
            timing=Timing(),
        )


async def step(system: Conditions, *steps: int) -> tuple[Steps, ScriptedNode]:
    node = ScriptedNode()
    return await take_steps(node, system, steps or (0,), run="r"), node  # type: ignore[arg-type]  # its calls


# ------------------------------------------------------------------------------------------------- steps


async def test_a_step_ends_when_its_batch_is_complete_and_cancels_the_rest(autojump_clock):
    taken, node = await step(SMALL)
    assert (taken.trained, taken.uninformative, taken.surplus) == (4, 0, 0)
    assert taken.ended + taken.cancelled == len(node.specs)
    assert taken.cancelled == len(node.cancelled) > 0
    assert node.most_live <= WORKERS + 2 * SMALL.size
    assert not node.live
    assert taken.wall_s == len(node.specs)
    assert taken.actions_s == [0.25, 0.75] * len(node.specs)


async def test_without_the_clean_up_all_that_runs_is_awaited_and_what_is_too_much_thrown_away(autojump_clock):
    taken, node = await step(msgspec.structs.replace(SMALL, policy="refill"))
    assert node.cancelled == []
    assert taken.cancelled == 0
    assert taken.trained == 4
    assert taken.ended == len(node.specs) == taken.trained + taken.surplus


async def test_each_step_begins_with_the_same_instances_in_every_system(autojump_clock):
    systems = systems_of(SMALL, EXTRA)
    begun = {}
    for variant, system in systems.items():
        _, node = await step(system, 3, 4)
        specs = list(node.specs.values())
        begun[variant] = [spec.instance.payload["number"] for spec in specs[:WORKERS]]
        payloads = [msgspec.convert(spec.instance.payload, TaskPayload) for spec in specs]
        assert {payload.split for payload in payloads} == {variant == "no_balancing"}
        assert {payload.extra_action_s for payload in payloads} == {0.5 if variant == "no_bash" else 0.0}
        assert any(payload.number >= 40_000 for payload in payloads)
    assert len({tuple(numbers) for numbers in begun.values()}) == 1
    assert list(systems) == list(VARIANTS)
    assert systems["no_cleanup"].policy == "refill"


# ------------------------------------------------------------------------------------------------- the work


def test_the_work_is_the_instances_own_and_harder_ones_are_longer():
    blind = msgspec.structs.replace(FULL, balanced=False)
    whole, split = (instance_of(7, each, handler="h").payload for each in (FULL, blind))
    assert whole == {**split, "split": False}
    levels = {instance_of(number, FULL, handler="h").payload["level"] for number in range(300)}
    assert levels == set(range(LEVELS))
    work = FULL
    assert mean_of(work.model(1.0).tool_s) == pytest.approx(work.action_s)
    lengths = [mean_of(work.model(work.hardness(level)).turns) for level in (0, LEVELS // 2, LEVELS - 1)]
    assert lengths == sorted(lengths)
    assert lengths[0] >= 1
    assert lengths[-1] <= work.max_turns


def test_the_extra_time_of_an_action_is_measured_or_the_papers():
    ours = [Answered(0.1, 0, ()), Answered(0.2, 1, ()), Answered(0.3, 0, ())]
    tmux = [Answered(0.5, 0, ()), Answered(0.8, 1, ()), Answered(9.0, None, ())]
    assert extra_of({"ours": ours, "tmux": tmux}, "") == ExtraAction(seconds=pytest.approx(0.5), measured=2)
    failed = extra_of({"ours": ours}, "it is not installed")
    assert (failed.seconds, failed.measured, failed.why) == (pytest.approx(0.36), 0, "it is not installed")
    assert extra_of({"ours": ours, "tmux": tmux[2:] * 3}, "").measured == 0


# ------------------------------------------------------------------------------------------------- the tables


def test_the_table_has_the_gains_of_all_rounds_and_their_range_beside_the_papers():
    def run(wall_s: float) -> Steps:
        return Steps(wall_s=wall_s, trained=8, ended=12, actions_s=[0.4, 0.6], engine_busy=0.8, others_busy=0.1)

    runs = {(variant, number): run(20.0) for variant in VARIANTS for number in (0, 1)}
    runs["no_bash", 0], runs["no_bash", 1] = run(20.0), run(40.0)
    report = ablation_here_report(runs, QUICK, EXTRA)
    assert report.detail_metrics["ablation_here.no_bash.gain"] == pytest.approx(0.5)
    assert report.detail_metrics["ablation_here.no_bash.gain_max"] == pytest.approx(1.0)
    assert report.detail_metrics["ablation_here.no_balancing.gain"] == 0
    assert report.detail_metrics["ablation_here.full.engine_busy"] == 0.8
    (table,) = report.tables
    assert table.rows[0][0] == "all three"
    assert table.rows[2][-4:] == ["+50%", "+0% to +100%", "+50%", "+28%"]
    assert table.rows[2][1:3] == ["0.50 s (0.78 s)", "80% (68%)"]
    assert "measured here over 29 recorded commands" in " ".join(report.notes)
    of_the_paper = ExtraAction(seconds=0.36, why="tmux is not installed")
    assert "the paper's difference (tmux is" in " ".join(ablation_here_report(runs, QUICK, of_the_paper).notes)
