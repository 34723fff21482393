"""Tokenizers of each kind, small enough to be built in a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
WORDS = ("a", "b", "c", " a", " b", "ab", "the", " the", "é", "日本", "\n", "\n\n", "  ", ".", ",", " '", "'s")
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_controls(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def byte_level() -> Tokenizer:
    """GPT-2's kind: every byte, a few merged words."""
    to_chars = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    vocab = list(alphabet)
    for word in WORDS:
        chars = "".join(piece for piece, _ in to_chars.pre_tokenize_str(word))
        for end in range(2, len(chars) + 1):
            if chars[:end] not in vocab:
                vocab.append(chars[:end])
                merges.append((chars[: end - 1], chars[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return add_controls(tokenizer)


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    """Llama 2's kind (Gemma's without `strip`): `▁` for a space, bytes for what the vocabulary lacks."""
    words = ["▁", *(word.replace(" ", "▁") for word in WORDS if "日" not in word)]
    vocab = dict.fromkeys(["<unk>", *BYTE_TOKENS, *words, *(char for word in words for char in word)])
    merges = [(word[:1], word[1:]) for word in words if len(word) == 2]
    model = models.BPE(
        vocab={t: i for i, t in enumerate(vocab)}, merges=merges, unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if strip else steps)
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    add_controls(tokenizer)
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return tokenizer


def words_of(*extra: str) -> dict[str, int]:
    return {t: i for i, t in enumerate(dict.fromkeys(["<unk>", *extra]))}


def metaspace(scheme: str = "always") -> Tokenizer:
    pieces = ["▁", "▁a", "▁b", "a", "b", "▁▁", "a▁b", "日本"]
    tokenizer = Tokenizer(models.WordLevel(words_of(*pieces), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return add_controls(tokenizer)


def word_piece(*, cleanup: bool = True) -> Tokenizer:
    pieces = ["a", "##b", "##", "##'s", "n't", "##n't", ".", "##.", "!", "'", "'m", "do", "not", "##ing"]
    tokenizer = Tokenizer(models.WordPiece(words_of(*pieces), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return add_controls(tokenizer)


def word_suffix() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(words_of("a</w>", "b", "</w>", "a</w>b"), unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return add_controls(tokenizer)


def unigram() -> Tokenizer:
    """Its vocabulary holds control strings, as SentencePiece's do."""
    pieces = ["<unk>", "<s>", "</s>", *"▁ab<>/s|", "▁a", "im"]
    tokenizer = Tokenizer(models.Unigram([(p, 0.0 if i < 3 else -float(i)) for i, p in enumerate(pieces)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return add_controls(tokenizer)


def with_decoder(*parts: Any) -> Callable[[], Tokenizer]:
    """Pieces of all sorts under another decoder (None for no decoder)."""

    def build() -> Tokenizer:
        pieces = ["  a ", " ", "xx", "x", "▁", "Ġa", "Ċ", "a  ", *BYTE_TOKENS[60:70], *BYTE_TOKENS[190:200]]
        tokenizer = Tokenizer(models.WordLevel(words_of(*pieces), unk_token="<unk>"))
        if parts:
            tokenizer.decoder = decoders.Sequence(list(parts))
        return add_controls(tokenizer)

    return build


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece, no strip": lambda: sentencepiece(strip=False),
    "metaspace": metaspace,
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, never": lambda: metaspace("never"),
    "word piece": word_piece,
    "word piece, no cleanup": lambda: word_piece(cleanup=False),
    "word suffix": word_suffix,
    "unigram": unigram,
    "no decoder": with_decoder(),
    "strip each": with_decoder(decoders.Strip(" ", 1, 0)),
    "strip all": with_decoder(decoders.Fuse(), decoders.Strip(" ", 2, 0)),
    "bytes, then byte level": with_decoder(decoders.ByteFallback(), decoders.ByteLevel()),
    "replace across": with_decoder(decoders.Fuse(), decoders.Replace("xx", "y")),
    "replace one": with_decoder(decoders.Fuse(), decoders.Replace("x", "yy"), decoders.Strip("y", 3, 0)),
    "ctc": with_decoder(decoders.CTC("x", " ", True)),
}  # fmt: skip


def save(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write a checkpoint folder; `files` are further JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    if config is not None:
        files["tokenizer_config"] = config
    for stem, value in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder
