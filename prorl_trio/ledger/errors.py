"""Refusals and failures of the ledger."""

from __future__ import annotations

from prorl_trio.types.errors import ProrlError

__all__ = ["LedgerCorrupt", "LedgerError", "LedgerFailed", "LedgerFull", "StaleAttempt"]


class LedgerError(ProrlError):
    """Root of the ledger's errors."""


class LedgerFull(LedgerError):
    """Nothing new is taken, and nothing was stored: no space, a limit, or a failed disk; the message says which.

    A service answers `AdmissionRejected`.
    """


class LedgerFailed(LedgerError):
    """The disk failed, or the ledger is closed. Only a new start tells whether what was asked for is stored."""


class LedgerCorrupt(LedgerError):
    """A payload is not what was written. The message names job and file; others are not affected."""


class StaleAttempt(LedgerError):
    """An outcome came from an attempt that is over: the job has an outcome, or a later attempt. Nothing was stored."""
