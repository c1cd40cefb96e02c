"""Update the locks from `pyproject.toml` and the current package index: `make lock`.

`python -m prorl_launch.relock NAME ...` updates only these locks.

The resolver has its own environment in the cache folder. uv uses its configured index (`UV_*`, by default PyPI).
Standard library only.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from prorl_launch import paths, venv
from prorl_launch.locks import WHEELS_ONLY
from prorl_launch.progress import SetupError, say

TOOLS: Final = (venv.UV, "packaging==26.0")


def main() -> int:
    """Write every lock.

    Return the exit code of `prorl_launch.relock.resolve`, or 1 if its environment cannot be made.
    """
    folder = paths.cache_dir() / "lock-tools"
    log_file = paths.cache_dir() / "logs" / "setup-lock.log"
    steps = [("uv", ["-m", "pip", "install", *WHEELS_ONLY, *TOOLS])]
    try:
        venv.install(folder, repr(TOOLS), steps, log_file=log_file, by_uv=False)
    except SetupError as error:
        say(f"ERROR\n{error}")
        return 1
    argv = [
        str(folder / "bin" / "python"),
        "-m",
        "prorl_launch.relock.resolve",
        str(folder / "bin" / "uv"),
        *sys.argv[1:],
    ]
    return subprocess.run(argv, cwd=paths.checkout_dir(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
