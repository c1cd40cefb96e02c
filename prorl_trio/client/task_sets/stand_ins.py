"""Images of this node that stand for published ones: a file `images.toml` beside tasks."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Final

from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

IMAGES_TOML: Final = "images.toml"


def read_stand_ins(folder: Path) -> dict[str, str]:
    """Return the table `[images]` of `images.toml` in a folder of tasks: an image of ours by the published name.

    Without the file there are none. Blocks on the disk.

    Raises:
        ConfigError: the file has something else.
    """
    path = folder / IMAGES_TOML
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    images = table.get("images")
    if set(table) != {"images"} or not isinstance(images, dict):
        raise ConfigError(f"{path}: one table, [images], is wanted")
    if bad := [name for name, image in images.items() if not isinstance(image, str)]:
        raise ConfigError(f"{path}: images.{bad[0]} is no text")
    return images
