"""A GGUF header is held against its file before anything in it is trusted; the attacks and the accidents."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.gguf_header import _TYPES, HeaderTakesMoreError, read_gguf_header, shortest
from tinyllm.errors import CheckpointError, CorruptFileError, MissingFileError, TinyllmError
from tinyllm.text.tokenizer import Tokenizer

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(name: str, kind: int, data: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + data


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    said: Sequence[bytes] = (), infos: Sequence[bytes] = (), *, values: int = -1, tensors: int = -1, version: int = 3
) -> bytes:
    """Return a header of these values and tensors, which may claim other numbers of them."""
    counts = len(infos) if tensors < 0 else tensors, len(said) if values < 0 else values
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*said, *infos])


def padded(content: bytes, data: bytes) -> bytes:
    return content + bytes(-len(content) % 32) + data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def refused(path: Path, content: bytes, *words: str) -> None:
    """The file is refused in one line that names it, and each of `words`."""
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as failure:
        read_gguf_header(path)
    message = str(failure.value)
    assert message.startswith(str(path))
    assert message.isprintable()
    assert all(word in message for word in words), message


def test_what_the_library_writes_is_read(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.eps", 1e-5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "dü")
    writer.add_array("a.texts", ["x", "", "z"])
    writer.add_array("a.numbers", [1.5, 2.5])
    writer.add_array("a.flags", [True, False])
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones(5, dtype=np.float16)}
    for name, data in arrays.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf_header(path)
    said = {name: item for name, item in found.metadata.items() if name.startswith("a.")}
    assert said == {
        "a.count": 7, "a.eps": 1e-5, "a.flag": True, "a.text": "dü", "a.texts": ("x", "", "z"),
        "a.numbers": (1.5, 2.5), "a.flags": (True, False),
    }  # fmt: skip
    assert [(t.name, t.type.name, t.shape) for t in found.tensors.values()] == [
        ("x", "F32", (2, 3)),
        ("y", "F16", (5,)),
    ]
    for name, info in found.tensors.items():
        assert path.read_bytes()[info.start : info.end] == arrays[name].tobytes()


def test_types_are_those_of_the_library() -> None:
    for number, kind in _TYPES.items():
        library = GGMLQuantizationType(number)
        assert (library.name, GGML_QUANT_SIZES[library]) == (kind.name, (kind.block, kind.nbytes))


@given(st.floats(width=32))
def test_decimals_are_those_that_were_rounded(number: float) -> None:
    assert struct.pack("<f", shortest(number)) == struct.pack("<f", number)


def test_short_decimals_stay_short() -> None:
    for number in (1e-5, 1e-6, 0.1, 10000.0, 500000.0, 0.0078125):
        assert shortest(float(np.float32(number))) == number


HUGE = 1 << 62
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "does not begin"),
    "another kind of file": (b"\x80\x02}q\x00." * 9, "does not begin"),
    "an end after the magic": (b"GGUF", "version"),
    "the first version": (header(version=1), "version 1"),
    "a big-endian file": (header(version=3 << 24), "big-endian"),
    "more tensors than fit": (header(tensors=HUGE), "tensors"),
    "a negative number of tensors": (header(tensors=(1 << 64) - 1), "tensors"),
    "more values than fit": (header(values=HUGE), "values"),
    "an end in the values": (header(values=1) + text("a name"), "type"),
    "a name without end": (header(values=1) + struct.pack("<Q", HUGE) + bytes(40), "name of a value"),
    "a long name": (header([value("n" * 70_000, BOOL, b"\1")]), "which no name is"),
    "a name that is no text": (header([value("a", UINT8, b"\1")]).replace(b"a\0", b"\xff\0"), "UTF-8"),
    "a text without end": (header([value("a", STRING, struct.pack("<Q", HUGE))]), "'a'"),
    "an unknown type of value": (header([value("a", 77, bytes(8))]), "type 77"),
    "an array of an unknown type": (header([value("a", ARRAY, array(77, 1, bytes(8)))]), "type 77"),
    "an array past the end": (header([value("a", ARRAY, array(UINT64, HUGE))]), "elements of 'a'"),
    "a million texts in ten bytes": (header([value("a", ARRAY, array(STRING, 1_000_000, bytes(10)))]), "1,000,000"),
    "a text past the end in an array": (header([value("a", ARRAY, array(STRING, 1, struct.pack("<Q", 99)))]), "'a'"),
    "arrays in arrays in arrays": (header([value("a", ARRAY, array(ARRAY, 1) * 50 + bytes(99))]), "deep"),
    "a value that is there twice": (header([value("a", BOOL, b"\1")] * 2), "twice"),
    "an alignment of nothing": (header([value("general.alignment", UINT32, bytes(4))]), "alignment"),
    "an alignment that is a text": (header([value("general.alignment", STRING, text("32"))]), "alignment"),
    "a tensor of many dimensions": (header(infos=[tensor("t", (1,) * 9)]) + bytes(99), "9 dimensions"),
    "dimensions that overflow": (header(infos=[tensor("t", (1 << 40, 1 << 40))]), "no sizes"),
    "a dimension of nothing": (header(infos=[tensor("t", (4, 0))]), "no sizes"),
    "a tensor of an unknown type": (header(infos=[tensor("t", (4,), kind=4)]), "type 4"),
    "a tensor of a type that is not read": (header(infos=[tensor("t", (64,), kind=40)]), "type NVFP4"),
    "half a block": (padded(header(infos=[tensor("t", (16,), kind=2)]), bytes(99)), "do not divide"),
    "a tensor past the end": (padded(header(infos=[tensor("t", (64,))]), bytes(99)), "cut off"),
    "a tensor elsewhere": (padded(header(infos=[tensor("t", (4,), offset=HUGE)]), bytes(99)), "cut off"),
    "a tensor that is not aligned": (padded(header(infos=[tensor("t", (4,), offset=3)]), bytes(99)), "aligned"),
    "a tensor that is there twice": (
        padded(header(infos=[tensor("t", (4,)), tensor("t", (4,), offset=32)]), bytes(99)), "twice",
    ),
    "tensors in one place": (padded(header(infos=[tensor("t", (4,)), tensor("u", (4,))]), bytes(99)), "overlaps"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_said_in_one_line(name: str, path: Path) -> None:
    content, word = HOSTILE[name]
    refused(path, content, word)


def test_more_elements_than_any_tokenizer_has_are_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.write(header([value("a", ARRAY, array(UINT8, 1 << 25))]))
        file.truncate(1 << 26)
    with pytest.raises(CorruptFileError, match="more than tinyllm reads"):
        read_gguf_header(path)


def test_what_is_no_file(path: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_gguf_header(path)
    with pytest.raises(CorruptFileError):
        read_gguf_header(tmp_path)
    os.mkfifo(path)
    with pytest.raises(CorruptFileError):
        read_gguf_header(path)


GOOD = padded(
    header(
        [
            value("general.architecture", STRING, text("llama")),
            value("tokenizer.ggml.tokens", ARRAY, array(STRING, 2, text("a") + text("b"))),
            value("llama.rope.freq_base", FLOAT32, struct.pack("<f", 1e4)),
        ],
        [tensor("token_embd.weight", (4, 2)), tensor("output_norm.weight", (4,), offset=32)],
    ),
    bytes(64),
)


def test_every_shorter_file_is_cut_off_and_every_beginning_too_short(path: Path) -> None:
    end = len(GOOD) - 64 - 31
    for length in range(len(GOOD) - 16):
        refused(path, GOOD[:length])
        if 4 <= length < end:
            with pytest.raises(HeaderTakesMoreError):
                read_gguf_header(path, len(GOOD))
    path.write_bytes(GOOD)
    assert set(read_gguf_header(path).tensors) == {"token_embd.weight", "output_norm.weight"}


def readings(path: Path) -> list[Any]:
    return [lambda: read_contents(path), lambda: Tokenizer.from_gguf(read_gguf_header(path))]


@settings(max_examples=300)
@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=9))
def test_a_file_with_any_bytes_changed_is_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, at: int, other: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(GOOD[:at] + other + GOOD[at + len(other) :])
    for read in readings(path):
        try:
            read()
        except TinyllmError as error:
            assert str(error).isprintable()


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_any_bytes_after_the_magic_are_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + content)
    for read in readings(path):
        try:
            read()
        except TinyllmError as error:
            assert str(error).isprintable()
