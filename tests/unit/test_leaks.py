"""The check that blames tests for what they leave behind."""

from __future__ import annotations

import logging
import os
import signal

from support.leaks import find_leaks, holdings


def test_a_descriptor_is_found():
    before = holdings()
    reading, writing = os.pipe()
    leaks = find_leaks(before)
    os.close(reading)
    os.close(writing)
    assert len(leaks) == 2
    assert all(leak.startswith("descriptor pipe:") for leak in leaks)


def test_a_muted_logger_is_found():
    logger = logging.getLogger("tests.leaks")
    before = holdings()
    logger.disabled = True  # as `logging.config` has it, of all that it is told nothing about
    leaks = find_leaks(before)
    logger.disabled = False
    assert leaks == ["muted logger tests.leaks"]


def test_an_ignored_signal_is_found():
    before = holdings()
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leaks = find_leaks(before)
    signal.signal(signal.SIGTERM, former)
    assert leaks == ["signal 15 is ignored"]
