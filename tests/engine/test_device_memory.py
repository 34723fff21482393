"""How much memory a device has for a model, and the limits that MLX is given, by the figures of real devices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from tinyllm import hardware
from tinyllm._mx import mx
from tinyllm.checkpoint.contents import read_contents
from tinyllm.config.config import Config
from tinyllm.engine import device_memory, load
from tinyllm.engine.device_memory import DeviceMemory, MemoryLimits, cache_limit, wired_limit
from tinyllm.engine.engine import Engine
from tinyllm.engine.load import EngineSettings, load_engine
from tinyllm.engine.plan import MemoryPlan, make_plan
from tinyllm.engine.request import Request
from tinyllm.errors import DoesNotFitError
from tinyllm.model.load import OpenedModel, load_model, open_model

GIB = 2**30
# What `mx.device_info` gives: on Metal the memory and the working set that the system recommends (2/3 of 8 GiB,
# 115,448 MB of 128 GiB), on CUDA what the driver says is free.
M1 = {"memory_size": 8 * GIB, "max_recommended_working_set_size": 5_726_623_061}
M4_MAX = {
    "device_name": "Apple M4 Max",
    "memory_size": 128 * GIB,
    "max_recommended_working_set_size": 115_448_725_504,
}
H200 = {"total_memory": 143_771 * 2**20, "free_memory": 143_160 * 2**20}

LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SMALL = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
WEIGHTS_8B_4BIT, WEIGHTS_8B, WEIGHTS_70B = 4_517_000_000, 16_060_522_496, 141_107_412_992
WEIGHTS_1B_4BIT = 695_000_000


def memory(info: dict[str, Any], *, active: int = 0, cached: int = 0, host: int = 1) -> DeviceMemory:
    return DeviceMemory.of_gpu(info, active=active, cached=cached, host=host)


def plan(shape: dict[str, Any], weights: int, available: int, **asked: Any) -> MemoryPlan:
    config = Config.from_dict(tiny.config(**shape))
    return make_plan(config, weight_bytes=weights, itemsize=2, available_bytes=available, on_gpu=True, **asked)


@pytest.mark.parametrize(
    ("info", "available", "wirable"),
    [
        (M1, 5_726_623_061, 5_726_623_061),
        (M4_MAX, 115_448_725_504, 115_448_725_504),
        (H200, 143_160 * 2**20, 0),
    ],
    ids=["M1", "M4 Max", "H200"],
)
def test_a_gpu_s_memory_is_its_own_figure_and_not_what_the_host_has_free(
    info: dict[str, Any], available: int, wirable: int
) -> None:
    for host in (1, 2**50):
        assert memory(info, host=host) == DeviceMemory(available, wirable)


def test_what_this_process_holds_is_not_available_again_but_what_it_caches_is() -> None:
    assert memory(M1, active=GIB, cached=GIB).available == M1["max_recommended_working_set_size"] - GIB
    assert memory(M1, active=8 * GIB).available == 0
    assert memory(H200, active=GIB, cached=2 * GIB).available == H200["free_memory"] + 2 * GIB


def test_a_gpu_that_tells_neither_figure_has_the_host_s_memory() -> None:
    assert memory({"device_name": "?"}, host=GIB) == DeviceMemory(GIB, 0)


def test_an_8_gb_mac_runs_4_bits_of_8_billion_parameters_whatever_else_is_open_and_a_larger_one_is_refused() -> None:
    available = memory(M1, host=2 * GIB).available
    made = plan(LLAMA_8B, WEIGHTS_8B_4BIT, available)
    assert 257 <= made.context < 131_072
    with pytest.raises(DoesNotFitError, match=r"5\.3 GiB are free"):
        plan(LLAMA_8B, WEIGHTS_8B, available)


def test_large_devices_run_what_their_memory_holds() -> None:
    assert plan(LLAMA_8B, WEIGHTS_8B, memory(M4_MAX).available).context == 131_072
    assert plan(LLAMA_70B, WEIGHTS_70B, memory(H200).available).context > 4096
    with pytest.raises(DoesNotFitError):
        plan(LLAMA_70B, WEIGHTS_70B, memory(M4_MAX).available)


def test_memory_is_wired_only_if_the_model_needs_over_half_of_what_can_be() -> None:
    wirable = M1["max_recommended_working_set_size"]
    small = plan(SMALL, WEIGHTS_1B_4BIT, wirable, max_context=1024)
    large = plan(LLAMA_8B, WEIGHTS_8B_4BIT, wirable, max_context=1024)
    assert wired_limit([small], wirable) == 0
    assert wired_limit([large], wirable) == large.wired_bytes <= wirable
    half = replace(small, weight_bytes=wirable // 2 - small.workspace_bytes)
    assert wired_limit([half], wirable) == 0
    assert wired_limit([replace(half, weight_bytes=half.weight_bytes + 1)], wirable) > 0
    assert wired_limit([half, half], wirable) == wirable  # all of them together, and never more than that
    assert wired_limit([], wirable) == 0


def test_the_cache_may_keep_what_steps_make_and_free_again() -> None:
    made = plan(SMALL, WEIGHTS_1B_4BIT, 8 * GIB)
    assert cache_limit([made]) == made.workspace_bytes
    assert cache_limit([made, made]) == 2 * made.workspace_bytes


UNSET = {"cache": 10**15, "memory": 10**15, "wired": 0}


class Gpu:
    """Stands for a GPU: arrays are computed on the CPU, and what sets limits or frees memory is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, info: dict[str, Any]) -> None:
        self.calls: list[tuple[str, int]] = []
        self.limits = dict(UNSET)
        monkeypatch.setattr(device_memory, "on_cpu", lambda: False)
        monkeypatch.setattr(mx, "device_info", lambda: info)
        monkeypatch.setattr(mx, "get_active_memory", lambda: 0)  # of what earlier tests hold
        monkeypatch.setattr(device_memory, "LIMITS", limits := MemoryLimits())
        monkeypatch.setattr(load, "LIMITS", limits)
        for name in self.limits:
            monkeypatch.setattr(mx, f"set_{name}_limit", self._setter(name))
        for name in ("synchronize", "clear_cache"):
            monkeypatch.setattr(mx, name, lambda name=name: self.calls.append((name, 0)))

    def _setter(self, name: str) -> Callable[[int], int]:
        def set_limit(limit: int) -> int:
            before, self.limits[name] = self.limits[name], limit
            self.calls.append((name, limit))
            return before

        return set_limit


@pytest.fixture
def needs_half(tiny_checkpoint: Path) -> dict[str, Any]:
    """A Mac of which the tiny model needs more than half."""
    made = load.plan_memory(open_model(read_contents(tiny_checkpoint)), ASKED, name="the model")
    return {"max_recommended_working_set_size": int(1.9 * (made.weight_bytes + made.workspace_bytes))}


ASKED = EngineSettings(max_context=64, batch=1, kv_budget=2**17, compiled=False)


def test_limits_are_set_before_weights_are_read_and_go_back_when_the_engine_is_closed(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, needs_half: dict[str, Any]
) -> None:
    gpu = Gpu(monkeypatch, needs_half)
    read = OpenedModel.load

    def noted(opened: OpenedModel) -> Any:
        gpu.calls.append(("read", 0))
        return read(opened)

    monkeypatch.setattr(OpenedModel, "load", noted)
    engine = load_engine(read_contents(tiny_checkpoint), ASKED)
    assert engine.plan is not None
    recommended = needs_half["max_recommended_working_set_size"]
    wired = wired_limit([engine.plan], recommended)
    assert wired > 0
    set_limits = [("cache", engine.plan.workspace_bytes), ("memory", recommended), ("wired", wired)]
    assert gpu.calls[:4] == [*set_limits, ("read", 0)]
    assert ("clear_cache", 0) in gpu.calls[4:]  # what reading leaves
    gpu.calls.clear()
    engine.close()
    engine.close()
    assert gpu.calls == [("synchronize", 0), *UNSET.items()]


def test_engines_are_counted_together_and_the_last_one_restores_the_limits(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, needs_half: dict[str, Any]
) -> None:
    gpu, contents = Gpu(monkeypatch, needs_half), read_contents(tiny_checkpoint)
    first, second = (load_engine(contents, ASKED) for _ in range(2))
    plans = [engine.plan for engine in (first, second) if engine.plan is not None]
    assert gpu.limits["cache"] == sum(each.workspace_bytes for each in plans)
    first.close()
    assert gpu.limits["cache"] == plans[1].workspace_bytes
    del second
    gc.collect()
    assert gpu.limits == UNSET


def test_an_engine_that_cannot_be_loaded_leaves_no_limit(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch, M1)
    monkeypatch.setattr(OpenedModel, "load", lambda opened: (_ for _ in ()).throw(MemoryError("injected")))
    with pytest.raises(MemoryError):
        load_engine(read_contents(tiny_checkpoint), ASKED)
    assert gpu.limits == UNSET


def test_memory_is_not_wired_where_that_was_not_asked_for_nor_on_cuda(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, needs_half: dict[str, Any]
) -> None:
    for info, settings in ((needs_half, replace(ASKED, wired=False)), (H200, ASKED)):
        gpu = Gpu(monkeypatch, info)
        engine = load_engine(read_contents(tiny_checkpoint), settings)
        assert gpu.limits["wired"] == 0
        assert (gpu.limits["memory"] == UNSET["memory"]) is (info is H200)
        engine.close()


def test_on_a_cpu_no_limit_is_set_though_the_machine_has_metal(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch, M1)
    monkeypatch.setattr(device_memory, "on_cpu", lambda: True)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    engine = load_engine(read_contents(tiny_checkpoint), ASKED)
    engine.close()
    assert not [call for call in gpu.calls if call[0] in gpu.limits]
    monkeypatch.setattr(hardware, "available_memory", lambda: 12345)
    assert device_memory.device_memory() == DeviceMemory(12345)


def test_what_pools_were_copied_from_does_not_stay_in_the_cache(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(load_model(tiny_checkpoint), page_size=16, compiled=False)
    engine.run([Request((5,) * 20, 2)])
    gpu = Gpu(monkeypatch, M1)
    engine.run([Request((6,) * 200, 2)])
    assert gpu.calls == [("clear_cache", 0)] * len(engine.pools.pools[0].flat)
