"""A safetensors header is held against its file before anything in it is trusted; the attacks and the accidents."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tinyllm.checkpoint.safetensors_header import (
    BITS,
    TensorInfo,
    read_safetensors_header,
    write_safetensors_header,
)
from tinyllm.errors import CheckpointError, CorruptFileError, MissingFileError, TinyllmError

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    tiny.write_raw_safetensors(path, header if isinstance(header, bytes) else json.dumps(header).encode(), [data])
    return path


def refused(path: Path, *words: str) -> None:
    """The file is refused in one line that names it, and each of `words`."""
    with pytest.raises(CorruptFileError) as failure:
        read_safetensors_header(path)
    message = str(failure.value)
    assert message.startswith(str(path))
    assert message.isprintable()
    assert all(word in message for word in words), message


def test_each_tensor_is_found_where_it_stands(path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, dtype=np.float32)}
    tiny.write_safetensors(path, arrays, dtype="F16")
    infos = read_safetensors_header(path)
    assert [(info.name, info.dtype, info.shape, info.nbytes) for info in infos.values()] == [
        ("a", "F16", (2, 3), 12),
        ("b", "F16", (5,), 10),
    ]
    for name, info in infos.items():
        data = path.read_bytes()[info.start : info.end]
        assert np.array_equal(np.frombuffer(data, np.float16).reshape(info.shape), arrays[name])


def test_metadata_is_no_tensor(path: Path) -> None:
    write(path, {"__metadata__": {"format": "mlx"}, "a": ENTRY}, bytes(24))
    assert list(read_safetensors_header(path)) == ["a"]


def test_a_header_may_be_padded_with_spaces(path: Path) -> None:
    write(path, json.dumps({"a": ENTRY}).encode() + b" " * 13, bytes(24))
    assert list(read_safetensors_header(path)) == ["a"]


def test_empty_and_scalar_tensors_are_sound(path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0, 7], "data_offsets": [0, 0]}
    scalar = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    write(path, {"empty": empty, "scalar": scalar}, bytes(4))
    assert {info.name: info.shape for info in read_safetensors_header(path).values()} == {
        "empty": (0, 7),
        "scalar": (),
    }


# Fault 03: offsets against shapes and the end of the file.


def test_fault_03_offsets_that_span_less_than_the_shape_name_the_tensor(path: Path) -> None:
    write(path, {"big": {"dtype": "F32", "shape": [512, 512], "data_offsets": [0, 8]}}, bytes(8))
    refused(path, "'big'", "[512, 512]", "1,048,576", "8")


@pytest.mark.parametrize("cut", [1, 2, 23, 24])
def test_fault_03_a_file_that_is_cut_off_names_the_tensor_that_it_cuts(path: Path, cut: int) -> None:
    write(path, {"a": ENTRY, "last": {**ENTRY, "data_offsets": [24, 48]}}, bytes(48))
    path.write_bytes(path.read_bytes()[:-cut])
    refused(path, "'last'", "cut off")


def test_fault_03_a_file_cut_off_at_any_byte_is_refused(path: Path) -> None:
    whole = write(path, {"a": ENTRY}, bytes(24)).read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refused(path)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ([20, 44], ["'b'", "overlaps"]),
        ([0, 24], ["'b'", "overlaps"]),
        ([28, 52], ["'b'", "gap"]),
        ([24, 40], ["'b'", "24"]),
        ([48, 24], ["'b'"]),
        ([24, 24], ["'b'"]),
        ([2**62, 2**62 + 24], ["'b'", "cut off"]),
    ],
)
def test_fault_03_tensors_neither_overlap_nor_leave_gaps(path: Path, second: list[int], words: list[str]) -> None:
    write(path, {"a": ENTRY, "b": {**ENTRY, "data_offsets": second}}, bytes(52))
    refused(path, *words)


def test_fault_03_bytes_that_belong_to_no_tensor_are_refused(path: Path) -> None:
    write(path, {"a": ENTRY}, bytes(25))
    refused(path, "1 bytes at its end")


@pytest.mark.parametrize(
    "damage",
    [
        {"data_offsets": [0]},
        {"data_offsets": [0, 24, 48]},
        {"data_offsets": None},
        {"data_offsets": "ab"},
        {"data_offsets": [0, 24.0]},
        {"data_offsets": [False, 24]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [0, "24"]},
        {"data_offsets": {"start": 0, "end": 24}},
        {"shape": None},
        {"shape": 6},
        {"shape": "23"},
        {"shape": [2, -3]},
        {"shape": [-2, -3]},
        {"shape": [2, 3.0]},
        {"shape": [True, 6]},
        {"shape": [[2], [3]]},
        {"shape": [2**63, 2**63]},
        {"shape": [10**4000] * 50},
        {"shape": [1] * 1000 + [6]},
        {"dtype": None},
        {"dtype": 32},
        {"dtype": "F31"},
        {"dtype": "f32"},
        {"dtype": ["F32"]},
        {"dtype": {}},
    ],
    ids=lambda damage: str(damage)[:40],
)
def test_fault_03_an_entry_that_makes_no_sense_names_the_tensor(path: Path, damage: dict[str, Any]) -> None:
    write(path, {"fine": ENTRY, "damaged": {**ENTRY, "data_offsets": [24, 48], **damage}}, bytes(48))
    refused(path, "'damaged'")


@pytest.mark.parametrize("entry", [None, 1, "x", [], {}, [1, 2, 3], {"dtype": "F32"}], ids=repr)
def test_fault_03_an_entry_of_the_wrong_kind_names_the_tensor(path: Path, entry: Any) -> None:
    write(path, {"damaged": entry})
    refused(path, "'damaged'")


def test_fault_03_a_tensor_that_stands_twice_is_refused(path: Path) -> None:
    other = {**ENTRY, "data_offsets": [24, 48]}
    write(path, f'{{"a": {json.dumps(ENTRY)}, "a": {json.dumps(other)}}}'.encode(), bytes(48))
    refused(path, "'a'")


# Fault 04: what the first eight bytes claim.


@pytest.mark.parametrize("length", [2**41, 2**63, 2**64 - 1, 2**32, 1017, 0, 1])
def test_fault_04_a_length_that_the_file_cannot_hold_is_refused_without_reading(path: Path, length: int) -> None:
    path.write_bytes(length.to_bytes(8, "little") + b"{}".ljust(1024 - 8))
    refused(path, f"{length:,}", "1,024")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_fault_04_a_file_too_short_for_a_header_is_refused(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))
    refused(path)


@pytest.mark.parametrize("start", [b"{", b"\0", b"{}"])
def test_fault_04_a_terabyte_that_is_not_there_takes_no_memory(path: Path, start: bytes) -> None:
    with path.open("wb") as file:
        file.write((2**40 - 8).to_bytes(8, "little") + start)
        file.truncate(2**40)  # a hole: it takes no space on the disk
    refused(path)


def test_fault_04_a_header_of_more_than_100_mb_is_read(path: Path) -> None:
    header = json.dumps({"__metadata__": {"padding": "x" * 101_000_000}, "a": ENTRY}).encode()
    write(path, header, bytes(24))
    info = read_safetensors_header(path)["a"]
    assert (info.start, info.end) == (8 + len(header), 8 + len(header) + 24)


# What is no header at all.


@pytest.mark.parametrize(
    "header",
    [
        b"{]",
        b"[]",
        b"12",
        b"{} {}",
        b'{"a": }',
        b'{"a": "\xff\xfe"}',
        b'{"a":' * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        '{"a": 1}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"a": ' + b"9" * 10_000 + b"}",
        b"PK\x03\x04 an archive with pickles",
    ],
    ids=lambda header: str(header[:24]),
)
def test_what_is_no_header_is_refused(path: Path, header: bytes) -> None:
    write(path, header)
    refused(path)


def test_control_characters_in_a_name_do_not_reach_the_terminal(path: Path) -> None:
    write(path, {"a\n\x1b[31m\ud800": {**ENTRY, "dtype": "F31"}}, bytes(24))
    refused(path, "F31")


# What is no file.


def test_an_absent_file_is_named(path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"model\.safetensors.*download it again"):
        read_safetensors_header(path)


def test_fault_08_a_link_to_nothing_is_named_and_to_be_downloaded_again(path: Path) -> None:
    path.symlink_to(path.parent / "blob")
    with pytest.raises(MissingFileError, match=r"model\.safetensors.*download it again"):
        read_safetensors_header(path)


def test_a_link_that_leads_to_itself_is_refused(path: Path) -> None:
    path.symlink_to(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_safetensors_header(path)


def test_a_folder_is_refused(path: Path) -> None:
    path.mkdir()
    refused(path, "not a file")


def test_a_pipe_is_refused_without_waiting_for_it(path: Path) -> None:
    os.mkfifo(path)
    refused(path, "not a file")


def test_a_path_below_a_file_is_refused(path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_safetensors_header(path / "model.safetensors")


def test_a_file_that_may_not_be_read_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    write(path, {})
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*Permission denied"):
        read_safetensors_header(path)


def test_every_type_of_the_library_is_known(path: Path) -> None:
    """A tensor of a new type must not make the others of its file unreadable."""
    write(path, {"a": {**ENTRY, "dtype": "F31"}}, bytes(24))
    with pytest.raises(SafetensorError) as failure:
        safe_open(path, framework="numpy")
    known = set(re.findall("`([A-Z0-9_]+)`", str(failure.value))) - {"F31"}
    assert "BF16" in known and known <= BITS.keys()


def test_elements_that_end_within_a_byte_are_refused(path: Path) -> None:
    write(path, {"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, bytes(1))
    refused(path, "'a'")


def test_what_is_written_is_what_the_library_reads(path: Path) -> None:
    """Data begins at a multiple of eight bytes, as the library's own files have it."""
    tensors = [("a", "F32", (2, 3)), ("b", "U8", ()), ("c", "F4", (2,))]
    header = write_safetensors_header(tensors, {"format": "pt"})
    path.write_bytes(header + bytes(26))
    assert len(header) % 8 == 0
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        found = [(name, file.get_slice(name)) for name in file.offset_keys()]
        assert [(name, each.get_dtype(), tuple(each.get_shape())) for name, each in found] == tensors
    assert [info.nbytes for info in read_safetensors_header(path).values()] == [24, 1, 1]


# Any damage at all.


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


def check_against_the_library(path: Path, infos: list[TensorInfo]) -> None:
    """What is read is what the safetensors library reads, which refuses metadata that is not text."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError:
        length = int.from_bytes(path.read_bytes()[:8], "little")
        metadata = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
        assert not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values())
    else:
        assert found == {info.name: (info.dtype, info.shape) for info in infos}


def check_layout(path: Path) -> None:
    """The file is refused in one line, or its tensors cover its data exactly."""
    size = path.stat().st_size
    try:
        infos = sorted(read_safetensors_header(path).values(), key=lambda info: (info.start, info.end))
    except TinyllmError as error:
        assert str(error).isprintable()
        return
    check_against_the_library(path, infos)
    ends = [info.end for info in infos]
    starts = [info.start for info in infos]
    assert starts[1:] == ends[:-1]
    assert not ends or ends[-1] == size


@settings(max_examples=300)
@given(data=st.data())
def test_any_damage_to_the_bytes_is_refused_or_leaves_a_sound_file(damaged: Path, data: st.DataObject) -> None:
    write(damaged, {"__metadata__": {"a": "b"}, "a": ENTRY, "b": {**ENTRY, "data_offsets": [24, 48]}}, bytes(48))
    content = bytearray(damaged.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    damaged.write_bytes(content)
    check_layout(damaged)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([10**400, 2**63]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.text(max_size=4) | st.just("__metadata__"),
        JSON
        | st.fixed_dictionaries(
            {"dtype": st.sampled_from(["F32", "U8", "F4"]) | JSON, "shape": st.lists(st.integers(0, 9)) | JSON},
            optional={"data_offsets": st.tuples(st.integers(0, 99), st.integers(0, 99)) | JSON, "more": JSON},
        ),
        max_size=3,
    )
)
def test_any_header_is_refused_or_sound(damaged: Path, header: dict[str, Any]) -> None:
    write(damaged, header, bytes(24))
    check_layout(damaged)
