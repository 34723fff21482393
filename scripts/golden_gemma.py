"""Golden checkpoints: Gemma's relatives, and others with Gemma's ways."""

from __future__ import annotations

from golden_case import Case

CASES: tuple[Case, ...] = ()
