from __future__ import annotations

import subprocess
import sys

import pytest

import prorl_trio


@pytest.mark.parametrize("name", prorl_trio.__all__)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(prorl_trio, name)
    assert value.__doc__
    assert name in dir(prorl_trio)


def test_a_handlers_author_needs_no_other_name():
    needed = {"AgentHandler", "AgentStyle", "ChatMessage", "Evaluation", "Observation", "RolloutContext", "Sandbox"}
    assert needed | {"SandboxSpec", "Tool", "ToolSet", "run_agent", "run_sub_agent"} <= {*prorl_trio.__all__}


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no_such_name"):
        prorl_trio.no_such_name  # noqa: B018


def test_importing_the_package_loads_nothing():
    code = "import sys, prorl_trio; print([m for m in sys.modules if m.startswith(('prorl_trio.', 'trio', 'numpy'))])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_client_needs_few_packages():
    """Those that docs/package.md names for a trainer's environment; what they need comes with them."""
    packages = "trio, trio_websocket, h11, msgspec, numpy"
    client = "prorl_trio.client.policy_update, prorl_trio.sampling, prorl_trio.types.batch"
    loaded = []
    for modules in (packages, f"{packages}, {client}"):
        argv = [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"]
        names = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
        loaded.append({name.partition(".")[0] for name in names} - sys.stdlib_module_names)
    assert loaded[1] - loaded[0] == {"prorl_trio", "prorl_ipc"}
