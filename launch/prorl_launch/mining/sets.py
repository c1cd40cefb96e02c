"""Named task sets that a command builds: the packages that they are mined from."""

from __future__ import annotations

from typing import Final

from prorl_launch.mining.miner import Wanted

MINED_SETS: Final[dict[str, tuple[Wanted, ...]]] = {
    "sdist-swe": (
        Wanted("xmltodict", 6),
        Wanted("sqlparse", 6),
        Wanted("tomlkit", 6, ("pyyaml",)),
        Wanted("mistune", 6),
        Wanted("h11", 4),
        Wanted("cachetools", 6),
        Wanted("marshmallow", 6),
        Wanted("humanize", 6),
        Wanted("inflect", 4),
    ),
}
