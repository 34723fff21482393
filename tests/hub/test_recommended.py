"""The table of models to recommend: every row runs here, fits the memory that it is for, and has the size it says."""

from __future__ import annotations

import pytest

from tinyllm.config.config import Config
from tinyllm.config.tensors import tensor_shapes
from tinyllm.hub.recommended import RECOMMENDED, Recommended, recommend

GIB = 2**30


def test_every_machine_is_recommended_what_it_can_hold() -> None:
    assert recommend(0) == RECOMMENDED[-1] and recommend(512 * GIB) == RECOMMENDED[0]
    assert recommend(int(15.5 * GIB)) == recommend(16 * GIB) == recommend(18 * GIB)  # the system keeps a little
    assert recommend(24 * GIB, on_cpu=True) == recommend(6 * GIB)
    assert all(row.gigabytes * 10**9 < 0.45 * row.memory_gib * GIB for row in RECOMMENDED if row.memory_gib)


# hidden, intermediate, layers, heads, key/value heads, tied: from the config.json of each
QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
}


@pytest.mark.parametrize("row", RECOMMENDED, ids=lambda row: row.repo)
def test_a_recommended_model_runs_here_and_its_size_is_that_of_its_tensors(row: Recommended) -> None:
    hidden, intermediate, layers, heads, kv_heads, tied = QWEN3[row.repo.split("-")[2]]
    config = Config.from_dict(
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "tie_word_embeddings": tied,
            "quantization": {"group_size": 64, "bits": 4},
        }
    )
    matrices = sum(shape[0] * shape[1] for shape in tensor_shapes(config).values() if len(shape) == 2)
    assert round(matrices * (4 + 2 * 16 / 64) / 8 / 1e9, 1) == row.gigabytes
