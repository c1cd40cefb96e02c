"""What was delivered beside what was dropped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from prorl_trio.observe.metrics import Metrics
from prorl_trio.pipeline.fates import RUN_BOUNDS_S, Distribution, Fates


def test_what_is_dropped_shows_that_it_was_long():
    fates = Fates()
    for _ in range(9):
        fates.ended(2.0, 100, delivered=True)
    fates.ended(300.0, 9_000, delivered=False)
    told = fates.statistics()
    assert {fate: row["count"] for fate, row in told.items()} == {"admitted": 10, "delivered": 9, "dropped": 1}
    assert told["delivered"]["tokens"] == {"mean": 100.0, "p50": 128.0, "p90": 128.0}
    assert told["dropped"]["run_s"] == {"mean": 300.0, "p50": 320.0, "p90": 320.0}
    assert told["admitted"]["run_s"]["mean"] == 31.8


def test_prometheus_reads_both_distributions_by_fate():
    fates, metrics = Fates(), Metrics()
    metrics.watch_fates(fates)
    fates.ended(2.0, 100, delivered=True)
    fates.ended(9999.0, 0, delivered=False)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render()[1].decode())}
    samples = {
        (sample.name, sample.labels["fate"], sample.labels.get("le")): sample.value
        for name in ("prorl_rollout_duration_seconds", "prorl_rollout_tokens")
        for sample in families[name].samples
    }
    assert samples["prorl_rollout_duration_seconds_bucket", "delivered", "1.0"] == 0
    assert samples["prorl_rollout_duration_seconds_bucket", "delivered", "2.5"] == 1
    assert samples["prorl_rollout_duration_seconds_bucket", "dropped", "2560.0"] == 0
    assert samples["prorl_rollout_duration_seconds_bucket", "dropped", "+Inf"] == 1
    assert samples["prorl_rollout_duration_seconds_sum", "admitted", None] == 10001.0
    assert samples["prorl_rollout_tokens_bucket", "dropped", "0.0"] == 1
    assert samples["prorl_rollout_tokens_count", "admitted", None] == 2


@given(st.lists(st.floats(0, 5000), min_size=1), st.floats(0.01, 1))
def test_a_quantile_bounds_what_it_should(values, share):
    distribution = Distribution(RUN_BOUNDS_S)
    for value in values:
        distribution.add(value)
    bound = distribution.quantile(share)
    within = sum(value <= bound for value in values)
    assert within >= share * len(values) - 1e-9 or bound == RUN_BOUNDS_S[-1]
