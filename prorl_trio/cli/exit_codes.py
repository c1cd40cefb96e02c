"""Exit codes other than 0, 1 (an error of the user or the machine) and click's 2 (wrong usage)."""

from __future__ import annotations

from typing import Final

EXIT_JOBS_CUT: Final = 3
EXIT_INTERNAL: Final = 70
"""EX_SOFTWARE of sysexits.h."""
EXIT_INTERRUPTED: Final = 130
