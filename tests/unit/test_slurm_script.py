"""The batch script of a fleet: valid, with ours before the user's options, and nothing that a shell would misread."""

from __future__ import annotations

import os
import subprocess

import pytest

from prorl_launch.slurm.script import EnginePlan, FleetPlan, batch_script, sbatch_lines


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


def test_the_head_gets_its_own_settings_where_there_are_some():
    words = "slurm head --fleet=/shared/fleet --config=/shared/node.toml"
    assert f"{words} &" in batch_script(plan())
    assert f"{words} --head-config=/shared/head.toml &" in batch_script(plan(head_file="/shared/head.toml"))


def test_a_machine_that_fails_takes_no_other_with_it():
    script = batch_script(plan())
    assert "--kill-on-bad-exit=0 --no-kill --wait=0" in script
    assert "#SBATCH --no-kill" in script


def test_a_warning_makes_the_file_that_drains_the_nodes_and_a_second_changes_nothing(tmp_path):
    """Run the head of the script."""
    script = batch_script(plan(fleet_dir=str(tmp_path), drain_s=40))
    assert "#SBATCH --signal=B:TERM@40" in script
    assert "--drain-s=40" in script.partition("slurm node ")[2]
    assert '--drain-file="$drain"' in script
    (tmp_path / "slurm").mkdir()
    head, _, _ = script.partition("# The head of the fleet")
    told = f"{head}\nkill -TERM $$; kill -TERM $$; echo ${{SQUEUE_PARTITION-unset}} ${{SCANCEL_STATE-unset}}"
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SQUEUE_PARTITION": "gpu", "SCANCEL_STATE": "PENDING"}
    done = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True, env={**os.environ, **env})
    assert (done.stdout, done.stderr) == ("unset unset\n", "")
    assert [path.name for path in (tmp_path / "slurm").iterdir()] == ["drain-7-2"]


def test_an_export_of_sbatchs_keeps_nothing_from_the_tasks():
    for engine in (None, EnginePlan(command="serve"), EnginePlan(command="serve", machines=2)):
        script = batch_script(plan(engine=engine, sbatch=["--export=NONE"]))
        assert script.count(" --export=ALL ") == script.count("\n    srun ") == (3 if engine else 2)


def test_a_percent_sign_in_the_folders_name_is_none_of_sbatchs_patterns():
    assert "#SBATCH --output=/shared/50%%j/slurm/%j.log" in batch_script(plan(fleet_dir="/shared/50%j"))


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
    assert script.rindex("slurm run --ignore-term") < script.index("slurm node"), "engines and the head outlive a drain"
    assert script.count("--ignore-term") == 2
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


CPUS = {
    "of the job": ({}, {"SLURM_CPUS_PER_TASK": "16"}, ["16", "16"]),
    "not asked for, and left over from elsewhere": ({}, {"SRUN_CPUS_PER_TASK": "3"}, ["", ""]),
    "of the second group, told by Slurm": (
        {"machines": 2},
        {"SLURM_CPUS_PER_TASK": "16", "SLURM_CPUS_PER_TASK_HET_GROUP_1": "8"},
        ["8", "16"],
    ),
    "of the second group, told by its option": (
        {"machines": 2, "sbatch": ["--gres=gpu:8", "-c", "4"]},
        {"SLURM_CPUS_PER_TASK": "16"},
        ["4", "16"],
    ),
    "of the first group alone": ({"machines": 2}, {"SLURM_CPUS_PER_TASK": "16"}, ["", "16"]),
}


@pytest.mark.parametrize("name", CPUS)
def test_steps_have_the_cpus_that_the_job_has_for_a_task(tmp_path, name):
    """Run the script with programs in place of its own that print what srun would take."""
    engine, told, wanted = CPUS[name]
    program = tmp_path / "prorl-trio"
    # The nodes' end ends the rest: they end when all have said what they would take.
    program.write_text(
        '#!/bin/sh\n[ "$2" = pulse ] || exit 0\n'
        f'echo "$3 ${{SRUN_CPUS_PER_TASK-}}"; : >{tmp_path}/told$3; [ "$3" = --name=nodes ] || exit 0\n'
        f"until [ -e {tmp_path}/told--name=engines ] && [ -e {tmp_path}/told--name=head ]; do sleep 0.01; done\n"
    )
    for name in ("scontrol", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    script = batch_script(
        plan(
            program=str(program),
            fleet_dir=str(tmp_path / "fleet"),
            sbatch=["--cpus-per-task=16"],
            engine=EnginePlan(command="vllm serve /m", **engine),
        )
    )
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **told}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=env)
    engines, nodes = wanted
    steps = [f"--name=engines {engines}", f"--name=head {nodes}", f"--name=nodes {nodes}"]
    assert sorted(done.stdout.splitlines()) == steps


@pytest.mark.parametrize(
    "options", [["-c8"], ["-c", "8"], ["--cpus-per-task=8"], ["--cpus-per-task", "8"], ["--cpus-per-t=8", "-N2"]]
)
def test_each_form_of_the_option_is_read(options):
    script = batch_script(plan(engine=EnginePlan(command="x", machines=1, sbatch=options)))
    assert "cpus=${SLURM_CPUS_PER_TASK_HET_GROUP_1:-8}" in script
