"""From a folder to a model that can be called."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tinyllm._mx import mx
from tinyllm.checkpoint.summary import expands_on_cpu
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import ModelFeatures


def load_model(
    path: str | Path, features: ModelFeatures | None = None, *, dtype: mx.Dtype | None = None
) -> ModelForCausalLM:
    """Load the checkpoint in a folder onto the default device.

    `dtype` is what the network computes in; by default the stored one on a GPU and float32 on a CPU, where half
    precision is both slow and rough. Raises ConfigError and CheckpointError before any weight is read.
    """
    config = Config.from_json_file(path)
    store = WeightStore.from_path(path, config)
    dtype = dtype or default_dtype(store)
    store = store.cast(dtype, expand=_expands(store, config))
    model = ModelForCausalLM(config, store, _chosen(features or ModelFeatures(), dtype))
    mx.clear_cache()  # what casting and joining left behind
    return model


def default_dtype(store: WeightStore) -> mx.Dtype:
    """Return the dtype to compute in on the default device."""
    return mx.float32 if on_cpu() else store.stored_dtype


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return bool(mx.default_device() == mx.Device(mx.DeviceType.cpu))


def _chosen(features: ModelFeatures, dtype: mx.Dtype) -> ModelFeatures:
    """Decide what `features` leave open: MLX's exponential is slow on a CPU under Linux only."""
    if features.polynomial_exp is not None:
        return features
    return replace(features, polynomial_exp=on_cpu() and sys.platform == "linux" and dtype == mx.float32)


def _expands(store: WeightStore, config: Config) -> bool:
    """Packed products are slower than dense ones on a CPU: unpack where that takes less than half of the memory."""
    return store.is_quantized and on_cpu() and expands_on_cpu(config)
