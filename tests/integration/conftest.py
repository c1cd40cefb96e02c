"""What integration tests share: the runtime that images other than `host` need."""

from __future__ import annotations

import pytest

from launch.bundle import build_bundle
from launch.progress import SetupError


@pytest.fixture(scope="session")
def runtime():
    """The self-contained runtime, made in the user's cache if it is not there yet: some seconds, once."""
    try:
        return build_bundle()
    except SetupError as error:
        pytest.skip(f"no runtime for images can be made: {error}")
