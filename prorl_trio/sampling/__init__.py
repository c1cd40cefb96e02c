"""Dynamic sampling of groups (DAPO): the rollouts to submit, the groups to train on, and the fate of each rollout."""

from __future__ import annotations

from prorl_trio.sampling.batch import Batch, BatchStatistics, Group, ManifestLine
from prorl_trio.sampling.blocking import BlockingGroups
from prorl_trio.sampling.groups import Groups
from prorl_trio.sampling.journal import read_session_id
from prorl_trio.sampling.opening import open_groups, reached_one
from prorl_trio.sampling.rules import GroupRules, JobTemplate
from prorl_trio.sampling.sampler import NothingToLearn, RolloutsFail

__all__ = [
    "Batch",
    "BatchStatistics",
    "BlockingGroups",
    "Group",
    "GroupRules",
    "Groups",
    "JobTemplate",
    "ManifestLine",
    "NothingToLearn",
    "RolloutsFail",
    "open_groups",
    "reached_one",
    "read_session_id",
]
