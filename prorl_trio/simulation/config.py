"""The settings of a simulation: the node, the durations of its operations, and their failure rates.

A `sim.toml` has the tables `[stages]`, `[sandbox]`, `[budgets]`, `[backends]` and `[agent]` of a node.toml, and also
`[engine]`, `[work]` and `[failures]`. Times and counts are distributions in one of three forms:

    tool_s = { value = 0.4 }                                       # always the same
    tool_s = { p50 = 0.4, p95 = 6.0 }                              # lognormal
    tool_s = { percentiles = [[0, 0.02], [50, 0.4], [100, 30.0]] } # measured: linear between the points
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from prorl_trio.config import AgentConfig, BackendConfig, BudgetConfig, SandboxConfig, StagesConfig
from prorl_trio.config.quantities import Table
from prorl_trio.config.toml_file import read_toml
from prorl_trio.types.models import RetryPolicy

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

Z95: Final = 1.6448536269514722
"""The 95th percentile of the standard normal distribution."""


class Distribution(Table, frozen=True):
    """The distribution of a duration in seconds, a rate or a count; never negative.

    See the module for its three forms.
    """

    value: float | None = None
    p50: float | None = None
    p95: float | None = None
    percentiles: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        forms = [self.value is not None, self.p50 is not None or self.p95 is not None, bool(self.percentiles)]
        if sum(forms) != 1:
            raise ValueError("a distribution is one of: value; p50 and p95; percentiles")
        if self.value is not None and not 0 <= self.value < math.inf:
            raise ValueError(f"value must be >= 0, got {self.value}")
        if forms[1] and not (self.p50 is not None and self.p95 is not None and 0 < self.p50 <= self.p95 < math.inf):
            raise ValueError(f"p50 and p95 must be 0 < p50 <= p95, got {self.p50} and {self.p95}")
        if self.percentiles:
            _check_percentiles(self.percentiles)

    def draw(self, random: Random) -> float:
        if self.value is not None:
            return self.value
        if self.p50 is not None and self.p95 is not None:
            return self.p50 * math.exp(math.log(self.p95 / self.p50) * random.gauss(0.0, 1.0) / Z95)
        wanted = 100 * random.random()
        before, after = next(pair for pair in pairwise(self.percentiles) if wanted <= pair[1][0])
        share = (wanted - before[0]) / (after[0] - before[0])
        return before[1] + share * (after[1] - before[1])

    def draw_count(self, random: Random, *, least: int = 1) -> int:
        """Draw a sample as a whole number."""
        return max(least, round(self.draw(random)))


def _check_percentiles(points: tuple[tuple[float, float], ...]) -> None:
    percents, values = [point[0] for point in points], [point[1] for point in points]
    rising = all(a < b for a, b in pairwise(percents))
    if len(points) < 2 or percents[0] != 0 or percents[-1] != 100 or not rising:
        raise ValueError("percentiles must rise from 0 to 100")
    if values != sorted(values) or values[0] < 0 or not math.isfinite(values[-1]):
        raise ValueError("the values of percentiles must not be negative and must not fall")


class EngineModel(Table, frozen=True):
    """A model of `count` backends, which differ only in their `speeds`.

    Attributes:
        speeds: factors of all rates for the first backends; the others have 1.
        max_batch: number of concurrent completions; further ones wait in FIFO order.
        kv_tokens: prompt and completion of all running completions, reserved in full; the rest caches prefixes.
        prefill_tokens_per_s: one prompt after another; tokens in the prefix cache cost nothing.
        tokens_per_s: decoding rate of a single completion.
        max_tokens_per_s: total decoding rate; beyond it all completions slow down by the same factor.
    """

    count: int = 1
    max_batch: int = 64
    kv_tokens: int = 1_000_000
    prefill_tokens_per_s: float = 20_000.0
    tokens_per_s: Distribution = Distribution(value=60.0)
    max_tokens_per_s: float = 2_500.0
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("count", "max_batch", "kv_tokens", "prefill_tokens_per_s", "max_tokens_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise ValueError(f"speeds must be > 0, got {list(self.speeds)}")

    def speed_of(self, number: int) -> float:
        """Return the speed of one backend, counted from 0."""
        return self.speeds[number] if number < len(self.speeds) else 1.0


class WorkModel(Table, frozen=True):
    """The work of a rollout.

    Tokens are per prompt, completion and observation; `tool_s` applies to each turn except the last.
    """

    turns: Distribution = Distribution(p50=8, p95=20)
    prompt_tokens: Distribution = Distribution(p50=1500, p95=4000)
    completion_tokens: Distribution = Distribution(p50=250, p95=1200)
    observation_tokens: Distribution = Distribution(p50=200, p95=1500)
    tool_s: Distribution = Distribution(p50=0.4, p95=6.0)
    sandbox_start_s: Distribution = Distribution(p50=0.4, p95=1.5)
    prepare_s: Distribution = Distribution(p50=1.0, p95=4.0)
    evaluation_s: Distribution = Distribution(p50=4.0, p95=30.0)


class FailureRates(Table, frozen=True):
    """Probabilities of failures.

    They apply to a sandbox's start, a tool call (the sandbox is lost), a completion, an evaluation, and a rollout (the
    handler raises).
    """

    sandbox_start: float = 0.0
    tool_call: float = 0.0
    completion: float = 0.0
    evaluation: float = 0.0
    handler: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability, got {getattr(self, name)}")


class SimulationConfig(Table, frozen=True):
    """A simulated run. The same seed gives the same results.

    All `jobs` rollouts are submitted at the start, or at the rate `arrivals_per_s` (Poisson) if that is not 0.
    """

    seed: int = 0
    jobs: int = 512
    arrivals_per_s: float = 0.0
    retry: RetryPolicy = RetryPolicy()
    stages: StagesConfig = StagesConfig()
    sandbox: SandboxConfig = SandboxConfig()
    budgets: BudgetConfig = BudgetConfig()
    backends: BackendConfig = BackendConfig()
    agent: AgentConfig = AgentConfig()
    engine: EngineModel = EngineModel()
    work: WorkModel = WorkModel()
    failures: FailureRates = FailureRates()

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"jobs must be >= 1, got {self.jobs}")
        if not 0 <= self.arrivals_per_s < math.inf:
            raise ValueError(f"arrivals_per_s must be >= 0, got {self.arrivals_per_s}")


def load_simulation(path: Path) -> SimulationConfig:
    """Read `path`.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown or invalid field (named by its path).
    """
    return read_toml(path, SimulationConfig)
