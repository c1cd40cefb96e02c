"""What integration tests share: the runtime that images other than `host` need, and the providers that isolate."""

from __future__ import annotations

import pytest

from prorl_launch.bundle import build_bundle
from prorl_launch.progress import SetupError
from prorl_trio.sandbox.providers.registry import PROVIDERS
from support.forking import ForkingProvider
from support.id_range import apptainer_with_ids
from support.skips import because


@pytest.fixture(scope="session")
def runtime():
    """The self-contained runtime, made in the user's cache if it is not there yet: some seconds, once."""
    try:
        return build_bundle()
    except SetupError as error:
        pytest.skip(because(f"no runtime for images can be made: {error}", "make setup"))


@pytest.fixture(scope="session")
def ranged_apptainer(tmp_path_factory):
    """An Apptainer for which this user has further ids: see `apptainer_with_ids`."""
    return apptainer_with_ids(tmp_path_factory.mktemp("ids"))


@pytest.fixture(scope="session")
def probe_reports():
    """What each provider's probe said, once it was asked."""
    return {}


@pytest.fixture(params=[name for name, provider in PROVIDERS.items() if provider.isolated])
async def provider(request, tmp_path, probe_reports):
    """Each provider that isolates, with its folder in `tmp_path`; skipped where it does not work.

    With bubblewrap sandboxes are forked where they can be, as in a node.
    """
    found = {**PROVIDERS, "bubblewrap": ForkingProvider}[request.param](tmp_path)
    if found.name not in probe_reports:
        probe_reports[found.name] = await found.probe()
    report = probe_reports[found.name]
    if not report.usable:
        pytest.skip(f"{found.name} cannot run here: {report.problem}. What to do: {report.remedy}")
    return found
