"""An outcome that arrived damaged ends its client with one of our errors, whatever the damage is."""

from __future__ import annotations

import msgspec
import pytest

from prorl_ipc.session import OutcomeFrame, OutcomeRefFrame
from prorl_trio.client.client import RolloutClient
from prorl_trio.client.state import ClientState
from prorl_trio.types.errors import ProtocolError

NOT_UTF8 = b"\x81\xa6job_id\xa2\xf4\x28"
TOO_DEEP = b"\x81\xa7details" + b"\x81\xa1x" * 100_000


@pytest.mark.parametrize("damaged", [b"\xc1", NOT_UTF8, TOO_DEEP, b"\xc0"])
@pytest.mark.parametrize("by_reference", [False, True])
async def test_whatever_the_damage_is(damaged: bytes, by_reference: bool, nursery):
    state = ClientState("s", 0)
    client = RolloutClient(state, 1_000_000, nursery)
    raw = msgspec.Raw(damaged)
    frame = OutcomeFrame(1, "job-1", raw) if not by_reference else OutcomeRefFrame(1, "job-1", raw, [])
    state.take(frame)
    with pytest.raises(ProtocolError, match="outcome 1 of job 'job-1' cannot be read"):
        client.peek_after(0)
