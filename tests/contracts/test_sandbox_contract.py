"""Every sandbox provider, real and fake, against the one contract."""

from __future__ import annotations

import re

import pytest
import trio

from prorl_trio.sandbox.providers.registry import PROVIDERS, ProcessProvider
from prorl_trio.sandbox.providers.start import Launch, open_daemon_sandbox
from prorl_trio.sandbox.reaper import identify, wait_gone
from prorl_trio.sandbox.runtime.runtime import process_runtime
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.testing.sandbox_contract import (
    CORE_CHECKS,
    ISOLATION_CHECKS,
    LAYER_CHECKS,
    NO_LAYER_CHECKS,
    PROCESS_CHECKS,
    Contract,
)
from prorl_trio.testing.sandbox_process_checks import (
    check_what_a_daemon_killed_from_inside_leaves,
    check_what_a_killed_daemon_leaves,
)
from support.forking import ForkingProvider


def _cases():
    for name, provider in {"fake": FakeProvider, **PROVIDERS, "forked": ForkingProvider}.items():
        checks = CORE_CHECKS if name == "fake" else CORE_CHECKS + PROCESS_CHECKS
        checks += LAYER_CHECKS if provider.has_layers else NO_LAYER_CHECKS
        for check in checks + (ISOLATION_CHECKS if provider.isolated else ()):
            yield pytest.param(name, check, id=f"{name}-{check.__name__.removeprefix('check_')}")


@pytest.fixture(scope="session")
def reports():
    async def probe_all():
        return {name: await provider().probe() for name, provider in PROVIDERS.items()}

    return trio.run(probe_all)


@pytest.mark.parametrize(("name", "check"), list(_cases()))
async def test_contract(name, check, reports, tmp_path):
    if name == "fake":
        provider = FakeProvider()
    else:
        report = reports["bubblewrap" if name == "forked" else name]
        if not report.usable:
            pytest.skip(f"{name} cannot run here: {report.problem}. What to do: {report.remedy}")
        provider = {**PROVIDERS, "forked": ForkingProvider}[name](tmp_path)
    await check(Contract(provider, tmp_path))


class UnguardedProvider(ProcessProvider):
    """`process` without the guard that ends what a killed daemon leaves."""

    def open_sandbox(self, spec):
        def plan(run_dir, folder):
            runtime = process_runtime(str(run_dir.lib))
            tool_env = {**runtime.tool_env, "HOME": str(folder.home)}
            return Launch(
                runtime.daemon_argv(), {**runtime.env, **tool_env}, tool_env, str(folder.home), isolated=False
            )

        return open_daemon_sandbox(spec, self._runtime_dir, plan)


@pytest.mark.parametrize("check", [check_what_a_killed_daemon_leaves, check_what_a_daemon_killed_from_inside_leaves])
async def test_a_provider_whose_killed_daemon_leaves_processes_breaks_the_contract(check, tmp_path):
    with pytest.raises(AssertionError, match="outlived their sandbox") as failure:
        await check(Contract(UnguardedProvider(tmp_path), tmp_path))
    left = dict(re.findall(r"(\d+) ((?:sleep|sh -c) [^'\"]+)", str(failure.value)))
    assert {command.split()[0] for command in left.values()} == {"sleep", "sh"}  # also who ignores signals
    # The check that names them kills them.
    assert not wait_gone(filter(None, map(identify, map(int, left))), 2.0)
