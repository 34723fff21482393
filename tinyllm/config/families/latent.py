"""Multi-head latent attention. No mlx."""

from __future__ import annotations

from tinyllm.config.family import Family

ROWS: tuple[Family, ...] = ()
