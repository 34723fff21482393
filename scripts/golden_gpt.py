"""Golden checkpoints: the families that came before Llama."""

from __future__ import annotations

from golden_case import Case

CASES: tuple[Case, ...] = ()
