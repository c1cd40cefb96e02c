"""Agents of others, where they are installed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from prorl_trio.agents.preset import presets
from support.skips import because

if TYPE_CHECKING:
    from prorl_trio.agents.preset import Preset


def installed(name: str) -> Preset:
    """Return the preset of an agent that is installed; skip the test otherwise."""
    preset = presets()[name]
    if not preset.is_installed:
        lacks_npm = preset.index == "npm" and shutil.which("npm") is None
        why = "npm is not installed" if lacks_npm else f"the agent {name} is not installed"
        pytest.skip(
            because(why, "install Node.js 22; make agents" if lacks_npm else f"prorl-trio agents install {name}")
        )
    return preset
