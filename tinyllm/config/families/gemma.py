"""Gemma's relatives, and others with Gemma's ways. No mlx."""

from __future__ import annotations

from tinyllm.config.family import Family

ROWS: tuple[Family, ...] = ()
