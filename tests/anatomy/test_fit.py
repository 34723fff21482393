"""What a model takes on a machine that is not this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyllm.anatomy.fit import lent_bytes, plan_for, weight_bytes
from tinyllm.anatomy.subject import Subject
from tinyllm.config.config import Config
from tinyllm.errors import ContextLengthError, DoesNotFitError

CONFIG = Config.from_json_file(Path(__file__).parent / "qwen3-0.6b")
SUBJECT = Subject("it", CONFIG, None)
GIB = 2**30


def test_weights_take_what_the_config_says() -> None:
    assert weight_bytes(SUBJECT) == 2 * 596_049_920


def test_a_plan_is_for_what_metal_lends() -> None:
    plan = plan_for(SUBJECT, 16 * GIB, 32768)
    assert plan.available_bytes == lent_bytes(16 * GIB) == 16 * GIB * 2 // 3
    assert (plan.context, plan.token_bytes, plan.weight_bytes) == (32768, 114_688, weight_bytes(SUBJECT))
    assert plan.wired_bytes <= plan.available_bytes
    assert plan_for(SUBJECT, 16 * GIB).context == 40960


def test_metal_lends_more_of_a_large_memory() -> None:
    assert [lent_bytes(n * GIB) / GIB for n in (24, 36, 128)] == [16, 27, 96]


def test_the_bits_that_are_named_do_fit_and_more_do_not() -> None:
    for machine, bits in ((int(1.5 * GIB), 8), (int(1.1 * GIB), 6), (GIB * 3 // 4, 4)):
        with pytest.raises(DoesNotFitError, match=rf"; packed to {bits} bits it would, with [\d,]+ tokens$"):
            plan_for(SUBJECT, machine)
    with pytest.raises(DoesNotFitError) as failure:
        plan_for(SUBJECT, GIB // 4)
    assert "packed" not in str(failure.value)


def test_a_context_beyond_the_model_is_its_own_error() -> None:
    with pytest.raises(ContextLengthError, match="can attend to 40,960 tokens"):
        plan_for(SUBJECT, 16 * GIB, 40961)
