"""Golden checkpoints: multi-head latent attention."""

from __future__ import annotations

from golden_case import Case

CASES: tuple[Case, ...] = ()
