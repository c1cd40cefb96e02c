"""Sandbox providers and handlers that installed packages offer by entry point."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from prorl_trio.config import SandboxConfig
from prorl_trio.sandbox.provider import ProviderReport, SandboxSpec
from prorl_trio.sandbox.providers.apptainer import ApptainerProvider
from prorl_trio.sandbox.providers.bubblewrap import MAX_OVERLAY_BYTES, BubblewrapProvider
from prorl_trio.sandbox.providers.registry import ByImage, choose_provider
from prorl_trio.tasks.handlers.registry import HandlerRegistry
from prorl_trio.testing.fake_sandbox import FakeProvider
from prorl_trio.types.errors import ConfigError, SandboxUnavailable
from support.plugins import installer

PROVIDERS, HANDLERS = "prorl_trio.providers", "prorl_trio.handlers"
MODULE = """
from prorl_trio import AgentHandler
from prorl_trio.sandbox.provider import ProviderReport
from prorl_trio.testing.fake_sandbox import FakeProvider

class OwnProvider(FakeProvider):
    image = ""

    @classmethod
    def configured(cls, config):
        provider = cls()
        provider.image = config.image
        return provider

class PlainProvider(FakeProvider):
    pass

class BrokenProvider(FakeProvider):
    async def probe(self):
        return ProviderReport(name=self.name, usable=False, problem="no daemon", remedy="start it")

class HomelessProvider(FakeProvider):
    async def probe(self):
        raise PermissionError(13, "Permission denied", "/.cache")

class OwnHandler(AgentHandler):
    name = "own"

    def validate(self, payload): ...

    def sandbox_spec(self, context): ...

    async def run(self, context): ...

    async def eval(self, context): ...

class HalfHandler(AgentHandler):
    name = "half"

    def validate(self, payload): ...

def no_class():
    return OwnProvider()
"""


UNFINISHED = "\nthing = (\n"
BUGGY = "from collections import Counter\n\nclass Thing(missing): pass\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    with installer(tmp_path, monkeypatch, own_package=MODULE, unfinished=UNFINISHED, buggy=BUGGY) as install:
        yield install


async def test_a_provider_of_an_installed_package_is_used_by_its_name(install):
    install(PROVIDERS, own="own_package:OwnProvider", plain="own_package:PlainProvider")
    provider = await choose_provider(SandboxConfig(provider="own", image="mine"))
    assert (type(provider).__name__, provider.image) == ("OwnProvider", "mine")
    plain = await choose_provider(SandboxConfig(provider="plain"))
    async with plain.open_sandbox(SandboxSpec()) as sandbox:
        assert (await sandbox.bash("echo hi", timeout_s=1)).output == "hi\n"


async def test_one_that_does_not_work_says_why_and_what_to_do(install):
    install(PROVIDERS, broken="own_package:BrokenProvider")
    with pytest.raises(ConfigError, match=r"broken: no daemon\. What to do: start it"):
        await choose_provider(SandboxConfig(provider="broken"))


async def test_a_cache_folder_that_cannot_be_made_is_a_problem_of_the_provider(install):
    install(PROVIDERS, homeless="own_package:HomelessProvider")
    with pytest.raises(
        ConfigError, match=r"homeless: .*Permission denied: '/\.cache'\. What to do: set PRORL_CACHE_DIR"
    ):
        await choose_provider(SandboxConfig(provider="homeless"))


async def test_an_unknown_name_is_refused_with_those_there_are(install):
    install(PROVIDERS, own="own_package:OwnProvider")
    there = (
        r"sandbox\.provider: no provider is called 'docker'; this node has: auto, apptainer, bubblewrap, process, own"
    )
    with pytest.raises(ConfigError, match=there):
        await choose_provider(SandboxConfig(provider="docker"))


async def test_one_without_fakeroot_is_not_asked_for_it(install):
    install(PROVIDERS, own="own_package:OwnProvider")
    with pytest.raises(ConfigError, match=r"the provider 'own' has none; set sandbox\.provider to 'apptainer'"):
        await choose_provider(SandboxConfig(provider="own", fakeroot=True))


@pytest.mark.parametrize("name", ["auto", "process"])
async def test_the_name_of_a_built_in_one_is_taken(name, install):
    install(PROVIDERS, **{name: "own_package:OwnProvider"})
    with pytest.raises(ConfigError, match=f"offers a provider called '{name}', as a built-in one is"):
        await choose_provider(SandboxConfig(provider="process"))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("own_package:Missing", r"'own' \(own_package:Missing\) cannot be loaded: .*Missing"),
        ("no_such_package:Thing", r"'own' \(no_such_package:Thing\) cannot be loaded: .*: No module named .[a-z_]+.$"),
        (
            "unfinished:Thing",
            r"'own' \(unfinished:Thing\) cannot be loaded: SyntaxError: '\(' was never closed \(/.*/unfinished\.py:2\)",
        ),
        (
            "buggy:Thing",
            r"'own' \(buggy:Thing\) cannot be loaded: NameError: name 'missing' is not defined \(/.*/buggy\.py:3\)",
        ),
        ("own_package:no_class", r"'own' \(own_package:no_class\) is not a subclass of "),
    ],
)
async def test_what_cannot_be_used_is_named(value, problem, install):
    install(PROVIDERS, package="one", own=value)
    install(HANDLERS, package="two", own=value)
    with pytest.raises(ConfigError, match=rf"prorl_trio\.providers: {problem}"):
        await choose_provider(SandboxConfig(provider="own"))
    with pytest.raises(ConfigError, match=rf"prorl_trio\.handlers: {problem}"):
        HandlerRegistry.from_entry_points()


async def test_two_packages_with_one_name_are_refused(install):
    install(PROVIDERS, package="one", own="own_package:OwnProvider")
    install(PROVIDERS, package="two", own="own_package:PlainProvider")
    with pytest.raises(ConfigError, match=r"'own' .* two installed packages declare that name"):
        await choose_provider(SandboxConfig(provider="own"))


def test_what_a_handler_lacks_is_named(install):
    install(HANDLERS, half="own_package:HalfHandler")
    with pytest.raises(
        ConfigError, match=r"'half' \(own_package:HalfHandler\) does not define eval, run, sandbox_spec"
    ):
        HandlerRegistry.from_entry_points()


def test_a_handler_of_an_installed_package_is_there_by_its_name(install):
    install(HANDLERS, whatever="own_package:OwnHandler")
    registry = HandlerRegistry.from_entry_points()
    assert type(registry.get("own")).__name__ == "OwnHandler"
    assert "math" in registry.names


@pytest.mark.parametrize(
    ("works", "fakeroot", "no_images", "of_host", "of_folder", "of_file"),
    [
        ("ab", False, "", "bubblewrap", "bubblewrap", "apptainer"),
        ("ab", False, "a", "bubblewrap", "bubblewrap", "apptainer"),
        ("ab", False, "b", "bubblewrap", "apptainer", "apptainer"),
        ("ab", False, "ab", "bubblewrap", "bubblewrap", "apptainer"),
        ("a", False, "", "apptainer", "apptainer", "apptainer"),
        ("a", False, "a", "apptainer", "apptainer", "apptainer"),
        ("b", False, "", "bubblewrap", "bubblewrap", "bubblewrap"),
        ("ab", True, "", "apptainer", "apptainer", "apptainer"),
    ],
)
async def test_auto_takes_the_best_of_those_that_work(
    monkeypatch, tmp_path, caplog, works, fakeroot, no_images, of_host, of_folder, of_file
):
    async def probe(provider):
        usable, images_problem = provider.name[0] in works, "EIO" if provider.name[0] in no_images else ""
        return ProviderReport(name=provider.name, usable=usable, problem="none", images_problem=images_problem)

    opened = []

    @asynccontextmanager
    async def open_sandbox(provider, spec):
        opened.append(provider.name)
        yield None

    for kind in (ApptainerProvider, BubblewrapProvider):
        monkeypatch.setattr(kind, "probe", probe)
        monkeypatch.setattr(kind, "open_sandbox", open_sandbox)
    chosen = await choose_provider(SandboxConfig(fakeroot=fakeroot, runtime_dir=str(tmp_path)))
    (tmp_path / "folder").mkdir()
    (tmp_path / "image.sif").touch()
    layers = (str(tmp_path / "folder"),)
    for spec, expected in (
        (SandboxSpec(), of_host),
        (SandboxSpec(image=layers[0]), of_folder),
        (SandboxSpec(layers=layers), of_folder),
        (SandboxSpec(image=str(tmp_path / "image.sif"), layers=layers), of_file),
        (SandboxSpec(layers=layers * (MAX_OVERLAY_BYTES // len(layers[0]))), of_file),
        (SandboxSpec(image="docker://nobody/has-this:1"), of_folder),
    ):
        async with chosen.open_sandbox(spec):
            assert chosen.serving(spec).name == expected == opened[-1]
    assert (await chosen.probe()).usable
    assert chosen.has_layers
    assert chosen.name == "+".join(dict.fromkeys((of_host, of_file)))
    warned = "do not work here" in caplog.text
    assert warned == (set(works) <= set(no_images))


async def test_each_sandbox_is_opened_by_the_one_that_serves_it():
    folders, files = FakeProvider(), FakeProvider()
    both = ByImage(folders=folders, files=files, is_for_files=lambda spec: spec.image.endswith(".sif"))
    async with both.open_shared(), both.open_sandbox(SandboxSpec()):
        assert (folders.opened_total, files.opened_total) == (1, 0)
    spec = SandboxSpec(image="/image.sif")
    with pytest.raises(SandboxUnavailable, match="the fake has only `host`"):
        async with both.open_sandbox(spec):
            pass
    assert both.serving(spec) is files
    assert (folders.opened_total, files.opened_total) == (1, 0)


@pytest.mark.parametrize("kind", [ApptainerProvider, BubblewrapProvider])
async def test_a_runtime_folder_that_cannot_be_used_is_not_said_to_be_a_container_s_doing(tmp_path, kind):
    (tmp_path / "file").write_text("")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho bubblewrap 0.11.0\n")
    program.chmod(0o700)
    with trio.fail_after(10):
        report = await kind(tmp_path / "file", executable=str(program)).probe()
    assert not report.usable
    assert "sandbox.runtime_dir" in report.problem
    assert report.remedy.startswith("make room there, or set sandbox.runtime_dir")
