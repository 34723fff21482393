"""The tokenizer in a GGUF file's metadata, as one of the `tokenizers` library. No mlx.

A file names its kind ("gpt2": byte-level BPE; "llama": SentencePiece's BPE) and, of the first kind, how text is cut
before merging.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyllm.checkpoint.gguf_cuts import ADDS_BOS, CUTS, Cut
from tinyllm.checkpoint.gguf_header import GgufHeader
from tinyllm.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

__all__ = ["GgufTokenizer", "read_tokenizer"]

_UNKNOWN, _CONTROL, _USER_DEFINED, _NORMAL, _BYTE = 2, 3, 4, 1, 6
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_SPACE = "▁"
# Hugging Face's names of special tokens, and GGUF's.
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # as GGUF spells it
    "mask_token": "mask",
}
_BLANK = re.compile(rf"[\s{_SPACE}]*")
_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class GgufTokenizer:
    """The library's tokenizer, special tokens by the names that templates give them, and the templates by name."""

    backend: Backend
    named: Mapping[str, str]
    templates: Mapping[str, str]


def read_tokenizer(header: GgufHeader) -> GgufTokenizer:
    """Make the tokenizer of a GGUF file. Raises TokenizerError for a kind that is unknown, or one that is damaged."""
    facts = _Facts(header)
    makers: Mapping[Any, Callable[[_Facts], Backend]] = {_BYTE_LEVEL: _byte_level, _SENTENCEPIECE: _sentencepiece}
    if not isinstance(facts.kind, str) or facts.kind not in makers:
        raise facts.fail(
            f"its tokenizer is of kind {facts.kind!r:.40}, which tinyllm does not read ({', '.join(makers)})"
        )
    backend = makers[facts.kind](facts)
    _add_special(backend, facts)
    return GgufTokenizer(backend, facts.named, _templates(header.metadata))


class _Facts:
    """What the metadata says of a tokenizer, checked."""

    def __init__(self, header: GgufHeader) -> None:
        self._metadata = header.metadata
        self._file = header.file
        self.tokens: Sequence[str] = self.listed("tokens", str)
        self.kind = self.value("model")
        self.kinds: Sequence[int] = self.listed("token_type", int) or (_NORMAL,) * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise self.fail(f"it has {len(self.tokens):,} tokens, and types of {len(self.kinds):,}")
        if self.kind == _SENTENCEPIECE:
            self.tokens = [
                token.replace(" ", _SPACE) if kind == _USER_DEFINED else token
                for token, kind in zip(self.tokens, self.kinds, strict=True)
            ]
        self.vocab = {token: i for i, token in enumerate(self.tokens)}
        if not self.tokens or len(self.vocab) != len(self.tokens):
            raise self.fail("its tokens are none, or one of them is there twice")
        self.named = {name: self.tokens[i] for name, key in _NAMED.items() if (i := self.token_id(key)) is not None}

    def fail(self, what: str) -> TokenizerError:
        return TokenizerError(f"{self._file}: {what}")

    def value(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.value(name, default))

    def listed(self, name: str, kind: type) -> Any:
        found = self.value(name, ())
        if not isinstance(found, tuple) or not all(type(value) is kind for value in found):
            raise self.fail(f"tokenizer.ggml.{name} is no list of {kind.__name__}")
        return found

    def token_id(self, key: str) -> int | None:
        """Return the id of a special token, one of those that there are."""
        found = self.value(f"{key}_token_id")
        return found if type(found) is int and 0 <= found < len(self.tokens) else None

    def of_kind(self, kind: int) -> list[str]:
        return [token for token, its in zip(self.tokens, self.kinds, strict=True) if its == kind]


def _byte_level(facts: _Facts) -> Backend:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    cut = _cut_of(facts)
    merges = [tuple(merge.split(" ")) for merge in facts.listed("merges", str)]
    if any(len(merge) != 2 for merge in merges):
        raise facts.fail("one of its merges is not of two tokens")
    model = _guarded(lambda: models.BPE(facts.vocab, merges, ignore_merges=cut.whole), facts)
    backend = Backend(model)
    if cut.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(cut)
    backend.decoder = decoders.ByteLevel()
    return backend


def _cut_of(facts: _Facts) -> Cut:
    name = facts.value("pre")
    if not isinstance(name, str) or name not in CUTS:
        raise facts.fail(
            f"how its tokenizer cuts text is called {name!r:.40}, which tinyllm does not know ({', '.join(CUTS)})"
        )
    return CUTS[name]


def _pre_tokenizer(cut: Cut) -> Any:
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.single else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.patterns))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(facts: _Facts) -> Backend:
    """BPE whose merges are not stored: any two pieces that make up a third are merged, the likeliest first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores = facts.listed("scores", float)
    if len(scores) != len(facts.tokens):
        raise facts.fail(f"it has {len(facts.tokens):,} tokens, and scores of {len(scores):,}")
    unknown = facts.named.get("unk_token") or next(iter(facts.of_kind(_UNKNOWN)), None)
    merges = _merges(facts, scores)
    bytes_known = len(facts.of_kind(_BYTE)) == 256
    model = _guarded(
        lambda: models.BPE(facts.vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_known), facts
    )
    backend = Backend(model)
    before = facts.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces] if before else [spaces])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if before else steps)
    return backend


def _merges(facts: _Facts, scores: Sequence[float]) -> list[tuple[str, str]]:
    vocab = facts.vocab
    found: list[tuple[float, int, int, int]] = []
    for piece, i in vocab.items():
        if facts.kinds[i] in (_NORMAL, _USER_DEFINED):
            for end in range(1, len(piece)):
                left, right = vocab.get(piece[:end]), vocab.get(piece[end:])
                if left is not None and right is not None:
                    found.append((-scores[i], i, left, right))
    found.sort()
    return [(facts.tokens[left], facts.tokens[right]) for _, _, left, right in found]


def _add_special(backend: Backend, facts: _Facts) -> None:
    """Have control tokens matched in text, and those that a person has added; then what an encoding begins with."""
    from tokenizers import AddedToken, processors

    pieces = facts.kind == _SENTENCEPIECE
    special = {*facts.of_kind(_CONTROL), *facts.named.values(), *(facts.of_kind(_UNKNOWN) if pieces else ())}
    # Runs of spaces and lines are merged as pieces are; others stand for themselves.
    plain = [t for t in facts.of_kind(_USER_DEFINED) if t not in special and not (pieces and _BLANK.fullmatch(t))]
    ordered = sorted(special - {""}, key=facts.vocab.__getitem__)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ordered])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain if token])
    pre = facts.value("pre")
    begins = facts.flag("add_bos_token", pieces or pre in ADDS_BOS) and "bos_token" in facts.named
    ends = facts.flag("add_eos_token", False) and "eos_token" in facts.named
    if begins or ends:
        around = [facts.named["bos_token"] if begins else None, "$A", facts.named["eos_token"] if ends else None]
        parts = [part for part in around if part is not None]
        ids = [(part, facts.vocab[part]) for part in dict.fromkeys(parts) if part != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {"default": metadata.get(_TEMPLATE)}
    prefix = f"{_TEMPLATE}."
    found |= {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _guarded(make: Callable[[], Any], facts: _Facts) -> Any:
    """What the Rust library raises (panics are no `Exception`) becomes a TokenizerError."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise facts.fail(f"its tokenizer cannot be made: {' '.join(str(error).split())[:300]}") from error
