"""Golden checkpoints: layers with a recurrent state."""

from __future__ import annotations

from golden_case import Case

CASES: tuple[Case, ...] = ()
