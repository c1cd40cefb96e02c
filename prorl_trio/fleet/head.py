"""The head of a fleet: a node for its sessions and edges, whose jobs run on the fleet's nodes."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec
import trio

from ipc.session import Accepted, OutcomeFrame
from prorl_trio.fleet.checks import JobChecks
from prorl_trio.fleet.dispatch import Dispatch
from prorl_trio.fleet.events import (
    Acknowledge,
    Answered,
    Begin,
    Begun,
    Cancel,
    CancelThere,
    Deliver,
    End,
    Ended,
    Forget,
    Joined,
    Lost,
    Policy,
    Progress,
    Recovered,
    Restored,
    Room,
    Settled,
    Submit,
    Taken,
    Waited,
    Withdraw,
    Withdrawn,
)
from prorl_trio.fleet.events import (
    Submit as SubmitEffect,
)
from prorl_trio.fleet.statistics import merge_statistics
from prorl_trio.pipeline.admission import Admission, Load
from prorl_trio.pipeline.observer import JobView, Observers
from prorl_trio.sessions.node_api import Room as NodeRoom
from prorl_trio.types.errors import AdmissionRejected, Draining, DuplicateJob, ServiceError, UnknownJob
from prorl_trio.types.models import EncodedOutcome, Outcome, Timing
