"""The folders of supervisors: those in use stay, and of those that were left nothing does."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from prorl_launch.abandoned import TRIAL_PREFIX, claim_folder, sweep, wait_left


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leave(folder):
    """Let a folder go as the kernel does when its last process has ended."""
    os.close(folder._mark)
    (Path(folder.path) / "deep").mkdir()
    return Path(folder.path) / ".supervised"


def swept():
    """Return the files in /dev/shm that a sweep found to be left."""
    found = []
    sweep(found.append)
    return found


def test_a_folder_in_use_stays_and_one_that_was_left_goes(place):
    used, left = claim_folder(), claim_folder()
    used.note({(5, 8)})
    left.note({(5, 7)})
    left.note({(6, 1)})
    leave(left)
    assert swept() == [{(5, 7), (6, 1)}]
    assert list(place.iterdir()) == [Path(used.path)]
    assert used.noted() == {(5, 8)}
    used.remove()
    assert used.noted() == {(5, 8)}, "as the other process of a supervisor asks for it"
    os.close(used._mark)
    assert list(place.iterdir()) == []


def test_what_lives_on_keeps_a_folder_until_its_memory_is_free(place):
    left = claim_folder()
    left.note({(5, 7)})
    left.leave()
    left.remove()
    leave(left)
    sweep(lambda files: files)
    assert list(place.iterdir()) == [Path(left.path)]
    assert swept() == [{(5, 7)}]
    assert list(place.iterdir()) == []


def test_after_a_boot_of_the_machine_numbers_of_files_mean_nothing(place):
    left = claim_folder()
    left.note({(5, 7)})
    mark = leave(left)
    mark.write_bytes(b"another\n" + mark.read_bytes().partition(b"\n")[2])
    assert swept() == []
    assert list(place.iterdir()) == []


def test_a_note_that_a_full_disk_has_cut_is_left_out(place):
    left = claim_folder()
    left.note({(5, 7)})
    mark = leave(left)
    mark.write_bytes(mark.read_bytes() + b"5 81")
    assert swept() == [{(5, 7)}]
    assert list(place.iterdir()) == []


def test_folders_of_others_are_not_touched(place):
    (place / "prorl-engine-other").mkdir()
    (place / "other").mkdir()
    (place / "other/.supervised").touch()
    assert swept() == []
    assert len(list(place.iterdir())) == 2


def test_a_folder_whose_maker_was_killed_before_it_had_a_mark_goes_when_it_is_old(place):
    used = claim_folder()
    for name in ("prorl-engine-a", "prorl-engine-b", f"{TRIAL_PREFIX}c", "other"):
        (place / name / "deep").mkdir(parents=True)
    for path in place.iterdir():
        if not path.name.endswith("-a"):
            os.utime(path, (0, time.time() - 120))
    assert swept() == []
    assert sorted(place.iterdir()) == sorted([place / "other", place / "prorl-engine-a", Path(used.path)])
    os.close(used._mark)


def test_who_waits_for_an_owner_does_so_until_its_folder_is_left(place):
    one, other = claim_folder("1.0.3"), claim_folder("1.0.4")
    begun = time.monotonic()
    wait_left("1.0.5", str(place), begun + 60)
    os.close(one._mark)
    wait_left("1.0.3", str(place), begun + 60)
    assert time.monotonic() < begun + 60
    deadline = time.monotonic() + 0.2
    wait_left("1.0.4", str(place), deadline)
    assert time.monotonic() >= deadline
    os.close(other._mark)
