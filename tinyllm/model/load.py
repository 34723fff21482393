"""From a folder to a model that can be called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinyllm._mx import mx
from tinyllm.checkpoint.contents import Contents, read_contents
from tinyllm.checkpoint.summary import expands_on_cpu
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.config.config import Config
from tinyllm.errors import CorruptFileError
from tinyllm.malloc import keep_freed_memory
from tinyllm.model.transformer import ModelForCausalLM
from tinyllm.ops.features import ModelFeatures


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint whose headers are checked and whose form is decided; no weight is read yet."""

    config: Config
    weights: WeightStore
    features: ModelFeatures
    dtype: mx.Dtype

    def load(self) -> ModelForCausalLM:
        """Read the weights. Raises CorruptFileError if a file has changed since its header was checked."""
        if on_cpu():
            keep_freed_memory()
        try:
            model = ModelForCausalLM(self.config, self.weights, self.features)
        except (RuntimeError, ValueError, OSError) as error:  # MLX's, and mmap's
            raise CorruptFileError(
                f"the weights cannot be read ({error}): was a file changed while it was loaded? Try again"
            ) from error
        mx.clear_cache()  # what casting and joining left behind
        return model


def load_model(
    path: str | Path, features: ModelFeatures | None = None, *, dtype: mx.Dtype | None = None
) -> ModelForCausalLM:
    """Load a folder's checkpoint, or a GGUF file, onto the default device; see `read_contents` and `open_model`."""
    return open_model(read_contents(path), features, dtype=dtype).load()


def open_model(
    contents: Contents,
    features: ModelFeatures | None = None,
    *,
    dtype: mx.Dtype | None = None,
    for_cpu: bool | None = None,
) -> OpenedModel:
    """Check a checkpoint and decide its form, for a CPU or a GPU, by default this device.

    `dtype` is the type to compute in; by default `default_dtype`. Raises CheckpointError.
    """
    store = WeightStore.of(contents)
    config = store.config
    for_cpu = on_cpu() if for_cpu is None else for_cpu
    dtype = dtype or default_dtype(store, for_cpu=for_cpu)
    # Packed products are slower than dense ones on a CPU: unpack where that takes less than half of the memory.
    store = store.cast(dtype, expand=for_cpu and store.is_quantized and expands_on_cpu(config))
    features = (features or ModelFeatures()).settled(on_cpu=for_cpu, float32=dtype == mx.float32)
    return OpenedModel(config, store, features, dtype)


def default_dtype(store: WeightStore, *, for_cpu: bool | None = None) -> mx.Dtype:
    """Return the dtype to compute in on a CPU or a GPU, by default this device.

    On a CPU it is float32, since half precision is slow and rough there. On a GPU it is the stored one, but bfloat16
    for float16, whose largest number, 65,504, is less than activations of Gemma and other models reach.
    """
    if on_cpu() if for_cpu is None else for_cpu:
        return mx.float32
    return mx.bfloat16 if store.stored_dtype == mx.float16 else store.stored_dtype


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return bool(mx.default_device() == mx.Device(mx.DeviceType.cpu))
