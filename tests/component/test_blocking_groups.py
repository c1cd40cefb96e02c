"""Groups in plain calls: from threads, interrupted, with a background that fails, and over a client nobody closes."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from prorl_trio.client import BlockingClient, ConnectionLost
from prorl_trio.sampling import BlockingGroups, GroupRules
from prorl_trio.types.errors import ConfigError
from support.fake_service import TOKEN
from support.interrupts import interrupted_while_it_waits
from support.node_thread import DEADLINE_S, NodeThread
from support.sampled import make_rollout, make_task

if TYPE_CHECKING:
    from collections.abc import Iterator

TASKS = [make_task(n) for n in range(10)]
RULES = GroupRules(size=4, groups_per_step=3, max_staleness=1)


def mixed(spec):
    return make_rollout(spec, float(int(spec.job_id.split("-")[-2]) % 2))


@pytest.fixture
def edge() -> Iterator[NodeThread]:
    with NodeThread() as edge:
        edge.node._on_submit = mixed
        yield edge


@pytest.fixture
def client(edge) -> Iterator[BlockingClient]:
    with BlockingClient(edge.url, TOKEN, "s") as client:
        yield client


def test_batches_in_plain_calls(edge, client, tmp_path):
    with BlockingGroups(client, TASKS, RULES, folder=tmp_path) as groups:
        for step in range(1, 4):
            batch = groups.take()
            assert (batch.number, len(batch.groups), batch.again) == (step, 3, False)
            groups.advance(str(step))
        groups.confirm(3)
        assert (groups.version, groups.last_batch) == ("3", 3)
        assert groups.statistics()["trained"] == 36
    assert not edge.node.live
    with pytest.raises(ConnectionLost, match="has ended"):
        groups.take()
    groups.close()


def test_a_trainer_that_ends_by_an_error_comes_back_to_its_batch(edge, tmp_path):
    taken = []
    for _ in range(2):
        with (  # noqa: PT012 - the trainer ends in the middle
            pytest.raises(KeyError),
            BlockingClient(edge.url, TOKEN, "s") as client,
            BlockingGroups(client, TASKS, RULES, folder=tmp_path) as groups,
        ):
            taken.append(groups.take())
            raise KeyError
    assert [batch.again for batch in taken] == [False, True]
    assert msgspec.msgpack.encode(taken[0]) == msgspec.msgpack.encode(msgspec.structs.replace(taken[1], again=False))


def test_a_time_limit_says_what_is_missing(edge, client):
    edge.node._on_submit = None
    with BlockingGroups(client, TASKS, RULES) as groups:
        with pytest.raises(TimeoutError, match=r"no batch within 0\.05 s: 0 whole groups, 6 at work"):
            groups.take(timeout_s=0.05)
        with pytest.raises(ValueError, match="k must be"):
            groups.take(100)


def test_a_batch_made_for_an_interrupted_call_is_the_next_one(edge, client):
    with BlockingGroups(client, TASKS, RULES) as groups:
        first = client._call(groups._groups.take_after, 0)  # the call returned in the loop, and nobody received it
        assert groups.take().number == first.number == 1
        assert groups.take().number == 2


def test_ctrl_c_ends_a_wait_and_loses_nothing(edge, client):
    edge.node._on_submit = None
    with BlockingGroups(client, TASKS, RULES) as groups:
        with pytest.raises(KeyboardInterrupt), interrupted_while_it_waits():
            groups.take()
        for job_id, spec in list(edge.node.live.items()):
            edge.call(edge.node.finish, job_id, mixed(spec))
        assert groups.take().number == 1


def test_an_error_of_the_callers_own_function_comes_out(edge, client):
    def broken(outcome):
        raise ZeroDivisionError(outcome.job_id)

    groups = BlockingGroups(client, TASKS, RULES, correct=broken)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            groups.take()
    with pytest.raises(ZeroDivisionError):
        groups.close()
    assert client.status()["live"] >= 0, "the client goes on"


def test_what_cannot_be_opened_is_an_error_of_the_constructor(client, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be read or written"):
        BlockingGroups(client, TASKS, RULES, folder=tmp_path / "file")
    with pytest.raises(ValueError, match="tasks is empty"):
        BlockingGroups(client, [], RULES)


def test_a_forgotten_client_ends_with_its_groups(edge):
    client = BlockingClient(edge.url, TOKEN)
    groups = BlockingGroups(client, TASKS, RULES)
    groups.take()
    before = threading.active_count()
    del client, groups
    gc.collect()
    deadline_s = time.monotonic() + DEADLINE_S
    while threading.active_count() >= before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert threading.active_count() < before
