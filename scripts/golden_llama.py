"""Golden checkpoints: Llama's relatives."""

from __future__ import annotations

from golden_case import Case

CASES: tuple[Case, ...] = ()
