"""Simulate the same work on differently sized nodes, and say which size is enough."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final

import msgspec

from prorl_trio.simulation.config import SimulationConfig
from prorl_trio.simulation.run import SimulationReport, run_simulation
from prorl_trio.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SIZES: Final = {
    "init_workers": "stages.init_workers",
    "run_workers": "stages.run_workers",
    "eval_workers": "stages.eval_workers",
    "sandbox_starts": "sandbox.max_concurrent_starts",
    "engines": "engine.count",
}
"""Short names of what is usually swept."""
MAX_SETTINGS: Final = 1000
GOOD_ENOUGH: Final = 0.95
"""The share of the best throughput with which a sweep is content: more workers for the rest are not worth it."""


class Sized(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, and the report of its run."""

    setting: dict[str, Any]
    report: SimulationReport


def resized(config: SimulationConfig, setting: Mapping[str, Any]) -> SimulationConfig:
    """`config` with other values: by a name of `SIZES`, or a path (`work.tool_s.value`, `engine.max_batch`).

    `sandbox_starts` are of the node and of each image.

    Raises:
        ConfigError: there is no such field, or it cannot have that value.
    """
    tree = msgspec.to_builtins(config)
    for name, value in setting.items():
        *tables, field = SIZES.get(name, name).split(".")
        table = tree
        for key in tables:
            table = table.setdefault(key, {}) if isinstance(table, dict) else {}
        table[field] = value
        if name == "sandbox_starts":
            table["max_concurrent_starts_per_image"] = value
    try:
        return msgspec.convert(tree, SimulationConfig)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{', '.join(f'{name}={value}' for name, value in setting.items())}: {exc}") from exc


def sweep(config: SimulationConfig, values: Mapping[str, Sequence[Any]]) -> Iterator[Sized]:
    """Simulate every combination of `values`, the last name varying fastest.

    Raises:
        ConfigError: see `resized`; or there are over `MAX_SETTINGS` combinations.
    """
    settings = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    if len(settings) > MAX_SETTINGS:
        raise ConfigError(f"{len(settings)} combinations to sweep; at most {MAX_SETTINGS}")
    configs = [resized(config, setting) for setting in settings]
    for setting, one in zip(settings, configs, strict=True):
        yield Sized(setting=setting, report=run_simulation(one))


def double_each(config: SimulationConfig) -> Iterator[Sized]:
    """Simulate `config` with twice of each of `SIZES`, one at a time: what helps is what limits."""
    tree = msgspec.to_builtins(config)
    for name, path in SIZES.items():
        table, field = path.split(".")
        setting = {name: 2 * tree[table][field]}
        yield Sized(setting=setting, report=run_simulation(resized(config, setting)))


def enough(tried: Sequence[Sized]) -> Sized:
    """The smallest setting that comes within `GOOD_ENOUGH` of the best throughput."""
    best = max(one.report.jobs_per_h for one in tried)
    good = [one for one in tried if one.report.jobs_per_h >= GOOD_ENOUGH * best]
    order = {name: sorted({one.setting[name] for one in tried}) for name in tried[0].setting}
    return min(good, key=lambda one: sum(order[name].index(value) for name, value in one.setting.items()))
