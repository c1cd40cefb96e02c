"""Nothing is left of a task on the leash, however it ends. Without Slurm: its parent is a shell."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from support.quiet_clock import stretched, wait_until
from support.remains import left_after, marked, segments

TREE = Path(__file__).parents[1] / "support/hostile_tree.py"
LIMIT_S = 10.0
SWEEP = Path(sys.executable).with_name("prorl-trio-sweep")
SWEEP_PATIENCE_S = 4.0
START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 120.0
GRACE_S = 0.8


@pytest.fixture
def place():
    """A folder with the short path that sockets need."""
    folder = Path(tempfile.mkdtemp(prefix="pl-"))
    yield folder
    shutil.rmtree(folder)


class Task:
    """A shell in the place of slurmstepd, with the task below it."""

    def __init__(self, place, *arguments, pulse=None, deaf=False, options=(), grace_s=GRACE_S):
        self.mark = secrets.token_hex(8)
        self.place = place
        self.names = {"SLURM_JOB_ID": secrets.token_hex(4), "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
        self.ready = place / "ready"
        self.pulse_s, self.grace_s = stretched(pulse or 0.0), stretched(grace_s)
        """As long as the machine may need at the start: it may have more to do then than at the end."""
        beats = [f"--pulse-timeout-s={self.pulse_s:.1f}"] if pulse else []
        options = [*options, f"--grace-s={self.grace_s:.1f}", f"--local-dir={place}", *beats]
        program = arguments or (sys.executable, str(TREE), str(self.ready), *(["--deaf"] * deaf))
        run = [sys.executable, "-m", "prorl_trio.cli", "slurm", "run", *options, "--", *program]
        env = {**os.environ, "PRORL_TEST_MARK": self.mark, "TMPDIR": str(place), **self.names}
        # The shell starts it in the background, so that it has a parent which can be killed alone.
        shell = '"$@" <&3 & echo $!; wait $!'
        self.stepd = subprocess.Popen(
            ["bash", "-c", f"exec 3<&0; {shell}", "bash", *run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        self.pid = int(self.stepd.stdout.readline())

    def wait_ready(self):
        wait_until(lambda: self.beat() or self.ready.exists(), "the program has begun", START_TIMEOUT_S)

    def beat(self, line=b"\n"):
        self.stepd.stdin.write(line)
        self.stepd.stdin.flush()

    def signal_all(self, number):
        for line in marked(self.mark):
            os.kill(int(line.split()[0]), number)

    def kill_at_once(self):
        """Kill all its processes as Slurm does by a control group: nobody is left to clear up."""
        pids = [int(line.split()[0]) for line in marked(self.mark)]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none sees another end
            for pid in pids:
                os.kill(pid, number)
        wait_until(lambda: not marked(self.mark), "all are dead", LIMIT_S)

    def sweep(self):
        """Run what Slurm runs after the task; return how long it took."""
        begun = time.monotonic()
        env = {**os.environ, "PRORL_LOCAL_DIR": str(self.place), **self.names}
        subprocess.run([SWEEP], env=env, stdin=subprocess.DEVNULL, check=True, timeout=EXIT_TIMEOUT_S)
        return time.monotonic() - begun

    def end(self):
        """Close our side; return what is left, and how long it took."""
        left = left_after(self.mark, [self.place], LIMIT_S + self.pulse_s + self.grace_s)
        self.stepd.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.stepd.stdin.close()
        self.stepd.wait(timeout=EXIT_TIMEOUT_S)
        return left


@pytest.fixture
def start(place):
    tasks = []

    def begin(*arguments, **options):
        task = Task(place, *arguments, **options)
        tasks.append(task)
        return task

    yield begin
    for task in tasks:
        for pid in [int(line.split()[0]) for line in marked(task.mark)]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("program", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_the_exit_code_is_the_programs(start, program, code):
    task = start("sh", "-c", program)
    assert task.stepd.wait(timeout=EXIT_TIMEOUT_S) == code
    assert task.end()[0] == []


def test_a_program_that_cannot_be_started_is_an_error(start):
    task = start("/no/such/program")
    assert task.stepd.wait(timeout=EXIT_TIMEOUT_S) != 0
    assert task.end()[0] == []


def kill_task(task):
    os.kill(task.pid, signal.SIGKILL)


def kill_stepd(task):
    task.stepd.kill()


def kill_both(task):
    task.stepd.kill()
    os.kill(task.pid, signal.SIGKILL)


def terminate(task):
    os.kill(task.pid, signal.SIGTERM)


def stop_pulse(task):
    task.beat()


def end_pulse(task):
    task.stepd.stdin.close()


def terminate_and_kill(task):
    """End it like scancel: SIGTERM asks for a drain, and SIGKILL comes when that takes too long."""
    terminate(task)
    time.sleep(0.2)
    kill_task(task)


@pytest.mark.parametrize("end", [kill_task, kill_stepd, terminate, stop_pulse, end_pulse])
def test_nothing_is_left_however_the_task_ends(start, end):
    task = start(pulse=3 if end is stop_pulse else 60)
    task.wait_ready()
    assert len(marked(task.mark)) >= 5
    end(task)
    left, took_s = task.end()
    assert left == [], f"after {took_s:.1f} s"
    assert task.ready.read_text() == "drained", "SIGTERM came before SIGKILL"


def test_what_others_need_while_they_drain_ends_with_the_pulse_and_not_by_sigterm(start):
    task = start(pulse=60, options=["--ignore-term"])
    task.wait_ready()
    terminate(task)
    time.sleep(1.0)
    assert task.ready.read_text() == "ready"
    assert len(marked(task.mark)) >= 5
    end_pulse(task)
    assert task.end()[0] == []
    assert task.stepd.returncode == 0, "the signal that was not passed on does not end the task either"


@pytest.mark.parametrize(("options", "told"), [((), "1"), (["--ignore-term"], "0")])
def test_a_pulse_that_says_so_drains_the_task_once(place, start, options, told):
    count = f'n=0; trap "n=\\$((n + 1))" TERM; echo on >{place}/ready; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15'
    task = start("bash", "-c", f"{count}; do sleep 0.2; done; echo $n >{place}/told", pulse=60, options=options)
    task.wait_ready()
    for _ in range(3):
        task.beat(b"n1,n2 drain\n")
        time.sleep(0.3)  # so that they come one by one, as of a pulse
    assert task.stepd.wait(timeout=EXIT_TIMEOUT_S) == 0
    assert (place / "told").read_text().strip() == told
    for name in ("ready", "told"):
        (place / name).unlink()
    assert task.end()[0] == []


def test_time_in_which_slurm_has_suspended_the_job_is_no_time_without_a_pulse(start):
    task = start(pulse=3)
    task.wait_ready()
    task.signal_all(signal.SIGSTOP)
    time.sleep(task.pulse_s + 1.5)  # longer than the task waits for its pulse
    task.signal_all(signal.SIGCONT)
    time.sleep(0.5)  # it goes on before the machine with the pulse does
    task.beat()
    time.sleep(1.5)  # in which a task that had given up would have ended
    assert (task.ready.read_text(), len(marked(task.mark)) >= 5) == ("ready", True)
    assert task.end()[0] == [], "the pulse has stopped"


@pytest.mark.parametrize("end", [kill_both, terminate_and_kill])
def test_nothing_is_left_of_what_is_deaf_to_sigterm(start, end):
    task = start(deaf=True)
    task.wait_ready()
    end(task)
    left, took_s = task.end()
    assert left == [], f"after {took_s:.1f} s"


@pytest.mark.parametrize("by", ["its epilog", "the next task"])
def test_what_a_kill_of_all_processes_at_once_has_left_is_removed(place, start, by):
    dead = start()
    dead.wait_ready()
    dead.ready.unlink()
    living = start()
    living.wait_ready()
    dead.kill_at_once()
    assert (len(segments(dead.mark)), len(list(place.glob("prorl-*/socket")))) == (1, 2)

    if by == "its epilog":
        dead.sweep()
        tasks = [living, dead]
    else:
        following = start("true")
        assert following.stepd.wait(timeout=EXIT_TIMEOUT_S) == 0
        tasks = [living, dead, following]
    assert segments(dead.mark) == []
    assert (len(segments(living.mark)), len(list(place.glob("prorl-*/socket")))) == (1, 1)
    kill_task(living)
    for task in tasks:
        assert task.end()[0] == []


def test_the_epilog_waits_for_the_end_of_what_the_task_ran_and_of_nothing_else(start):
    other = start()
    other.wait_ready()
    other.ready.unlink()
    task = start()
    task.wait_ready()
    kill_task(task)
    if task.sweep() < SWEEP_PATIENCE_S:
        assert segments(task.mark) == []
        assert task.ready.read_text() == "drained"
    assert len(segments(other.mark)) == 1
    kill_task(other)
    for each in (task, other):
        assert each.end()[0] == []


def test_the_epilog_does_not_hold_slurm_up_for_long_and_removes_what_is_left_after_it(start):
    """A supervisor is at work for longer than Slurm waits, which then kills it."""
    task = start(deaf=True, grace_s=60)
    task.wait_ready()
    kill_task(task)
    assert task.sweep() >= SWEEP_PATIENCE_S
    assert len(segments(task.mark)) == 1
    task.kill_at_once()
    assert task.end()[0] == []


def test_two_tasks_of_one_user_in_one_folder_do_not_touch_each_other(place, start):
    one = start()
    one.wait_ready()
    one.ready.unlink()
    other = start()
    other.wait_ready()
    assert len(list(place.glob("prorl-*/socket"))) == 2
    kill_task(one)
    wait_until(lambda: not marked(one.mark), "nothing of the one runs", LIMIT_S)
    wait_until(lambda: len(list(place.glob("prorl-*"))) == 1, "its folder is gone", LIMIT_S)
    assert segments(one.mark) == []
    assert len(marked(other.mark)) >= 5
    assert len(segments(other.mark)) == 1
    assert len(list(place.glob("prorl-*/socket"))) == 1
    kill_task(other)
    for task in (one, other):
        assert task.end()[0] == []
