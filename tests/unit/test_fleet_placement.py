"""The choice of nodes for jobs, and which outcome of a job on several nodes counts."""

from __future__ import annotations

import pytest

from prorl_trio.client.fleet.acks import NodeAcks
from prorl_trio.client.fleet.book import Book, FleetJob
from prorl_trio.client.fleet.placement import NodeRoom, Unit, place
from prorl_trio.client.fleet.statistics import merge_statistics
from support.fake_node import make_spec


def alone(count):
    return [Unit([f"j{n}"]) for n in range(count)]


def counts(chosen):
    return {node_id: len(job_ids) for node_id, job_ids in chosen.items()}


def test_free_places_are_filled_by_their_share_and_then_queues_by_size():
    rooms = {"a": NodeRoom(100, 8, 8), "b": NodeRoom(100, 24, 24)}
    assert counts(place(alone(32), rooms)) == {"a": 8, "b": 24}
    assert counts(place(alone(64), rooms)) == {"a": 16, "b": 48}


def test_a_node_with_a_queue_gets_less():
    rooms = {"a": NodeRoom(100, -8, 8), "b": NodeRoom(100, 8, 8)}
    assert counts(place(alone(16), rooms)) == {"b": 16}


def test_nobody_gets_more_than_admission_takes():
    rooms = {"a": NodeRoom(3, 3, 8), "b": NodeRoom(0, 0, 8)}
    assert counts(place(alone(9), rooms)) == {"a": 3}
    assert place(alone(9), {}) == {}


def test_a_group_is_divided_only_where_that_lets_jobs_begin():
    group = [Unit([f"g{n}" for n in range(6)])]
    assert counts(place(group, {"a": NodeRoom(99, 6, 8), "b": NodeRoom(99, 4, 8)})) == {"a": 6}
    assert counts(place(group, {"a": NodeRoom(99, 4, 8), "b": NodeRoom(99, 3, 8)})) == {"a": 4, "b": 2}
    assert counts(place(group, {"a": NodeRoom(99, 0, 8), "b": NodeRoom(99, -5, 8)})) == {"a": 6}


def test_mates_that_come_later_go_where_the_others_are_unless_they_would_wait():
    late = [Unit(["x", "y"], home="b")]
    assert place(late, {"a": NodeRoom(99, 8, 8), "b": NodeRoom(99, 2, 8)}) == {"b": ["x", "y"]}
    assert place(late, {"a": NodeRoom(99, 8, 8), "b": NodeRoom(99, 1, 8)}) == {"a": ["x", "y"]}


def test_a_group_that_its_node_watches_is_never_divided():
    group = [Unit(["x", "y", "z"], tied=True)]
    assert place(group, {"a": NodeRoom(99, 1, 8), "b": NodeRoom(99, 2, 8)}) == {"b": ["x", "y", "z"]}
    assert place([Unit(["x"], home="gone", tied=True)], {"a": NodeRoom(99, 1, 8)}) == {}


@pytest.fixture
def book():
    found = Book()
    job = found.jobs["x"] = FleetJob(make_spec("x"))
    job.node_id = "a"
    job.unplace()
    job.node_id = "b"
    found.moved["x"] = {"a"}
    return found


def test_the_first_real_outcome_counts_wherever_it_comes_from(book):
    assert book.judge("a", "x", "completed") == "deliver"
    assert book.judge("b", "x", "cancelled") == "drop"
    assert book.judge("b", "x", "completed") == "drop"
    assert not book.jobs


def test_a_cancel_counts_only_where_the_job_is_now(book):
    assert book.judge("a", "x", "cancelled") == "drop"
    assert book.jobs["x"].attempt == 2
    assert book.judge("b", "x", "cancelled") == "deliver"


def test_a_shutdown_is_no_end_of_a_job(book):
    assert book.judge("b", "x", "cancelled", "shutdown") == "move"
    assert "x" in book.jobs


def test_of_a_moved_job_without_its_spec_the_same_holds(book):
    book.jobs.clear()
    assert book.judge("a", "x", "cancelled") == "drop"
    assert book.judge("c", "x", "cancelled") == "deliver"


def test_a_node_hears_of_what_was_dropped_with_what_is_acknowledged():
    acks = NodeAcks()
    for node_cursor, cursor in ((1, 5), (2, 0), (3, 9), (4, 0)):
        acks.add(node_cursor, cursor, f"j{node_cursor}")
    assert acks.unsettled() == {"j1": 5, "j3": 9}
    assert acks.settle(4) == 0
    assert acks.settle(5) == 2
    assert acks.settle(5) == 0
    assert acks.settle(9) == 4


def test_an_outcome_that_its_node_is_to_keep_keeps_those_after_it():
    acks = NodeAcks()
    acks.add(1, 5, "a")
    acks.hold(2, "b")
    acks.add(3, 6, "c")
    assert acks.held(["a", "b", "c"]) == ["b"]
    assert acks.settle(9) == 1
    assert acks.settle(9) == 0
    assert acks.unsettled() == {"c": 6}
    acks.release(["a", "b", "c"])
    assert acks.settle(5) == 2
    assert acks.settle(6) == 3


def test_the_state_of_a_fleet_is_that_of_its_nodes_together():
    def report(busy, p99_ms):
        stages = {"run": {"busy": busy, "workers": 4}}
        return {
            "uptime_s": 10.0 * busy,
            "pipeline": {"stages": stages},
            "loop": {"p99_ms": p99_ms},
            "jobs": [{"job_id": str(busy)}],
        }

    merged = merge_statistics("fleet", {"a": report(1, 3.0), "b": report(2, 2.0)})
    assert merged["pipeline"]["stages"]["run"] == {"busy": 3, "workers": 8}
    assert (merged["loop"]["p99_ms"], merged["uptime_s"]) == (3.0, 20.0)
    assert merged["jobs"] == [{"job_id": "1", "node_id": "a"}, {"job_id": "2", "node_id": "b"}]
    assert sorted(merged["nodes"]) == ["a", "b"]
