"""Whether a model fits into a machine that need not be this one, and what of it would. No mlx."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from tinyllm.anatomy.subject import Subject
from tinyllm.checkpoint.summary import memory_bytes
from tinyllm.config.tensors import EMBEDDING, tensor_shapes
from tinyllm.engine.plan import MemoryPlan, make_plan
from tinyllm.errors import DoesNotFitError

__all__ = ["lent_bytes", "plan_for", "weight_bytes"]

# Of a Mac's memory, up to so many bytes: the least that Metal is known to recommend as its working set.
_LENT = ((36 * 2**30, Fraction(2, 3)), (math.inf, Fraction(3, 4)))
_PACKED_BITS, _GROUP, _GROUP_BITS = (8, 6, 4, 3, 2), 64, 32  # affine; a scale and a bias in half precision a group
_HALF_BYTES, _SINGLE_BYTES = 2, 4


def plan_for(
    subject: Subject, machine_bytes: int, context: int | None = None, kv_bits: int | None = None
) -> MemoryPlan:
    """Plan the memory of a Mac with so much of it, computing in the type that is stored, for `context` tokens.

    With `kv_bits` the KV cache is packed.

    Raises DoesNotFitError, saying which context would fit, and how many bits a weight would; ContextLengthError.
    """
    try:
        return _plan(subject, weight_bytes(subject), machine_bytes, context, kv_bits)
    except DoesNotFitError as error:
        for bits, packed in _smaller(subject):
            try:
                plan = _plan(subject, packed, machine_bytes, context, kv_bits)
            except DoesNotFitError:
                continue
            raise DoesNotFitError(f"{error}; packed to {bits} bits it would, with {plan.context:,} tokens") from error
        raise


def lent_bytes(machine_bytes: int) -> int:
    """Bytes that Metal lends at least, on a Mac with so many."""
    return math.floor(machine_bytes * next(share for most, share in _LENT if machine_bytes < most))


def weight_bytes(subject: Subject) -> int:
    """Bytes of the weights as they are stored: in the files, or where there are none as the config has it."""
    if subject.table is None:
        return sum(form.nbytes for form in subject.formats)
    return memory_bytes(subject.config, subject.used, None)


def _plan(subject: Subject, weights: int, machine_bytes: int, context: int | None, kv_bits: int | None) -> MemoryPlan:
    stored = subject.used.get(EMBEDDING)
    single = subject.config.dtype == "float32" if stored is None else stored.dtype == "F32"
    return make_plan(
        subject.config,
        weight_bytes=weights,
        itemsize=_SINGLE_BYTES if single else _HALF_BYTES,
        available_bytes=lent_bytes(machine_bytes),
        max_context=context,
        kv_bits=kv_bits,
        on_gpu=True,
        name=subject.name,
    )


def _smaller(subject: Subject) -> Iterator[tuple[int, int]]:
    """Yield bits, and bytes of the weights with matrices packed to as many, where that is less than it is now."""
    shapes = tensor_shapes(subject.config).values()
    packed = sum(math.prod(shape) for shape in shapes if len(shape) > 1 and shape[-1] % _GROUP == 0)
    others = sum(math.prod(shape) for shape in shapes) - packed
    for bits in _PACKED_BITS:
        nbytes = packed * (bits * _GROUP + _GROUP_BITS) // (8 * _GROUP) + _HALF_BYTES * others
        if nbytes < weight_bytes(subject):
            yield bits, nbytes
