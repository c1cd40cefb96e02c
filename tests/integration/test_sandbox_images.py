"""Images other than `host`, of each kind of userland, as an unpacked directory and as a .sif file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
import trio

from prorl_trio.sandbox.provider import SandboxProvider, SandboxSpec
from prorl_trio.sandbox.providers.apptainer import ApptainerProvider, find_apptainer
from prorl_trio.sandbox.providers.bubblewrap import BubblewrapProvider
from prorl_trio.sandbox.reaper import descendants, is_alive
from prorl_trio.testing import sandbox_contract as sandbox_core_checks
from prorl_trio.testing import sandbox_contract as sandbox_isolation_checks
from prorl_trio.testing import sandbox_process_checks
from prorl_trio.testing.sandbox_contract import Contract
from prorl_trio.types.errors import SandboxLost, SandboxUnavailable
from support.processes import parent_of
from support.programs import find_busybox
from support.skips import because

PROGRAMS = ("bash", "sh", "cat", "env", "ls", "mkdir", "rm", "seq", "sleep", "tr")
APPLETS = ("sh", "cat", "env", "ls", "mkdir", "rm", "sleep", "tr")
MAPPED = "import subprocess; print(subprocess.run(['/bin/{}', '/proc/self/maps'], capture_output=True).stdout.decode())"
CONTRACT = (
    sandbox_core_checks.check_ipython_keeps_state,
    sandbox_core_checks.check_files_round_trip,
    sandbox_isolation_checks.check_no_network,
)
SHELL_CONTRACT = (
    sandbox_core_checks.check_bash_keeps_state,
    sandbox_core_checks.check_exit_code_is_a_result,
    sandbox_core_checks.check_bash_timeout,
    sandbox_core_checks.check_environment_is_as_specified,
    sandbox_process_checks.check_environment_is_clean,
    sandbox_core_checks.check_cancelled_call,
    sandbox_process_checks.check_cancelled_start,
)
USERLANDS = ("glibc", "busybox", "musl")
PROVIDERS = (ApptainerProvider, BubblewrapProvider)

pytestmark = pytest.mark.usefixtures("runtime")


def _empty_root(root):
    for folder in ("bin", "dev", "etc", "proc", "tmp", "usr", "var"):
        (root / folder).mkdir(parents=True)
    (root / "etc/motd").write_text("another userland\n")
    return root


def _glibc_root(root):
    """bash, a handful of programs, and the libraries that they need. No Python."""
    binaries = [Path(str(shutil.which(name))) for name in PROGRAMS]
    listed = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=True).stdout
    libraries = {Path(word) for word in listed.split() if word.startswith("/") and Path(word).is_file()}
    for binary in binaries:
        shutil.copy2(binary, root / "bin" / binary.name)
    for library in libraries - set(binaries):
        target = root / str(library).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)


def _busybox_root(root):
    """One program without any library."""
    shutil.copy2(find_busybox(), root / "bin/busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")


def _musl_root(root):
    """Busybox, and musl's loader with a program that is linked to it."""
    _busybox_root(root)
    compiler = shutil.which("musl-gcc")
    loader = Path("/lib/ld-musl-x86_64.so.1")
    if compiler is None or not loader.exists():
        pytest.skip(because("there is no musl here to compile with", "apt-get install musl-tools"))
    source = root.parent / "print.c"
    source.write_text(
        '#include <stdio.h>\nint main(int c, char **v) { int b; FILE *f = fopen(v[1], "r");'
        " while ((b = getc(f)) != EOF) putchar(b); return 0; }\n"
    )
    subprocess.run([compiler, "-o", root / "bin/linked", source], check=True)
    (root / "lib").mkdir()
    shutil.copy2(loader, root / "lib" / loader.name)


@pytest.fixture(scope="module")
def image_of(tmp_path_factory):
    """The image of a userland, as a directory (`dir`) or as a file (`sif`). Each is made once."""
    makers = {"glibc": _glibc_root, "busybox": _busybox_root, "musl": _musl_root}
    made = {}

    def make(userland, kind):
        if (userland, kind) not in made:
            folder = tmp_path_factory.mktemp(f"{userland}-{kind}")
            if kind == "dir":
                makers[userland](_empty_root(folder / "root"))
                made[userland, kind] = folder / "root"
            else:
                made[userland, kind] = _sif(make(userland, "dir"), folder / "image.sif")
        return made[userland, kind]

    return make


def _sif(root, path):
    executable = find_apptainer()
    if executable is None:
        pytest.skip(because("apptainer is not installed: no .sif can be built", "make apptainer"))
    built = subprocess.run([executable, "--quiet", "build", path, root], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return path


class Imaged(SandboxProvider):
    """A provider whose sandboxes are of another image than `host`, unless they ask for one themselves."""

    def __init__(self, provider, image):
        self.name, self.isolated = provider.name, provider.isolated
        self._provider = provider
        self._image = str(image)

    async def probe(self):
        return await self._provider.probe()

    def open_sandbox(self, spec):
        image = self._image if spec.image == "host" else spec.image
        return self._provider.open_sandbox(msgspec.structs.replace(spec, image=image))


async def _usable(provider_type, base):
    provider = provider_type(base)
    report = await provider.probe()
    if not report.usable:
        pytest.skip(f"{provider.name} cannot run here: {report.problem}. What to do: {report.remedy}")
    return provider


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("userland", USERLANDS)
@pytest.mark.parametrize("provider_type", PROVIDERS, ids=lambda p: p.name)
async def test_contract_in_a_directory(provider_type, userland, check, image_of, tmp_path):
    provider = await _usable(provider_type, tmp_path)
    await check(Contract(Imaged(provider, image_of(userland, "dir")), tmp_path))


@pytest.mark.parametrize("check", SHELL_CONTRACT, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("userland", ["glibc", "busybox"])
@pytest.mark.parametrize("provider_type", PROVIDERS, ids=lambda p: p.name)
async def test_contract_of_the_shell(provider_type, userland, check, image_of, tmp_path):
    """bash, and busybox's `sh` where there is no bash."""
    provider = await _usable(provider_type, tmp_path)
    await check(Contract(Imaged(provider, image_of(userland, "dir")), tmp_path))


@pytest.mark.parametrize("userland", USERLANDS)
async def test_sif_and_its_fuse_process(userland, image_of, tmp_path):
    provider = await _usable(ApptainerProvider, tmp_path)
    image = image_of(userland, "sif")
    for check in CONTRACT:
        await check(Contract(Imaged(provider, image), tmp_path))


@pytest.mark.parametrize("provider_type", PROVIDERS, ids=lambda p: p.name)
async def test_a_program_uses_the_images_own_libraries_and_nothing_of_ours(provider_type, image_of, tmp_path):
    """Neither the runtime's libraries nor its environment leak into what is started."""
    provider = await _usable(provider_type, tmp_path)
    with trio.fail_after(60):
        for userland, program, library in (("glibc", "cat", "libc.so.6"), ("musl", "linked", "ld-musl-x86_64.so.1")):
            spec = SandboxSpec(image=str(image_of(userland, "dir")))
            async with provider.open_sandbox(spec) as sandbox:
                mapped = (await sandbox.ipython(MAPPED.format(program), timeout_s=20)).stdout
                assert library in mapped
                assert "/opt/prorl" not in mapped
                environment = (await sandbox.ipython("!env", timeout_s=20)).stdout
                assert "PATH=/usr/local/sbin:" in environment
                assert not [line for line in environment.splitlines() if line.startswith(("PYTHON", "LD_"))]
                assert "/opt/prorl" not in environment


@pytest.mark.parametrize("provider_type", PROVIDERS, ids=lambda p: p.name)
async def test_what_is_written_is_thrown_away(provider_type, image_of, tmp_path):
    provider = await _usable(provider_type, tmp_path)
    image = image_of("glibc", "dir")
    with trio.fail_after(60):
        async with provider.open_sandbox(SandboxSpec(image=str(image))) as sandbox:
            result = await sandbox.bash("cat /etc/motd; ls /usr", timeout_s=20)
            assert result.output == "another userland\n"
            written = await sandbox.bash("echo changed > /etc/motd; cat /etc/motd; pwd", timeout_s=20)
            assert written.output == "changed\n/home/agent\n"
            await sandbox.write_file("/srv/new/file", b"x" * 100_000)
            refused = await sandbox.bash("echo x > /opt/prorl/runtime/bin/python3", timeout_s=20)
            assert refused.exit_code == 1
    assert (image / "etc/motd").read_text() == "another userland\n"
    assert not (image / "srv/new").exists()


async def test_killed_launcher_of_a_sif_leaves_no_fuse_process(image_of, tmp_path):
    provider = await _usable(ApptainerProvider, tmp_path)
    sif = image_of("glibc", "sif")
    with trio.fail_after(60):
        async with provider.open_shared():
            before = descendants(os.getpid())
            async with provider.open_sandbox(SandboxSpec(image=str(sif))) as sandbox:
                started = descendants(os.getpid()) - before
                (launcher,) = (process for process in started if parent_of(process.pid) == os.getpid())
                os.kill(launcher.pid, signal.SIGKILL)
                with pytest.raises(SandboxLost):
                    await sandbox.bash("sleep 100", timeout_s=200)
            assert not any(map(is_alive, started))


async def test_bubblewrap_refuses_a_sif_that_is_not_unpacked(tmp_path):
    sif = tmp_path / "image.sif"
    sif.touch()
    with pytest.raises(SandboxUnavailable, match="image unpack"):
        async with BubblewrapProvider(tmp_path).open_sandbox(SandboxSpec(image=str(sif))):
            pass


@pytest.mark.parametrize("provider_type", PROVIDERS, ids=lambda p: p.name)
async def test_no_runtime(provider_type, image_of, tmp_path, monkeypatch):
    image = image_of("glibc", "dir")
    provider = await _usable(provider_type, tmp_path)
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "nothing"))
    with pytest.raises(SandboxUnavailable, match="prorl-trio setup runtime"):
        async with provider.open_sandbox(SandboxSpec(image=str(image))):
            pass


@pytest.mark.parametrize("provider_type", PROVIDERS, ids=lambda p: p.name)
async def test_reference_that_was_not_pulled(provider_type, tmp_path, monkeypatch):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    provider = await _usable(provider_type, tmp_path)
    with pytest.raises(SandboxUnavailable, match="image pull docker://nothing"):
        async with provider.open_sandbox(SandboxSpec(image="docker://nothing")):
            pass


@pytest.mark.parametrize("provider_type", PROVIDERS, ids=lambda p: p.name)
async def test_what_the_image_sets_is_for_the_tools(provider_type, tmp_path):
    """Its variables, PATH, locale, library and Python path, which do not lead our Python astray; no launcher's."""
    image = tmp_path / "image"
    _glibc_root(_empty_root(image))
    scripts = image / ".singularity.d/env"
    scripts.mkdir(parents=True)
    (scripts / "90-environment.sh").write_text(
        'export JAVA_HOME=/opt/java LANG=POSIX HOME=/nobody\nexport PATH="/opt/java/bin:$PATH"\n'
        "export PYTHONPATH=/opt/shadows LD_LIBRARY_PATH=/opt/java/lib:/.singularity.d/libs PS1='# '\n"
    )
    (image / "opt/shadows").mkdir(parents=True)
    for module in ("trio", "msgspec", "prorl_daemon"):
        (image / f"opt/shadows/{module}.py").write_text("raise RuntimeError('the wrong module')")
    (tmp_path / "run").mkdir()
    provider = await _usable(provider_type, tmp_path / "run")
    with trio.fail_after(60):
        async with provider.open_sandbox(SandboxSpec(image=str(image), env={"OURS": "too"})) as sandbox:
            lines = (await sandbox.bash("env", timeout_s=20)).output.splitlines()
            cell = await sandbox.ipython("import os; os.environ['JAVA_HOME']", timeout_s=20)
    expected = {"JAVA_HOME=/opt/java", "LANG=POSIX", "LD_LIBRARY_PATH=/opt/java/lib", "HOME=/home/agent", "OURS=too"}
    assert expected <= set(lines)
    assert next(line for line in lines if line.startswith("PATH=")).startswith("PATH=/opt/java/bin:")
    assert "PYTHONPATH=/opt/shadows" in lines
    launchers = ("APPTAINER", "SINGULARITY", "PS1=#", "PROMPT_COMMAND")
    assert not [line for line in lines if line.startswith(launchers)]
    assert cell.result == "'/opt/java'"
