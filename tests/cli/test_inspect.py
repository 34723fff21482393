"""`tinyllm inspect` through real processes: what it shows, what it marks, what it does not read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from hub_server import Repository
from machine import Machine
from process import tinyllm
from terminal import tinyllm_on_a_terminal

from tinyllm.config.config import Config

GOLDEN = Path(__file__).parent.parent / "golden"
QWEN3 = Path(__file__).parent.parent / "anatomy" / "qwen3-0.6b"
CONFIG = QWEN3 / "config.json"
TENSORS: dict[str, list[int]] = json.loads((QWEN3 / "tensors.json").read_text(encoding="utf-8"))
BLOCK = {
    "input_layernorm.weight": [1024],
    "post_attention_layernorm.weight": [1024],
    "self_attn.q_proj.weight": [2048, 1024],
    "self_attn.k_proj.weight": [1024, 1024],
    "self_attn.v_proj.weight": [1024, 1024],
    "self_attn.o_proj.weight": [1024, 2048],
    "self_attn.q_norm.weight": [128],
    "self_attn.k_norm.weight": [128],
    "mlp.gate_proj.weight": [3072, 1024],
    "mlp.up_proj.weight": [3072, 1024],
    "mlp.down_proj.weight": [1024, 3072],
}
PROJECTION = "model.layers.5.self_attn.q_proj.weight"
GATE = "model.layers.5.mlp.gate_proj.weight"


def write_qwen3(folder: Path, changes: dict[str, list[int] | None]) -> Path:
    """Write the published Qwen3-0.6B with holes for weights; with None a tensor is left out."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(CONFIG.read_bytes())
    shapes = {name: shape for name, shape in {**TENSORS, **changes}.items() if shape is not None}
    tiny.write_hollow(folder / "model.safetensors", shapes)
    return folder


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("inspect") / "Qwen3-0.6B", {})


@pytest.fixture(scope="module")
def hand_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor missing, one too many, and one in 28 layers of another shape."""
    changes: dict[str, list[int] | None] = {name: [1024] for name in TENSORS if name.endswith(".k_norm.weight")}
    folder = tmp_path_factory.mktemp("inspect") / "mine"
    return write_qwen3(folder, {**changes, GATE: None, "model.layers.5.mlp.gate.weight": [8, 1024]})


def show(*arguments: str | Path, code: int = 0) -> str:
    done = tinyllm("inspect", *arguments)
    assert done.returncode == code, done.stderr
    assert bool(done.stderr) == bool(code) and done.stderr.count(b"\n") <= 1
    return done.stdout.decode() if not code else done.stdout.decode() + done.stderr.decode()


def report(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(show(*arguments, "--json"))
    return found


# ---------------------------------------------------------------- a block


def test_a_block_of_qwen3_has_the_parameters_that_the_file_has(qwen3: Path) -> None:
    assert report(qwen3, "--block", "7") == {
        "model": "Qwen3-0.6B",
        "block": 7,
        "config": {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "gqa_group_size": 2,
            "ffn_ratio": 3.0,
            "rope_theta": 1e6,
        },
        "my_block_params": 15_730_944,
        "ref_layer_params": 15_730_944,
        "my_shapes": BLOCK,
        "ref_shapes": BLOCK,
        "problems": {},
    }


def test_a_block_is_shown_beside_that_of_the_files(hand_made: Path) -> None:
    lines = show(hand_made, "--block", "5", code=1).splitlines()
    table = {
        line[2:].split()[0]: line for line in lines[lines.index("") + 1 :] if line[:1] in ("!", " ") and line[2:]
    }
    assert table["self_attn.q_norm.weight"].split() == ["self_attn.q_norm.weight", "[128]", "[128]"]
    assert table["self_attn.k_norm.weight"].split() == ["!", "self_attn.k_norm.weight", "[128]", "[1024]"]
    assert re.fullmatch(r"! mlp\.gate_proj\.weight +\[3072, 1024\] +-", table["mlp.gate_proj.weight"])
    assert re.fullmatch(r"! mlp\.gate\.weight +- +\[8, 1024\]", table["mlp.gate.weight"])
    assert table["parameters"].split() == ["!", "parameters", "15,730,944", "12,594,304"]


def test_a_block_that_is_not_there_is_a_usage_error(qwen3: Path) -> None:
    assert "--block must be below 28, the number of layers of Qwen3-0.6B" in show(qwen3, "--block", "28", code=2)


# ---------------------------------------------------------------- a model


def test_a_page_has_the_figures_and_a_diagram_within_80_columns(qwen3: Path) -> None:
    page = show(qwen3)
    assert "\x1b" not in page and max(map(len, page.splitlines())) <= 80
    for text in (
        "596M (596,049,920)",
        "114,688 bytes a token in half precision, 229,376 in float32",
        "groups of 2 heads share keys; if none did, 229,376: 2.0 times as",
        "of no use: lm_head.weight",
        "every tensor as config.json asks",
        "layers 0-27: 15,730,944 parameters each",
        "attention, 16 heads of 128, 8 for keys and values (groups of 2)",
        "RoPE theta 1,000,000",
        "feed-forward, 3.0 times as wide",
    ):
        assert text in page
    diagram = page[page.index("x  1,024") :].splitlines()
    order = ["input_layernorm", "q_proj  1,024 → 2,048", "k_proj  1,024 → 1,024", "o_proj  2,048 → 1,024", "+◄"]
    order += ["post_attention_layernorm", "gate_proj  1,024 → 3,072", "down_proj  3,072 → 1,024", "+◄"]
    for wanted in order:
        while wanted not in diagram[0]:
            del diagram[0]
    assert tinyllm_on_a_terminal("inspect", qwen3).replace("\r\n", "\n") == page


def test_a_config_alone_is_enough_as_a_file_or_in_a_folder() -> None:
    for place in (CONFIG, QWEN3):
        found = report(place, "--shapes")
        assert (found["family"], found["weights"], found["problems"]) == ("qwen3", None, {})
        assert found["parameters"]["total"] == found["parameters"]["active"] == 596_049_920
        assert found["kv_cache"]["token_bytes"]["bfloat16"] == 114_688
        assert {row["name"]: row["expected"] for row in found["tensors"]} == {
            name: shape for name, shape in TENSORS.items() if name != "lm_head.weight"
        }
    assert report(CONFIG, "--block", "0")["ref_shapes"] is None


def test_every_tensor_is_listed_once_for_all_layers(qwen3: Path) -> None:
    listed = show(qwen3, "--shapes").splitlines()
    assert "  model.layers.{0-27}.self_attn.q_proj.weight  [2048, 1024] bf16" in listed
    assert "  model.embed_tokens.weight  [151936, 1024] bf16" in listed
    assert sum(line.endswith("] bf16") for line in listed) == len(BLOCK) + 2


def test_what_a_hand_made_checkpoint_lacks_is_marked(hand_made: Path) -> None:
    shown = show(hand_made, "--shapes", code=1)
    ending = "1 missing, 1 surplus, 28 mis-shaped\n"
    assert shown.endswith(f"tinyllm: mine: the weights do not fit config.json: {ending}")
    for line in (
        f"! {GATE}",
        "! model.layers.5.mlp.gate.weight",
        "! model.layers.{0-27}.self_attn.k_norm.weight is [1024], not [128]",
        "! model.layers.{0-27}.self_attn.k_norm.weight  [1024] bf16, expected [128]",
        f"! {GATE}  missing, expected [3072, 1024]",
        "! model.layers.5.mlp.gate.weight  [8, 1024] bf16, surplus",
        "check         30 differ from config.json, see below",
    ):
        assert line in shown.splitlines(), line
    done = tinyllm("inspect", hand_made, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert {kind: len(names) for kind, names in found["problems"].items()} == {
        "missing": 1,
        "surplus": 1,
        "mis-shaped": 28,
    }


def test_formats_of_packed_weights_are_told_by_layer() -> None:
    found = report(GOLDEN / "mlx-lm-mixed")["weights"]
    formats = {form["name"]: form for form in found["formats"]}
    assert formats["6-bit, groups of 32"]["matrices"] == ["model.layers.0.self_attn.v_proj.weight"]
    assert formats["8-bit, groups of 64"]["bits_per_weight"] == 8.5
    assert formats["bf16"]["matrices"] == ["model.layers.1.self_attn.o_proj.weight"]
    total = sum(form["parameters"] for form in found["formats"])
    assert total == report(GOLDEN / "mlx-lm-mixed")["parameters"]["total"]
    assert found["bits_per_weight"] == pytest.approx(8 * found["bytes"] / total)


def test_an_unknown_family_is_refused_with_those_that_are_near(tmp_path: Path) -> None:
    tiny.write_json(tmp_path / "config.json", {"model_type": "qwen33"})
    assert "model_type 'qwen33' is not one that tinyllm runs; the nearest that it does: qwen3" in show(
        tmp_path, code=1
    )


# ---------------------------------------------------------------- a machine


def test_a_plan_for_a_machine_is_shown(qwen3: Path) -> None:
    page = show(qwen3, "--fit", "16GB", "--context", "32768")
    assert "on a Mac with 16.0 GiB, of which Metal lends 10.7 GiB at least:" in page
    assert re.search(r"^  KV cache +up to [\d.]+ GiB  2 sequences of 32,768 tokens", page, re.MULTILINE)
    plan = report(qwen3, "--fit", "16GB", "--context", "32768")["plan"]
    assert (plan["context"], plan["available_bytes"]) == (32768, (16 << 30) * 2 // 3)
    assert plan["wired_bytes"] <= plan["available_bytes"]


def test_what_does_not_fit_says_what_would(qwen3: Path) -> None:
    told = show(qwen3, "--fit", "4GB", "--context", "32768", code=1)
    context = re.search(r"a context of ([\d,]+) tokens would fit", told)
    assert context is not None
    show(qwen3, "--fit", "4GB", "--context", context[1].replace(",", ""))
    assert "packed to 8 bits it would, with" in show(qwen3, "--fit", "1.6GB", code=1)
    assert "--fit must be the memory of a machine (16GB), not a share of it" in show(qwen3, "--fit", "40%", code=2)


# ---------------------------------------------------------------- what is not done


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        (
            (),
            {"tinyllm.checkpoint.gguf_tensors", "tinyllm.hub.pull", "tinyllm.engine.plan", "tinyllm.engine.request"},
        ),
        (("--fit", "16GB", "--shapes"), {"tinyllm.checkpoint.gguf_tensors", "tinyllm.hub.pull"}),
    ],
)
def test_what_is_of_no_use_is_not_loaded(qwen3: Path, options: tuple[str, ...], idle: set[str]) -> None:
    script = (
        "import sys; from tinyllm.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, *sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "inspect", qwen3, *options]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    code, *modules = done.stderr.split()
    assert code == "0" and "tinyllm.anatomy.page" in modules
    assert not ({"mlx", "numpy", "tokenizers", "safetensors", "huggingface_hub"} | idle) & set(modules)


def test_a_repository_is_looked_at_and_not_downloaded(machine: Machine) -> None:
    header, length = tiny.hollow_header(TENSORS)
    files = {"config.json": CONFIG.read_bytes(), "model.safetensors": header, "README.md": b"x"}
    machine.hub.repositories["org/qwen"] = Repository(files, sizes={"model.safetensors": length})
    done = machine.run("inspect", "org/qwen", "--block", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == b"tinyllm: org/qwen: it has not been downloaded: asking the hub\n"
    found = json.loads(done.stdout)
    assert (found["model"], found["ref_layer_params"]) == ("org/qwen", 15_730_944)
    assert machine.hub.fetched() == {"config.json", "model.safetensors"}
    assert [request.range for request in machine.hub.downloads()] == ["bytes=0-99999"]
    assert not machine.cache.exists()
    offline = machine.run_without_network("inspect", "org/qwen", "--offline")
    assert offline.returncode == 1 and b"--offline forbids asking the hub" in offline.stderr


def test_a_repository_with_a_config_alone_is_enough_and_what_is_wrong_is_told_by_its_name(machine: Machine) -> None:
    machine.hub.repositories["org/bare"] = Repository({"config.json": CONFIG.read_bytes(), "x.bin": b"x"})
    done = machine.run("inspect", "org/bare", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["weights"] is None
    machine.hub.repositories["org/odd"] = Repository({"config.json": b'{"model_type": "qwen33"}'})
    odd = machine.run("inspect", "org/odd")
    assert odd.returncode == 1 and odd.stderr.decode().splitlines()[-1].startswith("tinyllm: org/odd")
    assert b"'qwen33' is not one that tinyllm runs" in odd.stderr


def test_a_terminal_without_line_drawing_gets_ascii(qwen3: Path) -> None:
    done = tinyllm("inspect", qwen3, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert b"|    attention, 16 heads of 128" in done.stdout and b"q_proj  1,024 -> 2,048" in done.stdout
    assert b"?" not in done.stdout


def test_native_prints_a_config_that_says_the_same() -> None:
    written = json.loads(show(CONFIG, "--native"))
    assert [layer["repeat"] for layer in written["layers"]] == [28]
    native, original = Config.from_dict(written), Config.from_json_file(CONFIG)
    assert native == replace(original, model_type="tinyllm", family=native.family)


def test_native_goes_with_nothing_else() -> None:
    assert "--native prints a config.json" in show(CONFIG, "--native", "--json", code=2)
