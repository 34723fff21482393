"""`--kv-bits` through real processes: less memory a token, said in figures; what cannot be packed is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
from process import tinyllm

# 2 layers, 2 heads of 64, keys and values, float32: words, a scale and a bias.
TOKEN_BYTES = {None: 2 * 2 * 2 * 256, 8: 2 * 2 * 2 * (64 + 8), 4: 2 * 2 * 2 * (32 + 8)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "model"
    return tiny.write_checkpoint(folder, config_overrides={"head_dim": 64}, chat_template=tiny.CHAT_TEMPLATE)


@pytest.mark.parametrize("bits", TOKEN_BYTES)
def test_figures_say_bits_and_bytes_a_token(model: Path, bits: int | None) -> None:
    packed = [] if bits is None else ["--kv-bits", str(bits)]
    done = tinyllm("generate", "count", "-m", model, "--json", "-n", "2", "--eager", *packed)
    memory = json.loads(done.stdout)["memory"]
    assert (memory["kv_bits"], memory["kv_token_bytes"]) == (bits, TOKEN_BYTES[bits])
    assert memory["kv_bytes"] == 128 * TOKEN_BYTES[bits]
    done = tinyllm("generate", "count", "-m", model, "--stats", "-n", "2", "--eager", *packed)
    said = "" if bits is None else f" in {bits} bits"
    assert f"{said}, {TOKEN_BYTES[bits]:,} bytes a token · context" in done.stderr.decode()


@pytest.mark.parametrize("arguments", [("generate", "count"), ("inspect", "--fit", "8GB")], ids=str)
def test_other_bits_are_refused(model: Path, arguments: tuple[str, ...]) -> None:
    name = [model] if arguments[0] == "inspect" else ["-m", model]
    done = tinyllm(*arguments, *name, "--kv-bits", "3")
    assert (done.returncode, done.stderr) == (2, b"tinyllm: --kv-bits must be 8 or 4, not 3\n")


def test_fault_38_heads_that_cannot_be_packed_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "odd", config_overrides={"head_dim": 80})
    done = tinyllm("generate", "count", "-m", folder, "--raw", "--kv-bits", "8")
    assert done.returncode == 1
    assert b"odd: keys and values of 80 elements a head cannot be packed" in done.stderr
    assert b"none divides 80; leave --kv-bits out" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_inspect_counts_what_would_be_packed(model: Path) -> None:
    facts = json.loads(tinyllm("inspect", model, "--json", "--fit", "8GB", "--kv-bits", "4").stdout)
    assert facts["kv_cache"]["packed_token_bytes"] == {"8": 8 * (64 + 4), "4": 8 * (32 + 4)}
    assert (facts["plan"]["kv_bits"], facts["plan"]["token_bytes"]) == (4, TOKEN_BYTES[4])
    page = tinyllm("inspect", model, "--fit", "8GB", "--kv-bits", "8").stdout.decode()
    assert "packed, 544 with --kv-bits 8, 288 with --kv-bits 4" in page
    assert "576 bytes a token, packed to 8 bits" in " ".join(page.split())
    done = tinyllm("inspect", model, "--kv-bits", "8")
    assert (done.returncode, b"--fit" in done.stderr) == (2, True)


def test_bench_measures_caches_in_turns(model: Path) -> None:
    sizes = ("-p", "8", "-n", "2", "-r", "1", "--no-warmup", "--features", "eager", "-o", "json")
    done = tinyllm("bench", "-m", model, *sizes, "--kv-bits", "none,8,4", "--kv", "paged,dense")
    results = json.loads(done.stdout)["results"]
    caches = {result["model"]["kv"]: result["model"]["kv_bytes_per_token"] for result in results}
    assert caches == {
        f"{kv}{'' if bits is None else f' {bits} bits'}": nbytes
        for bits, nbytes in TOKEN_BYTES.items()
        for kv in ("paged", "dense")
    }
    done = tinyllm("bench", "-m", model, "--kv-bits", "8,5")
    assert (done.returncode, b"--kv-bits: there is none, 8, 4, and no '5'" in done.stderr) == (2, True)


def test_ops_counts_a_step_on_packed_pages(model: Path) -> None:
    plain, packed = (
        tinyllm("bench", "-m", model, "--ops", "--kv-bits", bits).stdout.decode() for bits in ("none", "8")
    )
    assert "paged 8 bits KV cache" in packed
    for table, writes in ((plain, 2), (packed, 6)):  # of keys and values, and of what they are packed to
        assert re.search(rf"^\| cache write +\| +{2 * writes} \| +{writes} \|$", table, re.MULTILINE)
