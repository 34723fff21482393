"""What is found in the files, also where they cannot be put together."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
from gguf_files import Type, write_pair

from tinyllm.anatomy.facts import facts, tensor_facts
from tinyllm.anatomy.page import block_page, page, shapes_page
from tinyllm.anatomy.subject import Subject, open_subject
from tinyllm.checkpoint.gguf_header import read_gguf_header
from tinyllm.config.config import Config
from tinyllm.config.families.table import FAMILIES
from tinyllm.config.family import Experts, Family
from tinyllm.config.tensors import tensor_shapes
from tinyllm.errors import CorruptFileError, MissingFileError

GOLDEN = Path(__file__).parent.parent / "golden"
FOLDERS = sorted(file.parent.name for file in GOLDEN.glob("*/expected.safetensors"))


SPARSE = {
    "model_type": "sparse",
    "vocab_size": 150_000,
    "hidden_size": 6144,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2560,
    "num_hidden_layers": 62,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 160,
    "num_experts_per_tok": 8,
}


def sparse_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of `SPARSE` as files have them: each expert's by themselves."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in tensor_shapes(Config.from_dict(SPARSE)).items():
        if ".experts." not in name:
            shapes[name] = shape
            continue
        for i in range(shape[0]):
            shapes[name.replace(".experts.", f".experts.{i}.")] = shape[1:]
    return shapes


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with the config of a family of experts, in which there is nothing else that is special."""
    monkeypatch.setitem(FAMILIES, "sparse", Family("sparse", experts=Experts()))  # type: ignore[arg-type]
    tiny.write_json(tmp_path / "config.json", SPARSE)
    return tmp_path


def opened(folder: Path) -> Subject:
    return open_subject(str(folder), report=lambda line: None)


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_folders_are_as_their_configs_ask(name: str) -> None:
    """In every form: packed, fused, sharded, with experts one by one."""
    subject = opened(GOLDEN / name)
    assert not subject.problems
    assert dict(subject.shapes) == tensor_shapes(subject.config)
    assert all(row["expected"] == row["found"] and row["problem"] is None for row in tensor_facts(subject))
    expected = sum(math.prod(shape) for shape in subject.shapes.values())
    assert sum(form.parameters for form in subject.formats) == expected
    assert sum(form.nbytes for form in subject.formats) == sum(info.nbytes for info in subject.used.values())


@pytest.mark.parametrize("name", FOLDERS)
def test_pages_are_within_80_columns_and_json_is_json(name: str) -> None:
    subject = opened(GOLDEN / name)
    lines = [*page(subject), *shapes_page(subject), *block_page(subject, subject.config.num_hidden_layers - 1)]
    assert max(map(len, lines)) <= 80 and not any(line != line.rstrip() for line in lines)
    assert json.loads(json.dumps(facts(subject)))["parameters"]["total"] > 0


def test_without_files_their_size_is_expected(tmp_path: Path) -> None:
    for name in ("qwen3", "mlx-lm-4bit"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
        bare, whole = opened(tmp_path / name), opened(GOLDEN / name)
        sizes = [{form.name.replace("bfloat16", "bf16"): form.nbytes for form in s.formats} for s in (bare, whole)]
        assert sizes[0] == sizes[1]
        assert bare.table is None and facts(bare)["weights"] is None


def test_tensors_that_cannot_be_put_together_are_told_beside_the_others(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path)
    shapes = dict(tensor_shapes(opened(tmp_path).config))
    name = "model.layers.1.mlp.up_proj.weight"
    del shapes["model.norm.weight"]
    header = json.loads(tiny.hollow_header(shapes)[0][8:])
    header[name]["dtype"] = "I16"
    size = max(entry["data_offsets"][1] for entry in header.values())
    tiny.write_raw_safetensors(tmp_path / "model.safetensors", json.dumps(header).encode(), [bytes(size)])
    problems = opened(tmp_path).problems
    assert problems["missing"] == {"model.norm.weight": "model.norm.weight"}
    assert problems["unusable"][name].endswith(f"tensor {name!r} is of type I16, which tinyllm does not read")
    assert set(problems) == {"missing", "unusable"}


def test_four_hundred_billion_parameters_in_thirty_thousand_tensors_are_counted(sparse: Path) -> None:
    shapes = sparse_shapes()
    names = list(shapes)
    for i in range(4):
        part = {name: shapes[name] for name in names[i::4]}
        tiny.write_hollow(sparse / f"model-0000{i + 1}-of-00004.safetensors", part)
    subject = opened(sparse)
    found = facts(subject)
    assert not subject.problems
    assert (found["weights"]["files"], found["weights"]["tensors"]) == (4, len(shapes))
    assert len(shapes) > 29_000 and found["parameters"]["total"] > 400e9
    assert found["parameters"]["total"] == sum(map(math.prod, shapes.values()))
    idle = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name) * 152 // 160
    assert found["parameters"]["active"] == found["parameters"]["total"] - idle


def test_headers_are_read_once_each_and_no_weights(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = sparse_shapes()
    names = list(shapes)
    headers, taken = {}, Counter[str]()
    for i in range(2):
        part = {name: shapes[name] for name in names[i::2]}
        tiny.write_hollow(sparse / f"{i}.safetensors", part)
        headers[f"{i}.safetensors"] = len(tiny.hollow_header(part)[0])

    class Counted(io.FileIO):
        def readinto(self, buffer: Any, /) -> int:
            count = super().readinto(buffer)
            taken[Path(str(self.name)).name] += count
            return count

    opens: list[str] = []
    plain = Path.open

    def counting(path: Path, mode: str = "r", *args: Any, **settings: Any) -> Any:
        if path.suffix != ".safetensors":
            return plain(path, mode, *args, **settings)
        opens.append(path.name)
        return io.BufferedReader(Counted(path))

    monkeypatch.setattr(Path, "open", counting)
    subject = opened(sparse)
    assert facts(subject) and tensor_facts(subject) and list(page(subject))
    assert sorted(opens) == list(headers)
    assert all(headers[name] <= taken[name] < headers[name] + 2 * io.DEFAULT_BUFFER_SIZE for name in headers)


def test_names_are_translated_once_for_all_experts(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_hollow(sparse / "model.safetensors", sparse_shapes())
    asked: list[str] = []
    translate = Config.targets

    def counting(config: Config, name: str) -> Any:
        asked.append(name)
        return translate(config, name)

    monkeypatch.setattr(Config, "targets", counting)
    subject = opened(sparse)
    assert subject.table is not None and len(asked) == len(subject.table.tensors)


def test_an_expert_that_is_absent_or_unlike_the_others_is_told(sparse: Path) -> None:
    tiny.write_json(sparse / "config.json", {**SPARSE, "num_hidden_layers": 1, "num_experts": 8})
    shapes = tensor_shapes(opened(sparse).config)
    name = "model.layers.0.mlp.experts.{}_proj.weight"
    stacked = {part: shapes.pop(name.format(part)) for part in ("gate", "up", "down")}
    each = {name.format(f"{i}.{part}"): shape[1:] for part, shape in stacked.items() for i in range(8)}
    del each[name.format("3.gate")]
    each[name.format("5.up")] = (1, 1)
    tiny.write_hollow(sparse / "model.safetensors", {**shapes, **each})
    [(kind, problems)] = opened(sparse).problems.items()
    assert kind == "unusable"
    assert problems[name.format("gate")].endswith("expert 3 is absent, but later ones are there")
    assert problems[name.format("up")].endswith("experts are of different shapes or types")


def test_tensors_of_a_gguf_file_are_counted_as_it_has_them(tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, Type.Q4_K)
    subject = opened(file)
    assert subject.filed == len(read_gguf_header(file).tensors) < len(subject.used)


def test_files_that_are_broken_or_named_and_absent_are_errors(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path, shards=2)
    [first, _] = sorted(tmp_path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(CorruptFileError, match="cut off"):
        opened(tmp_path)
    first.unlink()
    with pytest.raises(MissingFileError, match="the index names files that are not there"):
        opened(tmp_path)
