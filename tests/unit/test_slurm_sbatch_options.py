"""Options that sbatch would carry out otherwise than a fleet's user has asked for."""

from __future__ import annotations

import pytest

from prorl_launch.slurm.commands import check_options
from prorl_trio.types.errors import ConfigError

OURS = ["--requeue", "--output=/f/%j.log"]


@pytest.mark.parametrize(
    ("groups", "env", "said"),
    [
        ([[*OURS, "--wait"]], {}, "--wait: a fleet runs until it is ended"),
        ([[*OURS, "-W"]], {}, "--wait: a fleet"),
        ([[*OURS, "-HW"]], {}, "--wait: a fleet"),
        ([[*OURS, "--clusters=east"]], {}, "--clusters: the other commands"),
        ([[*OURS, "-M", "east"]], {}, "--clusters: the other commands"),
        ([OURS], {"SBATCH_CLUSTERS": "east"}, "SBATCH_CLUSTERS: the other commands"),
        ([OURS], {"SBATCH_WAIT": "1"}, "SBATCH_WAIT: a fleet"),
        ([OURS, ["-p", "gpu"]], {"SBATCH_PARTITION": "x"}, "SBATCH_PARTITION is set, .* overrule --partition"),
        ([[*OURS, "--time=5"], []], {"SBATCH_TIMELIMIT": "9"}, "SBATCH_TIMELIMIT is set"),
        ([OURS, []], {"SBATCH_NO_REQUEUE": "1"}, "SBATCH_NO_REQUEUE is set"),
        ([OURS, ["-t5"]], {"SBATCH_TIMELIMIT": "9"}, "SBATCH_TIMELIMIT is set"),
    ],
)
def test_what_cannot_be_is_refused(groups, env, said):
    with pytest.raises(ConfigError, match=said):
        check_options(groups, env)


@pytest.mark.parametrize(
    ("groups", "env"),
    [
        ([[*OURS, "-p", "gpu"]], {"SBATCH_PARTITION": "x"}),
        ([OURS, ["-p", "gpu"]], {"SBATCH_ACCOUNT": "me"}),
        ([[*OURS, "--wait-all-nodes=1"]], {}),
        ([[*OURS, "-oWM.log"]], {}),
    ],
)
def test_the_rest_is_for_sbatch_to_judge(groups, env):
    check_options(groups, env)
