"""What a plan promises holds: of the bytes that it counts, of the pages that it hands out, of what it advises."""

from __future__ import annotations

import re
from bisect import bisect_left
from fractions import Fraction
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.config.config import Config
from tinyllm.config.reach import Window
from tinyllm.engine.plan import MemoryPlan, make_plan
from tinyllm.engine.plan_text import read_size, table
from tinyllm.errors import ContextLengthError, DoesNotFitError, UsageError
from tinyllm.kv.kinds import LayerKind, StateForm
from tinyllm.kv.manager import PageManager
from tinyllm.kv.pages import PageKind

GIB = 2**30
WEIGHTS = 10 * 2**20
# 2 layers, 2 kv heads of 8, keys and values, float32.
A_TOKEN = 2 * 2 * 8 * 2 * 4
MIXED = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 300, "max_window_layers": 1}


def config(**overrides: Any) -> Config:
    return Config.from_dict(tiny.config(**{"max_position_embeddings": 8192, **overrides}))


def plan(of: Config | None = None, **overrides: Any) -> MemoryPlan:
    given = {"weight_bytes": WEIGHTS, "itemsize": 4, "available_bytes": GIB, **overrides}
    return make_plan(of or config(), **given)


def refusal(of: Config | None = None, **overrides: Any) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        plan(of, **overrides)
    return str(caught.value)


def pages_bytes(made: MemoryPlan) -> int:
    return sum(kind.ceiling_pages * kind.page_bytes for kind in made.kinds)


def test_with_room_for_it_the_context_is_the_models_and_15_percent_are_left() -> None:
    made = plan()
    assert made.context == 8192
    assert made.token_bytes == A_TOKEN
    assert made.sequence_bytes == 8192 * A_TOKEN
    [kind] = made.kinds
    assert kind.kind == LayerKind(kv_heads=2, key_dim=8, value_dim=8, reach=None, layers=2)
    assert kind.page_bytes == 128 * A_TOKEN
    assert 0 <= made.budget_bytes - pages_bytes(made) < kind.page_bytes
    assert 0 <= 0.85 * GIB - made.wired_bytes < 2 * kind.page_bytes
    assert made.sequences == (kind.ceiling_pages - 1) // 64


def test_half_the_bytes_an_element_is_half_the_cache() -> None:
    assert plan(itemsize=2).token_bytes == A_TOKEN // 2


def test_the_context_is_what_the_memory_holds_where_that_is_less() -> None:
    available = WEIGHTS + 40 * 2**20
    made = plan(available_bytes=available)
    assert 257 <= made.context < 8192
    assert made.sequences == 1
    assert plan(available_bytes=available, max_context=made.context).context == made.context


def test_the_headroom_is_given_up_where_a_chunk_of_a_prompt_would_not_fit_otherwise() -> None:
    least = bisect_left(range(2**26), True, key=lambda n: fits(available_bytes=WEIGHTS + n))
    made = plan(available_bytes=WEIGHTS + least)
    assert made.context >= 257
    assert 0.85 * made.available_bytes < made.wired_bytes <= made.available_bytes


def fits(**overrides: Any) -> bool:
    try:
        plan(**overrides)
    except DoesNotFitError:
        return False
    return True


def test_a_model_of_few_positions_needs_no_more_than_those() -> None:
    assert plan(config(max_position_embeddings=16)).context == 16


def test_what_is_asked_for_must_fit_for_each_row_of_a_batch() -> None:
    available = WEIGHTS + 208 * 2**20
    assert plan(available_bytes=available, max_context=8000).sequences >= 1
    message = refusal(available_bytes=available, max_context=8000, batch=8)
    assert message.startswith("the model needs ") and "KV cache 15.8 MiB for 8 sequences of 8,000 tokens" in message
    advised = int(
        re.search(r"and 0.2 GiB are free: a context of ([\d,]+) tokens would fit$", message)[1].replace(",", "")
    )  # type: ignore[index]
    assert plan(available_bytes=available, max_context=advised, batch=8).sequences >= 8
    assert refusal(available_bytes=available, max_context=advised + 1, batch=8)
    assert plan(available_bytes=available, batch=8).sequences == 1


def test_weights_that_do_not_fit_ask_for_another_machine() -> None:
    message = refusal(weight_bytes=40 * GIB, available_bytes=16 * GIB, name="big")
    assert message.startswith("big needs ") and "(weights 40.0 GiB, and " in message
    assert re.search(r"16.0 GiB are free: it takes a machine with [\d.]+ GiB free, or a smaller model$", message)


def test_a_budget_is_a_ceiling_that_shortens_the_context() -> None:
    made = plan(kv_budget=2**19)
    assert made.budget_bytes == 2**19
    assert made.context == (2**19 // made.kinds[0].page_bytes - 1) * 128
    message = refusal(kv_budget=2**19, max_context=8192)
    assert message == (
        "the model needs a KV cache of 2.0 MiB for 8,192 tokens, and its budget is 0.5 MiB:"
        f" a context of {made.context:,} tokens would fit"
    )


def test_a_budget_in_percent_is_of_what_weights_and_workspace_leave() -> None:
    whole, half = (plan(kv_budget=Fraction(share)) for share in (1, 0.5))
    assert abs(half.budget_bytes - whole.budget_bytes / 2) <= 1
    assert 0 <= GIB - whole.wired_bytes < whole.kinds[0].page_bytes


def test_a_budget_beyond_the_memory_is_refused_with_what_is_left() -> None:
    message = refusal(kv_budget=2 * GIB)
    left = re.fullmatch(
        r"the model cannot have a KV budget of 2\.0 GiB: weights 10\.0 MiB \+ workspace .* leave (\d+ MiB), of"
        r" 1\.0 GiB that are free",
        message,
    )
    assert left is not None
    assert plan(kv_budget=read_size("", left[1])).context == 8192


# Fault 51: a context or an answer of a thousand million tokens.
def test_a_context_beyond_the_models_is_refused_and_a_boundless_model_takes_what_there_is() -> None:
    with pytest.raises(ContextLengthError, match=r"can attend to 8,192 tokens: a context of 1,000,000,000 is too"):
        plan(max_context=10**9)
    boundless = config(max_position_embeddings=10**9)
    assert plan(boundless).context < GIB // A_TOKEN
    assert plan(boundless).sequences == 1


@pytest.mark.parametrize("wrong", [{"max_context": 0}, {"max_context": -1}, {"batch": 0}])
def test_counts_below_one_are_usage_errors(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="must be 1 or more"):
        plan(**wrong)


def test_windowed_layers_hold_a_window_and_a_chunk_of_a_long_context() -> None:
    made = plan(config(**MIXED))
    full, windowed = made.kinds
    assert (full.kind.reach, full.kind.layers, full.sequence_pages) == (None, 1, 64)
    assert (windowed.kind.reach, windowed.kind.layers, windowed.sequence_pages) == (
        Window(300),
        1,
        6,
    )  # ceil(556 / 128) + 1
    assert (full.ceiling_pages - 1) / (windowed.ceiling_pages - 1) == pytest.approx(64 / 6, rel=0.01)
    assert made.sequence_bytes == 64 * full.page_bytes + 6 * windowed.page_bytes
    short = plan(config(**MIXED), max_context=200)
    assert [kind.sequence_pages for kind in short.kinds] == [2, 2]


@settings(max_examples=60)
@given(
    window=st.sampled_from([None, 40, 1000]),
    layers=st.integers(1, 6),
    spare=st.integers(0, 2**26),
    page_size=st.sampled_from([32, 128]),
    batch=st.integers(1, 9),
    max_context=st.none() | st.integers(1, 8192),
    kv_budget=st.none() | st.integers(1, 2**26) | st.fractions(0, 1),
    itemsize=st.sampled_from([2, 4]),
)
def test_a_plan_fits_and_its_pages_hold_what_it_promises(window: int | None, layers: int, **asked: Any) -> None:
    overrides = {**MIXED, "sliding_window": window} if window else {}
    model = config(num_hidden_layers=layers, **overrides)
    available = WEIGHTS + asked.pop("spare")
    try:
        made = plan(model, available_bytes=available, **asked)
    except DoesNotFitError:
        return
    assert made.wired_bytes <= available and WEIGHTS + made.load_bytes <= available
    assert pages_bytes(made) <= made.budget_bytes
    sequences = asked["batch"] if asked["max_context"] else 1
    assert made.sequences >= sequences
    if (
        asked["max_context"] is None
        and asked["kv_budget"] is not None
        and asked["batch"] == 1
        and made.context < 8192
    ):
        assert refusal(model, available_bytes=available, **{**asked, "max_context": made.context + 1})
    manager = PageManager(
        [PageKind(kind.kind.reach, kind.ceiling_pages) for kind in made.kinds],
        page_size=made.page_size,
        prefill_chunk=256,
    )
    assert manager.capacity >= made.context
    for _ in range(sequences):
        tables = manager.open([])
        while tables.length < made.context:
            end = min(tables.length + 256, made.context)
            assert manager.reserve(tables, end)
            manager.advance(tables, end)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GB", 2 * 10**9),
        ("512MiB", 2**29),
        ("1.5 gib", 3 * 2**29),
        ("800kb", 800_000),
        (" 12B ", 12),
        ("1TiB", 2**40),
        ("40%", Fraction(2, 5)),
        ("12.5%", Fraction(1, 8)),
        ("100%", Fraction(1)),
    ],
)
def test_sizes_are_read(text: str, expected: int | Fraction) -> None:
    size = read_size("--kv-budget", text)
    assert (size, type(size)) == (expected, type(expected))


@pytest.mark.parametrize(
    "text", ["", "2", "GB", "-2GB", "2 G", "0GB", "0.1B", "0%", "101%", "2GBs", "1e9B", "٢GB", "nan%"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--kv-budget must be a size \(2GB, 512MiB\) or a share up to 100%, not"):
        read_size("--kv-budget", text)


def test_a_plan_is_told_in_a_table() -> None:
    made = plan(config(**MIXED), kv_budget=2**24, max_context=8192)
    assert table(made) == [
        ("weights", "10.0 MiB", "5.4 MiB more while they are read"),
        ("KV cache", "up to 16.0 MiB", "14 sequences of 8,192 tokens, 256 bytes a token"),
        ("  1 layers", "14.6 MiB", "2 heads of 8, which see everything"),
        ("  1 layers", "1.4 MiB", "2 heads of 8, which see the last 300 tokens"),
        ("workspace", "0.2 GiB", "activations, scores and logits"),
        ("left free", "0.8 GiB", "of 1.0 GiB available"),
    ]


HYBRID = {
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
    "rms_norm_eps": ...,
    "hidden_act": ...,
    "tie_word_embeddings": True,
}


def test_states_are_counted_by_the_page_and_not_by_the_token() -> None:
    """Of 2 convolutions over 3 positions, 32 wide; one layer attends."""
    made = plan(config(**HYBRID))
    states, attending = made.kinds
    assert states.kind.states == (StateForm((2, 32)),)
    assert (states.page_bytes, states.array_page_bytes) == (2 * 2 * 32 * 4, 2 * 32 * 4)
    assert made.token_bytes == A_TOKEN // 2
    assert states.sequence_pages == attending.sequence_pages == 8192 // 128  # so small that each page has one
    assert pages_bytes(made) <= made.budget_bytes
    assert any("states of" in row[2] for row in table(made))


def test_large_states_are_as_many_as_a_chunk_touches() -> None:
    """Or a quarter of the pages of keys and values, which are as large here."""
    wide = {**HYBRID, "conv_L_cache": 129, "head_dim": 8, "num_key_value_heads": 4}
    made = plan(config(**wide))
    states, _ = made.kinds
    kind, chunk = PageKind(states.kind.reach, ceiling=0), 256
    assert states.sequence_pages == max(kind.most_pages(chunk, 128) or 0, 8192 // 128 // 4)
    assert plan(config(**wide), max_context=1000).kinds[0].sequence_pages == kind.most_pages(chunk, 128)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_planned_number_of_sequences_with_states_fits(batch: int) -> None:
    made = plan(config(**HYBRID), max_context=1000, batch=batch, kv_budget=batch * 2**20)
    kinds = [PageKind(kind.kind.reach, kind.ceiling_pages) for kind in made.kinds]
    manager = PageManager(kinds, page_size=128, prefill_chunk=256)
    assert manager.capacity >= 1000
    for number in range(batch):
        tables, tokens = manager.open(()), [number] * 1000
        for end in (256, 512, 768, 1000):
            assert manager.reserve(tables, end)
            manager.advance(tables, end, tokens)
