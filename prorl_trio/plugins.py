"""Classes that installed packages add to a node, declared under an entry-point group."""

from __future__ import annotations

import os
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from prorl_trio.types.errors import ConfigError


def described(error: BaseException, module: str) -> str:
    """Return one line about an exception that third-party code has raised, with the file and line of that code.

    It names the innermost place in the package of `module`. Without such a place, it names the innermost of all, unless
    the module could not be found.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = [
        (frame, str(frame.f_globals.get("__name__")), line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    frames = [each for each in frames if each[1] != __name__ and each[1].partition(".")[0] != "importlib"]
    own = [each for each in frames if each[1].partition(".")[0] == module.partition(".")[0]]
    place = "".join(f" ({frame.f_code.co_filename}:{line})" for frame, _, line in (own or frames)[-1:])
    return f"{type(error).__name__}: {error}{place}"


def load_plugins(group: str, base: type[Any]) -> dict[str, type[Any]]:
    """Import every class declared under `group`; return them by their declared names.

    Raises:
        ConfigError: a class cannot be imported, is not a subclass of `base`, lacks a method, or shares its name with
            another; the message names it.
    """
    found: dict[str, type[Any]] = {}
    for entry in entry_points(group=group):
        what = f"{group}: {entry.name!r} ({entry.value})"
        plugin = _load(entry, base, what)
        if found.setdefault(entry.name, plugin) is not plugin:
            raise ConfigError(f"{what}: two installed packages declare that name; remove one")
    return found


def load_class(target: str, base: type[Any]) -> type[Any]:
    """Import and return the class `MODULE:CLASS`, also from the working directory.

    Raises:
        ConfigError: as `load_plugins`, or `target` has another form.
    """
    module, _, name = target.partition(":")
    if not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise ConfigError(f"{target!r} is not MODULE:CLASS")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    return _load(EntryPoint(name, target, ""), base, repr(target))


def _load(entry: EntryPoint, base: type[Any], what: str) -> type[Any]:
    try:
        plugin = entry.load()
    except (Exception, SystemExit) as exc:
        raise ConfigError(f"{what} cannot be loaded: {described(exc, entry.module)}") from exc
    if not (isinstance(plugin, type) and issubclass(plugin, base)):
        raise ConfigError(f"{what} is not a subclass of {base.__name__}")
    if missing := sorted(getattr(plugin, "__abstractmethods__", ())):
        raise ConfigError(f"{what} does not define {', '.join(missing)}")
    return plugin
