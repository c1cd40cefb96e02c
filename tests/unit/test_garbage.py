from __future__ import annotations

import gc

import pytest

from prorl_trio.node.garbage import rare_garbage_collection


class Knot:
    """Refers to itself, so that only a search for garbage ends it."""

    alive = 0

    def __init__(self):
        self.me = self
        Knot.alive += 1

    def __del__(self):
        Knot.alive -= 1


def test_the_setting_is_the_processes_own_again_afterwards_also_after_an_error():
    before, frozen = gc.get_threshold(), gc.get_freeze_count()

    def fail_within():
        with rare_garbage_collection():
            assert gc.get_threshold()[0] > before[0]
            assert gc.get_freeze_count() > frozen
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_within()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_garbage_is_still_found():
    Knot.alive = 0
    with rare_garbage_collection():
        for _ in range(200_000):
            Knot()
        assert 0 < Knot.alive < 200_000
    gc.collect()
    assert Knot.alive == 0
