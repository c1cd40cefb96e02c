"""Set-up before anything is installed, and what survives a second one, a kill and a broken step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from prorl_launch import paths, venv
from prorl_launch.environments import trainer_environment
from prorl_launch.paths import checkout_dir, import_path
from prorl_launch.progress import SetupError, run_step
from prorl_launch.setup import setup_environment
from prorl_launch.userns import user_namespace_problem
from support.skips import because

TIMEOUT_S = 60
COUNT = ("count", ["-c", "import sys, pathlib; pathlib.Path(sys.prefix, 'count').open('a').write('x')"])
FAIL = ("fail", ["-c", "import sys; print('the reason'); sys.exit(3)"])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A complete environment for the key `first`. Making one takes seconds, so tests share it and restore it."""
    folder = tmp_path_factory.mktemp("venv") / "env"
    venv.install(folder, "first", [COUNT], log_file=folder.parent / "log")
    return folder


@pytest.fixture
def folder(made):
    (made / ".complete").write_text("first")
    (made / ".installing").unlink(missing_ok=True)
    (made / "count").write_text("")
    return made


def install(folder: Path, key: str, *steps: tuple[str, list[str]], hint: str = "") -> None:
    venv.install(folder, key, steps, log_file=folder.parent / "log", hint=hint)


def count(folder: Path) -> int:
    return len((folder / "count").read_text())


# ---------------------------------------------------------------- environments


def test_what_is_complete_is_left_alone(folder):
    install(folder, "first", COUNT, FAIL)
    assert count(folder) == 0


def test_another_key_is_brought_up_to_date_in_place(folder):
    (folder / "kept").touch()
    install(folder, "second", COUNT)
    assert count(folder) == 1
    assert (folder / "kept").exists()
    assert venv.is_complete(folder, "second")
    assert not venv.is_complete(folder, "first")


def test_a_failed_step_says_why_and_leaves_it_incomplete(folder):
    with pytest.raises(SetupError, match=r"(?s)the reason.*fail: failed with exit code 3.*do this"):
        install(folder, "second", FAIL, hint="do this")
    assert not venv.is_complete(folder, "first")
    assert not venv.is_complete(folder, "second")
    assert (folder / ".installing").exists()


def test_an_interrupted_one_is_made_again_from_nothing(folder):
    (folder / ".installing").write_text("first")
    (folder / ".complete").unlink()
    (folder / "half").mkdir()
    install(folder, "first", COUNT)
    assert count(folder) == 1
    assert not (folder / "half").exists()
    assert venv.is_complete(folder, "first")


def test_one_that_was_moved_is_made_again(folder, tmp_path):
    """Scripts carry the path of their environment, so a checkout that was moved has broken ones."""
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved, symlinks=True)
    assert venv._is_usable(folder)
    assert not venv._is_usable(moved)


def test_a_killed_set_up_is_waited_for_until_its_pip_has_gone(folder):
    """kill -9 of the first leaves its step running; the second starts only when that has ended, and makes all again."""
    first = (
        "import sys, pathlib; from prorl_launch import venv; "
        f"folder = pathlib.Path({str(folder)!r}); "
        "step = ('slow', ['-c', 'import time; print(1, flush=True); time.sleep(1.5)']); "
        "venv.install(folder, 'second', [step], log_file=folder.parent / 'slow.log')"
    )
    log = folder.parent / "slow.log"
    log.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-c", first], cwd=checkout_dir(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_S
    while not (log.exists() and log.read_text().rstrip().endswith("1")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(TIMEOUT_S)
    killed_at = time.monotonic()
    install(folder, "second", COUNT)
    assert time.monotonic() - killed_at > 0.5
    assert count(folder) == 1


def test_two_at_once_install_once(folder):
    code = (
        "import pathlib; from prorl_launch import venv; "
        f"folder = pathlib.Path({str(folder)!r}); "
        f"venv.install(folder, 'both', [{COUNT!r}], log_file=folder.parent / 'log')"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=checkout_dir(), stdout=subprocess.DEVNULL) for _ in range(2)
    ]
    assert [process.wait(TIMEOUT_S) for process in processes] == [0, 0]
    assert count(folder) == 1


# ---------------------------------------------------------------- packages


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder with one wheel, `shelved`, in which alone pip and uv look."""
    with zipfile.ZipFile(tmp_path / "shelved-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("shelved.py", "ANSWER = 42\n")
        wheel.writestr("shelved-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: shelved\nVersion: 1.0\n")
        wheel.writestr("shelved-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("shelved-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


IMPORT = ("import", ["-c", "import shelved; assert shelved.ANSWER == 42"])
TAKE = ("take", ["-m", "pip", "install", "--no-compile", "--only-binary", ":all:", "shelved==1.0"])
REMOVE = ("remove", ["-m", "pip", "uninstall", "--yes", "shelved"])
UV_OF_TESTS = Path(sys.executable).with_name("uv")


def test_uv_installs_and_removes_what_pip_was_asked_to_from_where_pip_would(folder, shelf, monkeypatch):
    monkeypatch.setattr(venv, "_uv", lambda: UV_OF_TESTS)
    (shelf / "uv.toml").write_text('required-version = "==0.0.1"\n')  # of a project; pip reads none
    monkeypatch.chdir(shelf)
    log = folder.parent / "log"
    log.unlink()
    install(folder, "by uv", TAKE, IMPORT, REMOVE)
    assert "Installed 1 package" in log.read_text()  # uv's words
    assert "Successfully installed" not in log.read_text()
    with pytest.raises(SetupError, match="No module named 'shelved'"):
        install(folder, "again", IMPORT)


def test_pip_does_what_uv_cannot_and_no_log_has_the_password_of_an_index(folder, shelf, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:s3cret@127.0.0.1:1/simple")
    for uv in (None, Path("/bin/false"), Path("/nowhere/uv")):
        monkeypatch.setattr(venv, "_uv", lambda uv=uv: uv)
        (folder.parent / "log").unlink()
        install(folder, f"by pip, {uv}", TAKE, IMPORT, REMOVE)
        log = (folder.parent / "log").read_text()
        assert "Successfully installed shelved-1.0" in log
        assert "s3cret" not in log


def test_where_there_is_no_uv_set_up_goes_on_with_pip(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(venv, "locked_pip", lambda *_args: ["-c", "import sys; sys.exit('no such wheel')"])
    assert venv._uv.__wrapped__() is None
    assert "without uv, so by pip" in capsys.readouterr().out


def test_without_the_venv_module_the_package_to_install_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(venv.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SetupError, match=rf"apt-get install python3\.{sys.version_info.minor}-venv"):
        install(tmp_path / "env", "first")


def test_the_space_and_the_time_are_said_first_and_too_little_space_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(venv, "install", lambda *_args, **_named: None)
    environment = trainer_environment("train", "cpu")
    setup_environment(environment, checkout_dir())
    assert "train-cpu: about 2 minutes and up to 3 GB in " in capsys.readouterr().out
    with pytest.raises(SetupError, match=r"train-cpu needs 9000 GB free .* set PRORL_CACHE_DIR"):
        setup_environment(replace(environment, disk_bytes=9_000_000_000_000), checkout_dir())
    (paths.environment_dir(environment)).mkdir()
    (paths.environment_dir(environment) / ".complete").write_text(environment.key(checkout_dir()))
    setup_environment(environment, checkout_dir())
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- steps


def test_a_step_has_no_input_and_a_clean_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_USER", "1")
    code = (
        "import os, sys; print(sys.stdin.read(), sorted({'PYTHONPATH', 'PIP_USER', 'PIP_NO_INPUT'} & set(os.environ)))"
    )
    run_step("look", [sys.executable, "-c", code], log_file=tmp_path / "logs" / "log")
    assert (tmp_path / "logs" / "log").read_text().splitlines()[-1] == " ['PIP_NO_INPUT']"


def test_a_failure_carries_the_end_of_the_output(tmp_path):
    code = "print('\\n'.join(f'line {n}' for n in range(100_000))); raise SystemExit(1)"
    with pytest.raises(SetupError) as caught:
        run_step("much", [sys.executable, "-c", code], log_file=tmp_path / "log")
    assert "line 99999" in str(caught.value)
    assert "line 99000\n" not in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)
    assert "line 0\n" in (tmp_path / "log").read_text()


def test_ctrl_c_ends_the_step_too(tmp_path):
    """A set-up that gets SIGINT leaves no pip behind, also where the signal reaches only itself."""
    code = (
        "import pathlib, sys; from prorl_launch.progress import run_step; "
        "step = [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)']; "
        f"run_step('long', step, log_file=pathlib.Path({str(tmp_path / 'log')!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=checkout_dir(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not (lines := _lines(tmp_path / "log")) or not lines[-1].isdigit():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) != 0
    assert not Path(f"/proc/{lines[-1]}").exists()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# ---------------------------------------------------------------- a bare machine


def test_set_up_needs_the_standard_library_only():
    """It runs before anything is installed: -S leaves `site-packages` out, and the warning's remedy is imported too."""
    code = (
        f"import sys; sys.path[:0] = {import_path().split(os.pathsep)!r}; "
        "import prorl_launch.setup; from prorl_trio.sandbox.providers.userns import user_namespace_remedy; "
        "print([name for name in sys.modules if 'site-packages' in str(getattr(sys.modules[name], '__file__', ''))])"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_forbidden_user_namespaces_are_noticed():
    """In a user namespace of our own we may forbid further ones, as an administrator does for the machine."""
    if problem := user_namespace_problem():
        pytest.skip(because(f"user namespaces are forbidden here already: {problem}", "prorl-trio doctor"))
    code = "from prorl_launch.userns import user_namespace_problem; print(user_namespace_problem())"
    script = f'echo 0 >/proc/sys/user/max_user_namespaces && exec {sys.executable} -c "{code}"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script],
        cwd=checkout_dir(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert "making a user namespace: No space left on device" in done.stdout, done.stderr


def make(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ if path is None else {**os.environ, "PATH": path}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=checkout_dir(), env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_make_alone_lists_the_targets():
    done = make()
    assert done.returncode == 0
    for target in ("setup", "trainers", "demo", "test", "check", "e2e", "apptainer", "doctor", "clean"):
        assert f"make {target} " in done.stdout


def test_no_new_enough_python_is_said_clearly():
    done = make("PYTHON=", "setup-dev")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "apt-get install" in done.stderr


@pytest.mark.parametrize(
    ("failing", "code", "ran"), [("none", 0, "test e2e"), ("test", 2, "test"), ("e2e", 2, "test e2e")]
)
def test_ci_stops_at_the_first_stage_that_fails(tmp_path, failing, code, ran):
    fake = tmp_path / "make"
    fake.write_text(f'#!/bin/sh\necho "$1" >>{tmp_path}/ran\n[ "$1" != {failing} ] || exit 2\n')
    fake.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CI": "true"}
    done = subprocess.run([checkout_dir() / ".ci/run"], env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == code
    targets = (tmp_path / "ran").read_text().split()
    assert [target for target in targets if not target.endswith("-if-possible")] == ran.split()
    assert targets[0] == "apptainer-if-possible"
    assert "======== make test" in done.stdout


def test_apptainer_where_it_cannot_be_installed_is_a_warning_for_tests_and_an_error_for_people(tmp_path):
    """A PATH without apptainer, apt and sudo."""
    for name in ("bash", "id", "mktemp", "chmod", "rm", "env"):
        found = shutil.which(name)
        assert found
        (tmp_path / name).symlink_to(found)
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PRORL_CACHE_DIR": str(tmp_path / "cache")}
    script = checkout_dir() / "launch/prorl_launch/apptainer.sh"
    tests = subprocess.run([script, "--if-possible"], env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert tests.returncode == 0
    assert "SKIPPED" in tests.stderr
    people = subprocess.run([script], env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert people.returncode == 1
    assert "ERROR" in people.stderr
    assert not (tmp_path / "cache").exists()


def test_chromium_where_it_cannot_be_installed_is_a_warning_for_tests_and_an_error_for_people(tmp_path):
    """A PATH without a browser and apt."""
    for name in ("bash", "env", "id"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    script = checkout_dir() / "launch/prorl_launch/chromium.sh"
    for option, code, word in (("--if-possible", 0, "SKIPPED"), ("", 1, "ERROR")):
        done = subprocess.run(
            [script, option],
            env={"PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert (done.returncode, word in done.stderr) == (code, True)


def test_a_cache_folder_that_cannot_be_made_is_told_without_a_traceback(tmp_path):
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    done = subprocess.run(
        [sys.executable, "-m", "prorl_launch.setup", "engine"],
        cwd=checkout_dir(),
        env={**os.environ, "PRORL_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert f"{tmp_path}/file" in done.stdout
    assert f"the cache folder is {cache} (PRORL_CACHE_DIR)" in done.stdout
    assert "Traceback" not in done.stderr
