"""Every sandbox provider, real and fake, against the one contract."""

from __future__ import annotations

import pytest
import trio

from prorl_trio.sandbox.providers.registry import PROVIDERS
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.testing.sandbox_contract import CORE_CHECKS, ISOLATION_CHECKS, PROCESS_CHECKS, Contract


def _cases():
    for name, provider in {"fake": FakeProvider, **PROVIDERS}.items():
        checks = CORE_CHECKS if name == "fake" else CORE_CHECKS + PROCESS_CHECKS
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
        report = reports[name]
        if not report.usable:
            pytest.skip(f"{name} cannot run here: {report.problem}. What to do: {report.remedy}")
        provider = PROVIDERS[name](tmp_path)
    await check(Contract(provider, tmp_path))
