"""A reward file that a verifier, or what it runs, has written: rewards, or a `ValueError` that says why not."""

from __future__ import annotations

import pytest

from prorl_trio.tasks.grading.reward_file import parse_rewards

UNREADABLE = {
    "endless nesting": ("reward.json", b"[" * 60_000),
    "endless nesting in a table": ("reward.json", b'{"reward": ' + b'{"a":' * 10_000),
    "text that is no UTF-8": ("reward.json", b'{"reward": 1, "\xff": 1}'),
    "half of a surrogate pair": ("reward.json", b'{"\\ud800": 1}'),
    "a number beyond floats": ("reward.json", b"1" + b"0" * 400),
    "a number of 60,000 digits": ("reward.json", b"9" * 60_000),
    "60,000 digits in text": ("reward.txt", b"9" * 60_000),
    "no number": ("reward.txt", b"nan"),
    "infinity": ("reward.json", b"1e999"),
    "a NUL": ("reward.txt", b"1\0"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_reward_is_a_value_error(name):
    with pytest.raises(ValueError, match=r"reward\."):
        parse_rewards(*UNREADABLE[name])
