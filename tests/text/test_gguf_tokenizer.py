"""Tokenizers in GGUF files give the ids of the tokenizer.json that they were made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import real_tokenizers
from gguf_files import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tinyllm.checkpoint.gguf_cuts import CUTS
from tinyllm.checkpoint.gguf_header import GgufHeader, read_gguf_header
from tinyllm.checkpoint.gguf_tokenizer import read_tokenizer
from tinyllm.errors import ChatTemplateError, TokenizerError
from tinyllm.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = map(int, list(gguf.TokenType))
TEXTS = (
    "",
    " ",
    "Hello world",
    "  the the\n\n the",
    "<|end|> is text",
    "é e\u0301 汉字 😀 12345",
    "the<|end|>",
    "a<x>b",
)
FILE = Path("model.gguf")


def facts(kinds: Mapping[str, int], kind: str, /, **more: Any) -> dict[str, Any]:
    """Return metadata: tokens with their types, and whatever else there is."""
    said = {"model": kind, "tokens": tuple(kinds), "token_type": tuple(kinds.values()), **more}
    return {f"tokenizer.ggml.{name}": value for name, value in said.items() if value is not None}


def header(metadata: Mapping[str, Any]) -> GgufHeader:
    return GgufHeader(FILE, metadata, {})


def byte_level(**more: Any) -> dict[str, Any]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {**dict.fromkeys([*letters, "Ġt", "he", "Ġthe"], NORMAL), "<|end|>": CONTROL, "<x>": USER}
    merges = ("Ġ t", "h e", "Ġt he")
    return facts(tokens, "gpt2", **{"pre": "gpt-2", "merges": merges, "eos_token_id": len(letters) + 3, **more})


def sentencepiece(**more: Any) -> dict[str, Any]:
    pieces = {
        "▁": -1.0,
        "t": -2.0,
        "h": -2.5,
        "e": -3.0,
        "he": -4.0,
        "th": -5.0,
        "the": -4.5,
        "▁the": -4.25,
        "▁▁": -9.0,
    }
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **{f"<0x{i:02X}>": BYTE for i in range(256)}}
    tokens |= dict.fromkeys(pieces, NORMAL)
    scores = (*[0.0] * 259, *pieces.values())
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return facts(tokens, "llama", **{"scores": scores, **ids, **more})


def reference(cut: str) -> Backend:
    said = byte_level()
    vocab = {token: i for i, token in enumerate(said["tokenizer.ggml.tokens"])}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    backend = Backend(models.BPE(vocab, merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<x>", normalized=False)])
    return backend


@pytest.mark.parametrize("cut", ["gpt-2", "smollm"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_ids_are_those_of_the_original(text: str, cut: str) -> None:
    found = read_tokenizer(header(byte_level(pre=cut))).backend
    assert found.encode(text).ids == reference(cut).encode(text).ids
    assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text.replace("e\u0301", "e\u0301")


@given(st.text(max_size=40))
def test_every_way_to_cut_text_loses_none_of_it(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    for name, cut in CUTS.items():
        if not cut.composed:
            backend = read_tokenizer(header(byte_level(pre=name, add_bos_token=False))).backend
            assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == text


def pieces(name: str, text: str) -> list[str]:
    backend = read_tokenizer(header(byte_level(pre=name))).backend
    normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return [normal[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(normal)]


# What tells the ways to cut text apart.
CUT = [
    ("gpt-2", "We've 1234 x's\n\n y", ["We", "'ve", " 1234", " x", "'s", "\n\n", " y"]),
    ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
    ("llama-bpe", "a 12345\n b", ["a", " ", "123", "45", "\n", " b"]),
    ("lfm2", "Don'T x", ["Don", "'T", " x"]),
    ("qwen2", "ab12 c", ["ab", "1", "2", " c"]),
    ("qwen35", "क्या है", ["क्या", " है"]),
    ("stablelm2", "क्या", ["क", "्य", "ा"]),
    ("tekken", "camelCase", ["camel", "Case"]),
    ("gpt-4o", "CamelCase's 1234", ["Camel", "Case's", " ", "123", "4"]),
    ("kimi-k2", "ab汉字cd 12345", ["ab", "汉字", "cd", " ", "123", "45"]),
    ("deepseek-llm", "Hello, 12 汉字", ["Hello", ",", " ", "12", " ", "汉字"]),
    ("deepseek-coder", "a+b 12", ["a", "+", "b", " ", "1", "2"]),
    ("deepseek-v3", "f(x) 12345", ["f", "(x", ")", " ", "123", "45"]),
    ("falcon", "a-b 12345", ["a", "-", "b", " ", "123", "45"]),
    ("bloom", "Hi there, 12.5", ["Hi", " there", ",", " 12", ".", "5"]),
    ("viking", "a 12", ["a", " ", "1", "2"]),
    ("superbpe", "the cat 1234567", ["the cat ", "1", "234", "567"]),
    ("tiny_aya", "1234567 a", ["1", "234", "567", " a"]),
    ("seed-coder", "a+\n b12", ["a", "+", "\n", " b", "1", "2"]),
    ("bailingmoe", "I'M 12\n\nb", ["I", "'M", " ", "1", "2", "\n\n", "b"]),
    ("exaone-moe", "two words 12", ["two words", " ", "1", "2"]),
    ("jais-2", "a     b", ["a", "    ", " b"]),
    ("minicpm5", "ab1234", ["ab", "123", "4"]),
    ("youtu", "한글abc 12", ["한글", "abc", " ", "1", "2"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "wanted"), CUT, ids=[name for name, _, _ in CUT])
def test_text_is_cut_as_its_model_does(name: str, text: str, wanted: list[str]) -> None:
    assert pieces(name, text) == wanted


def test_pieces_are_merged_by_their_scores() -> None:
    backend = read_tokenizer(header(sentencepiece())).backend
    assert backend.encode("the  the").tokens == ["<s>", "▁the", "▁", "▁the"]
    assert backend.encode("tthe").tokens == ["<s>", "▁", "t", "the"]
    assert backend.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert backend.decode(backend.encode("the é the").ids) == "the é the"


def test_no_space_is_put_before_where_the_file_says_so() -> None:
    backend = read_tokenizer(header(sentencepiece(add_space_prefix=False))).backend
    assert backend.encode("the").tokens == ["<s>", "the"]
    assert backend.decode(backend.encode(" the").ids) == " the"


@pytest.mark.parametrize(("bos", "eos"), [(None, None), (False, False), (True, True), (False, True)])
def test_what_an_encoding_begins_and_ends_with(bos: bool | None, eos: bool | None) -> None:
    flags = {name: flag for name, flag in (("add_bos_token", bos), ("add_eos_token", eos)) if flag is not None}
    found = Tokenizer(read_tokenizer(header(sentencepiece(**flags))).backend)
    begins, ends = bos is not False, bool(eos)
    wanted = [1] * begins + found.encode("the", add_special_tokens=False) + [2] * ends
    assert found.encode("the") == wanted


DAMAGED: list[tuple[dict[str, Any], str]] = [
    (byte_level(model="rwkv"), "'rwkv', which tinyllm does not read"),
    (byte_level(model=None), "None, which tinyllm does not read"),
    (byte_level(pre="nobody's"), "nobody's"),
    (byte_level(pre=None), "cuts text is called None"),
    (byte_level(tokens=()), "tokens, and types|none"),
    (byte_level(tokens=7), "no list of str"),
    (byte_level(token_type=(1, 1)), "types of 2"),
    (byte_level(merges=("Ġ t", "three of them")), "not of two tokens"),
    (byte_level(merges=("Ġ nothing",)), "cannot be made"),
    (byte_level(merges=(1, 2)), "no list of str"),
    (sentencepiece(scores=(1.0,)), "scores of 1"),
    (sentencepiece(tokens=tuple("ab" * 134)), "twice"),
]


@pytest.mark.parametrize(("metadata", "told"), DAMAGED, ids=[told for _, told in DAMAGED])
def test_what_cannot_be_made_is_refused_by_name(metadata: dict[str, Any], told: str) -> None:
    with pytest.raises(TokenizerError, match=told) as failure:
        read_tokenizer(header(metadata))
    assert str(failure.value).startswith("model.gguf: ")
    assert str(failure.value).isprintable()


def written(path: Path, template: str | None) -> Tokenizer:
    said = {name: list(value) if isinstance(value, tuple) else value for name, value in sentencepiece().items()}
    extra = {} if template is None else {"tokenizer.chat_template": template}
    return Tokenizer.from_gguf(read_gguf_header(write_gguf(path, "llama", {**said, **extra}, {})))


def test_the_template_of_the_file_runs(tmp_path: Path) -> None:
    tokenizer = written(tmp_path / "model.gguf", "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}")
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
    ids = tokenizer.encode_chat([{"role": "user", "content": "the </s>"}])
    assert ids[0] == 1 and ids[-1] == 2
    assert 2 not in ids[:-1]  # what a person writes is text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(999999999) %}{% for j in range(999999999) %}x{% endfor %}{% endfor %}",
    ],
)
def test_fault_54_a_template_in_a_file_reaches_nothing_of_python(template: str, tmp_path: Path) -> None:
    tokenizer = written(tmp_path / "model.gguf", template)
    with pytest.raises(ChatTemplateError):
        tokenizer.encode_chat([{"role": "user", "content": "the"}])


def test_a_file_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        written(tmp_path / "model.gguf", None).encode_chat([{"role": "user", "content": "the"}])


REAL = {"llama3_1": "llama-bpe", "qwen3": "qwen2", "gptoss": "gpt-4o", "deepseek_v3": "deepseek-v3", "llama2": None}


@pytest.mark.parity
@pytest.mark.parametrize("name", REAL)
def test_ids_are_those_of_published_tokenizers(name: str) -> None:
    """Written as llama.cpp's converter does; a SentencePiece file's scores are put in the order of its merges."""
    file = next(real_tokenizers.fetch(name).rglob("tokenizer.json"))
    original = Backend.from_file(str(file))
    found = read_tokenizer(header(converted(json.loads(file.read_text(encoding="utf-8")), REAL[name]))).backend
    ours, theirs = Tokenizer(found), Tokenizer(original)
    for text in (*TEXTS, "def f(x):\n    return x**2\n\n", "CamelCase don'T ١٢٣ \u00a0 \t x", "<|im_start|>user"):
        for flags in ({}, {"parse_special": True}, {"add_special_tokens": False}):
            assert ours.encode(text, **flags) == theirs.encode(text, **flags)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))


def converted(spec: Mapping[str, Any], cut: str | None) -> dict[str, Any]:
    model, added = spec["model"], spec["added_tokens"]
    size = max(*model["vocab"].values(), *(token["id"] for token in added)) + 1
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [UNUSED] * size
    for token, i in model["vocab"].items():
        tokens[i], kinds[i] = token, BYTE if cut is None and token.startswith("<0x") else NORMAL
    for token in added:
        tokens[token["id"]], kinds[token["id"]] = token["content"], CONTROL if token["special"] else USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    said = facts({}, "llama" if cut is None else "gpt2", tokens=tuple(tokens), token_type=tuple(kinds))
    if cut is None:
        first = {merge.replace(" ", ""): -i for i, merge in reversed(list(enumerate(merges)))}
        scores = tuple(float(first.get(token, -size)) for token in tokens)
        more = {"scores": scores, "bos_token_id": tokens.index("<s>"), "unknown_token_id": tokens.index("<unk>")}
    else:
        more = {"pre": cut, "merges": tuple(merges)}
        if cut == "llama-bpe":
            more["bos_token_id"] = tokens.index("<|begin_of_text|>")
    return said | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def test_normal_forms_are_those_of_the_original() -> None:
    backend = read_tokenizer(header(byte_level(pre="qwen2"))).backend
    assert isinstance(backend.normalizer, normalizers.NFC)
