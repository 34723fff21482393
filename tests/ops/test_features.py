"""Which kernels are chosen, and for what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tinyllm.ops.features import ModelFeatures

OPEN = ("fused_activation", "rope_tables", "polynomial_exp", "paged_products", "packed_attention")


def test_the_reference_runs_no_fast_path() -> None:
    assert not any(vars(ModelFeatures.reference()).values())
    assert all(chosen is not False for chosen in vars(ModelFeatures()).values())


@pytest.mark.parametrize(
    ("platform", "on_cpu", "float32", "expected"),
    [
        ("linux", True, True, (False, True, True, True, 4)),
        ("linux", True, False, (False, False, False, False, 4)),
        ("darwin", True, True, (False, False, False, False, 4)),
        ("darwin", False, True, (True, False, False, False, 32)),
        ("linux", False, False, (True, False, False, False, 32)),
    ],
)
def test_what_is_left_open_is_settled_by_the_device(
    monkeypatch: pytest.MonkeyPatch, platform: str, on_cpu: bool, float32: bool, expected: tuple[int, ...]
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    settled = ModelFeatures().settled(on_cpu=on_cpu, float32=float32)
    assert settled == replace(ModelFeatures(), **dict(zip(OPEN, expected, strict=True)))


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("said", [True, False])
def test_what_is_said_stays(on_cpu: bool, said: bool) -> None:
    features = replace(ModelFeatures(), **dict.fromkeys(OPEN, said))
    assert features.settled(on_cpu=on_cpu, float32=True) == features
