"""Mining in a cache folder of its own, with the packages that are installed here in place of uv's."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from prorl_launch.mining.environments import LocalBench, packages_folder, seal_environment
from prorl_launch.mining.miner import Miner, MiningLimits, Wanted
from prorl_trio.config import SandboxConfig
from prorl_trio.sandbox.host import open_sandbox_host
from prorl_trio.sandbox.providers.registry import choose_provider
from prorl_trio.sandbox.runtime.bundle import closure, installed_files
from prorl_trio.tasks.sets.mined import mined_set_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from prorl_launch.mining.environments import EnvironmentLayer
    from prorl_launch.mining.index import IndexSettings
    from prorl_launch.mining.rows import MinedTask


def _installed_pytest(package: str, requirements: Sequence[str], scratch: Path) -> EnvironmentLayer:
    """Return the environment that uv would make, of pytest as it is here; `requirements` are there, or not needed."""
    del requirements
    folder = packages_folder(scratch)
    for distribution in closure(("pytest",)):
        for file in installed_files(distribution):
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(distribution.locate_file(file)), folder / file)
    return seal_environment(package, scratch)


async def mine(
    name: str, wanted: Sequence[Wanted], settings: IndexSettings, scratch: Path, **limits: int
) -> tuple[list[MinedTask], list[str]]:
    """Mine packages into the set `name`. Returns what was decided now, and the problems."""
    ended: list[MinedTask] = []
    config = SandboxConfig()
    provider = await choose_provider(config)
    async with open_sandbox_host(provider) as host:
        miner = Miner(
            LocalBench(host, config),
            mined_set_folder(name),
            settings,
            limits=MiningLimits(timeout_s=120.0, **limits),
            jobs=2,
            on_ended=ended.append,
            make_environment=lambda package, needs: _installed_pytest(package, needs, scratch / "environment"),
        )
        return ended, await miner.mine(wanted)
