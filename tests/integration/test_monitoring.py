"""A whole node with a fake engine: what it says of itself while a job runs, and afterwards."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prorl_trio.config import BackendConfig, ModelConfig, NodeConfig, SandboxConfig
from prorl_trio.ledger import open_ledger
from prorl_trio.node.core import open_node
from prorl_trio.node.monitoring import open_monitoring
from prorl_trio.sessions.journal import open_journal
from prorl_trio.sessions.session_table import SessionTable
from prorl_trio.sessions.submission import submit_all
from prorl_trio.testing.fake_engine import FakeEngineConfig, open_fake_engine
from prorl_trio.testing.tiny_model import make_tiny_model
from prorl_trio.types.models import JobSpec, SamplingParams, TaskInstance
from support.sessions import ended

pytestmark = pytest.mark.timeout(60)


def values(metrics):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render()[1].decode())
        for sample in family.samples
    }


async def test_a_node_says_what_it_does_and_what_it_did(tmp_path):
    tiny = make_tiny_model(tmp_path)

    def script(_prompt):
        ids = tiny.turn(r"\boxed{42}")
        return ids, [-0.5] * len(ids), "stop"

    engine_config = FakeEngineConfig(vocab_size=259, end_of_turn_id=tiny.end_of_turn_id, max_model_len=4000)
    async with open_fake_engine(script=script, config=engine_config) as engine:
        config = NodeConfig(
            model=ModelConfig(path=str(tmp_path)),
            node_id="n1",
            backends=BackendConfig(urls=[engine.url]),
            sandbox=SandboxConfig(provider="process", max_warm=0),
        )
        async with (
            open_ledger(tmp_path / "ledger") as ledger,
            open_journal(ledger, hot_outcome_bytes=100_000) as journal,
            open_monitoring(config) as monitoring,
            open_node(
                config,
                observers=monitoring.observers,
                on_backend_call=monitoring.metrics.backend_called,
                on_sandbox_open=monitoring.metrics.sandbox_opened,
                outbox=(sessions := SessionTable(journal)),
            ) as node,
        ):
            session, _ = sessions.open("trainer", 0)
            monitoring.watch(node, sessions)
            instance = TaskInstance(instance_id="q", handler="math", payload={"question": "6 * 7?", "answer": "42"})
            spec = JobSpec(job_id="j", instance=instance, sampling=SamplingParams(max_output_tokens=100))
            then = []

            def look(_index, error):  # in the step in which it is the node's
                waits_on = node.statistics()["jobs"][0]["waiting_on"]
                then.append((error, values(monitoring.metrics)["prorl_outbox_running_jobs",], waits_on))

            await submit_all(session, [spec], node, look)
            assert then == [(None, 1, "init worker")]
            await node.drain()
            await ended(session, 1)
            shown = values(monitoring.metrics)
            statistics = node.statistics()
    assert shown["prorl_outcomes_total", "", "math", "completed"] == 1
    assert shown["prorl_stage_workers", "run"] == config.stages.run_workers
    assert shown["prorl_backend_assigned_total", engine.url] == 1
    assert shown["prorl_backend_up", engine.url] == 1
    assert shown["prorl_backend_calls_total", engine.url, "completed"] == 1
    assert shown["prorl_backend_call_seconds_count", engine.url] == 1
    assert shown["prorl_sandbox_started_total",] == 1
    assert shown["prorl_sandbox_open_seconds_count", "process", "cold"] == 1
    assert shown["prorl_sandbox_start_seconds_total",] > 0
    assert shown["prorl_outbox_undelivered_outcomes",] == 1
    assert shown["prorl_outbox_undelivered_bytes",] > 0
    assert shown["prorl_outbox_memory_bytes",] == shown["prorl_outbox_undelivered_bytes",]
    assert shown["prorl_outcome_cache_max_bytes",] == 100_000
    assert shown["prorl_outcome_cache_bytes",] == shown["prorl_outbox_undelivered_bytes",]
    assert shown["prorl_outcome_cache_hits_total",] == 0
    assert shown["prorl_ledger_jobs",] == 1
    assert shown["prorl_outbox_offered_outcomes",] == 1
    assert shown["prorl_outbox_acknowledged_outcomes",] == 0
    assert shown["prorl_node_draining",] == 1
    assert shown["prorl_loop_pass_seconds_count",] > 10
    assert statistics["totals"]["jobs_ended"] == 1
    assert statistics["totals"]["tokens_sampled"] == statistics["pipeline"]["tokens_sampled"] > 0
    assert statistics["loop"]["passes"] > 10
    assert statistics["sessions"]["trainer"]["undelivered"] == 1
    assert statistics["uptime_s"] > 0
