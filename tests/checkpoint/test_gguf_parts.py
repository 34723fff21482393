"""GGUF models in several files: the same as in one, from any of them; and sets that do not belong together."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import convert_golden, split_gguf, write_gguf
from golden_cases import TOLERANCE, difference, expected

from tinyllm._mx import mx
from tinyllm.anatomy.subject import open_subject
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.digest import weights_digest
from tinyllm.checkpoint.gguf_header import read_gguf_header
from tinyllm.checkpoint.gguf_parts import first_parts, part_names, parts_of, read_gguf_parts
from tinyllm.convert.convert import convert
from tinyllm.errors import CorruptFileError, MissingFileError, TinyllmError
from tinyllm.model.load import load_model
from tinyllm.text.tokenizer import Tokenizer


def parts(folder: Path, name: str = "llama", tensors: int = 10) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return split_gguf(convert_golden(name, folder / "model.gguf", tokenizer=True), tensors)


def logits(path: Path, ids: mx.array) -> mx.array:
    return load_model(path, dtype=mx.float32)(ids)[0]


@pytest.mark.parametrize("metadata_alone", [False, True])
def test_logits_are_those_of_the_whole_file_from_any_of_its_parts(metadata_alone: bool, tmp_path: Path) -> None:
    ids, wanted = expected("llama")
    whole = convert_golden("llama", tmp_path / "whole.gguf")
    copy = shutil.copy(whole, tmp_path / "model.gguf")
    files = split_gguf(Path(copy), 10, metadata_alone=metadata_alone)
    assert len(files) == 3 + metadata_alone
    assert bool(read_gguf_header(files[0]).tensors) != metadata_alone
    for file in files:
        found = logits(file, ids)
        assert difference(found, wanted) <= TOLERANCE
        assert mx.array_equal(found, logits(whole, ids))
    assert read_gguf_parts(files[0]).tensors.keys() == read_gguf_header(whole).tensors.keys()


def test_factors_stand_in_any_part(tmp_path: Path) -> None:
    whole = convert_golden("llama-llama3", tmp_path / "model.gguf")
    wanted = read_contents(whole).config
    names = list(read_gguf_header(whole).tensors)
    files = split_gguf(whole, len(names) // 2)
    assert "rope_freqs.weight" not in read_gguf_header(files[0]).tensors
    assert read_contents(files[0]).config == wanted


def test_what_asks_for_a_path_takes_a_part(tmp_path: Path) -> None:
    whole = convert_golden("llama", tmp_path / "whole.gguf", tokenizer=True)
    files = parts(tmp_path)
    assert weights_digest(files[1]) == weights_digest(whole)
    assert Tokenizer.of(read_contents(files[2])).encode("one two") == Tokenizer.of(read_contents(whole)).encode(
        "one two"
    )
    subject = open_subject(str(files[1]), report=lambda line: None)
    assert (subject.name, subject.files) == (files[0].name, len(files))
    assert subject.filed == len(read_gguf_header(whole).tensors)
    convert(files[1], tmp_path / "folder")
    ids = mx.array([[1, 5, 20, 7]])
    assert mx.array_equal(logits(tmp_path / "folder", ids), logits(whole, ids))


def test_names() -> None:
    names = ("a-Q4_0-00001-of-00002.gguf", "a-Q4_0-00002-of-00002.gguf")
    assert part_names(names[0]) == part_names(names[1]) == names
    for alone in ("a.gguf", "a-1-of-2.gguf", "a-00003-of-00002.gguf", "a-00000-of-00002.gguf"):
        assert part_names(alone) == (alone,)
    assert first_parts(map(Path, (*names[::-1], "a.gguf", "b-00002-of-00002.gguf"))) == [
        Path(name) for name in (names[0], "a.gguf", "b-00002-of-00002.gguf")
    ]


# ---------------------------------------------------------------- what does not belong together


def without_one(files: list[Path]) -> None:
    files[1].unlink()


def one_twice(files: list[Path]) -> None:
    shutil.copy(files[1], files[2])


def said(name: str, kind: str, value: int) -> Callable[[list[Path]], None]:
    """Change a number of the second part."""

    def change(files: list[Path]) -> None:
        content = bytearray(files[1].read_bytes())
        at = content.index(name.encode()) + len(name) + 4
        struct.pack_into(kind, content, at, value)
        files[1].write_bytes(content)

    return change


def of_another(files: list[Path]) -> None:
    """Its parts are as many, and of another number of tensors."""
    others = parts(files[0].parent / "other", "qwen3", 13)
    assert len(others) == len(files)
    shutil.copy(others[1], files[1])


def with_a_tensor_of_the_first(files: list[Path]) -> None:
    names, others = (read_gguf_header(file).tensors for file in files[:2])
    name, mine = next((name, mine) for name in names for mine in others if len(name) == len(mine))
    content = files[1].read_bytes()
    files[1].write_bytes(content.replace(mine.encode(), name.encode(), 1))


def cut_off(files: list[Path]) -> None:
    files[2].write_bytes(files[2].read_bytes()[:-100])


REFUSED: dict[str, tuple[Callable[[list[Path]], None], type[TinyllmError], str]] = {
    "a part is missing": (without_one, MissingFileError, "model-00002-of-00003.gguf, one of the 3 parts"),
    "a part is there twice": (one_twice, CorruptFileError, r"model-00003-of-.*: is part 3 of 3 .*\(from 0\) is 1"),
    "another count": (said("split.count", "<H", 4), CorruptFileError, r"model-00002-of-.*split.count 4"),
    "another number": (said("split.no", "<H", 2), CorruptFileError, r"model-00002-of-.*\(from 0\) is 2"),
    "another total": (
        said("split.tensors.count", "<i", 5), CorruptFileError, "model-00002-of-.*another model.*tensors.count' is 5",
    ),
    "a part of another model": (of_another, CorruptFileError, "model-00002-of-.*: is of another model"),
    "a tensor twice": (with_a_tensor_of_the_first, CorruptFileError, "model-00002-of-.*is in an earlier part"),
    "a part is cut off": (cut_off, CorruptFileError, "model-00003-of-.*cut off"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_belong_together_is_refused_by_name(case: str, tmp_path: Path) -> None:
    spoil, error, told = REFUSED[case]
    files = parts(tmp_path / "model")
    spoil(files)
    for file in (files[0], files[2]):
        with pytest.raises(error, match=told) as failure:
            load_model(file)
        assert str(failure.value).isprintable()


def test_fewer_tensors_than_are_said_are_refused(tmp_path: Path) -> None:
    files = parts(tmp_path)
    for file in files:
        said("split.tensors.count", "<i", 90)([file, file])
    with pytest.raises(CorruptFileError, match=r"tensors.count is 90, but there are \d\d, all 3 parts"):
        load_model(files[0])


def test_a_part_under_the_name_of_a_whole_file_is_refused(tmp_path: Path) -> None:
    [first, *_] = parts(tmp_path)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(CorruptFileError, match=r"is no part .* split.count 3: give it the name"):
        load_model(renamed)


def test_a_file_alone_may_say_that_it_was_merged(tmp_path: Path) -> None:
    for name, count in (("merged.gguf", 0), ("one-00001-of-00001.gguf", 1), ("split.gguf", 1)):
        numbers = {"split.no": 0, "split.count": count, "split.tensors.count": 9}
        file = write_gguf(tmp_path / name, "llama", numbers, {})
        assert parts_of(file) == (file,)
        assert read_gguf_parts(file).metadata["split.count"] == count


def test_parts_in_a_snapshot_are_links_to_blobs(tmp_path: Path) -> None:
    ids, _ = expected("llama")
    files = parts(tmp_path / "real")
    snapshot, blobs = tmp_path / "models--o--m" / "snapshots" / ("0" * 40), tmp_path / "models--o--m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    wanted = logits(files[0], ids)
    for number, file in enumerate(files):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(blobs / str(number))
    assert mx.array_equal(logits(snapshot / files[0].name, ids), wanted)
