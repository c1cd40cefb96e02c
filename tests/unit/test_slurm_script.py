"""The batch script of a fleet: valid, with ours before the user's options, and nothing that a shell would misread."""

from __future__ import annotations

import subprocess

import pytest

from launch.slurm.script import EnginePlan, FleetPlan, batch_script, sbatch_lines


def plan(**changes):
    fields = {
        "nodes": 4,
        "fleet_dir": "/shared/fleet",
        "config_file": "/shared/node.toml",
        "program": "/opt/prorl-trio",
    }
    return FleetPlan(**{**fields, **changes})


@pytest.mark.parametrize("name", ["plain", "with space", "quo'te", "$(touch x)"])
def test_bash_reads_it_whatever_the_names_are(name):
    script = batch_script(
        plan(fleet_dir=f"/shared/{name}", program=f"/opt/{name}/prorl-trio", local_dir=f"/tmp/{name}")
    )
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    words = f'set -- {script.partition("slurm node ")[2].partition(" &")[0]}; printf "%s\\n" "$1"'
    told = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True).stdout
    assert told == f"--fleet=/shared/{name}\n"


def test_options_of_the_user_come_last_so_that_they_overrule_ours():
    lines = batch_script(plan(sbatch=["--no-requeue", "-p", "gpu", "--comment", "two words"])).splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert options[-3:] == ["#SBATCH --no-requeue", "#SBATCH -p gpu", "#SBATCH --comment 'two words'"]
    assert options.index("#SBATCH --requeue") < options.index("#SBATCH --no-requeue")
    assert lines[0] == "#!/bin/bash"
    assert lines[1 : 1 + len(options)] == options, "sbatch reads none after the first command"


def test_a_machine_that_fails_takes_no_other_with_it():
    script = batch_script(plan())
    assert "--kill-on-bad-exit=0 --no-kill --wait=0" in script
    assert "#SBATCH --no-kill" in script


def test_the_first_warning_is_passed_on_and_a_second_cuts_no_drain_short(tmp_path):
    """Run the script with commands of Slurm's that only write down that they were called."""
    script = batch_script(plan(fleet_dir=str(tmp_path), drain_s=40))
    assert "#SBATCH --signal=B:TERM@40" in script
    assert "--drain-s=40" in script.partition("slurm node ")[2]
    trap = next(line for line in script.splitlines() if line.startswith("trap "))
    told = f'scancel() {{ echo "$@"; }}; SLURM_JOB_ID=7; {trap}; kill -TERM $$; kill -TERM $$; echo on'
    done = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "--signal=TERM 7\non\n"


def test_a_value_stays_with_its_option():
    assert sbatch_lines(["--time=1:00", "-A", "me", "--exclusive"]) == [
        "#SBATCH --time=1:00",
        "#SBATCH -A me",
        "#SBATCH --exclusive",
    ]


def test_engines_beside_the_nodes_are_a_step_of_the_same_machines():
    script = batch_script(plan(engine=EnginePlan(command="vllm serve 'a b'", port=9000)))
    assert "hetjob" not in script
    assert "het-group" not in script
    assert script.index("slurm run --ignore-term") < script.index("slurm node"), "only engines outlive a drain"
    assert script.count("--ignore-term") == 1
    assert '--engines="$engine_machines" --machines="$node_machines" --engine-ports="$ports"' in script
    assert 'slurm engine --folder="$ports" --port=9000 --' in script
    assert script.index('mkdir -p -m 700 "$ports"') < script.index("slurm engine") < script.index('rm -rf "$ports"')
    words = f'set -- {script.partition("bash -c ")[2].partition(" &")[0]}; printf "%s\\n" "$1"'
    assert subprocess.run(["bash", "-c", words], capture_output=True, text=True).stdout == "vllm serve 'a b'\n"


def test_engines_on_machines_of_their_own_are_a_group_with_options_of_its_own():
    engine = EnginePlan(command="serve", machines=2, sbatch=["--gres=gpu:8"])
    script = batch_script(plan(sbatch=["--mem=8G"], engine=engine))
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    groups = options.index("#SBATCH hetjob")
    assert "#SBATCH --mem=8G" in options[:groups]
    assert options[groups:] == [
        "#SBATCH hetjob",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --no-kill",
        "#SBATCH --gres=gpu:8",
    ]
    assert "srun --het-group=1 --nodes=2 --ntasks=2" in script
    assert "srun --het-group=0" in script


def test_without_engines_the_script_does_not_speak_of_them():
    assert "engine" not in batch_script(plan())
