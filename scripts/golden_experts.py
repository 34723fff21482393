"""Golden checkpoints: mixtures of experts."""

from __future__ import annotations

from golden_case import Case

CASES: tuple[Case, ...] = ()
