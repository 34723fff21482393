"""Token ids to text, piece by piece.

tokenizer.json names the decoder that turns a list of token strings into text. Each kind is rebuilt here as a
stage that takes one token at a time and gives out what no later token can change, so that the pieces joined are
exactly the one-shot decode, in linear time. What no stage computes, `_HoldAll` decodes at the end: late, but right.

The semantics are those of the `tokenizers` library (tokenizers/src/decoders and pre_tokenizers/byte_level.rs).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["Detokenizer", "Stage", "build_stages"]


class Stage(Protocol):
    """One step of a decoder: tokens in, tokens out, held until no later token can change them."""

    def push(self, token: str) -> Iterable[str]:
        """Take the next token; give the tokens that are final now."""
        ...

    def close(self) -> Iterable[str]:
        """Give what was held; called once, at the end."""
        ...


class Detokenizer:
    """Text of a growing list of ids: `add` each id, then `finish`.

    "".join(add(i) for i in ids) + finish() equals `Tokenizer.decode(ids)` for any ids. One stream each, one thread.
    """

    def __init__(self, token_of: Callable[[int], str | None], stages: Sequence[Stage]):
        self._token_of = token_of
        self._stages = stages

    def add(self, token_id: int) -> str:
        """Text that is final with this id: "" while bytes of a character are missing, or for a skipped id."""
        token = self._token_of(token_id)
        return "" if token is None else self._run([token], self._stages)

    def finish(self) -> str:
        """Text that was held; bytes that never became a character are U+FFFD."""
        text = ""
        for depth, stage in enumerate(self._stages):
            text += self._run(stage.close(), self._stages[depth + 1 :])
        self._stages = [_Closed()]
        return text

    @staticmethod
    def _run(tokens: Iterable[str], stages: Sequence[Stage]) -> str:
        for stage in stages:
            tokens = [out for token in tokens for out in stage.push(token)]
        return "".join(tokens)


def build_stages(spec: Mapping[str, Any] | None, decode: Callable[[list[str]], str]) -> list[Stage]:
    """The stages of one stream for the `decoder` of tokenizer.json (None where it has none).

    `decode` is the library's own decoder, for kinds without a stage.
    """
    if spec is None:
        return [_Map(lambda index, token: token if index == 0 else " " + token)]
    stages: list[Stage] = []
    fused = False  # all text is one token from here on, so "first token" means "first character"
    for part in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
        stage = _stage(part, fused)
        if stage is None:
            return [_HoldAll(decode)]
        stages.append(stage)
        fused = fused or part["type"] in ("Fuse", "ByteLevel")
    return stages


def _stage(part: Mapping[str, Any], fused: bool) -> Stage | None:
    """The stage for one decoder, or None if no stage computes it on a text that is already fused."""
    kind = part["type"]
    if kind == "Fuse":
        return _Map(lambda index, token: token)
    if kind == "Strip":
        return _strip(part, fused)
    if kind == "Replace":
        return _replace(part, fused)
    if fused:
        return None
    if kind == "ByteLevel":
        return _ByteLevel()
    if kind == "ByteFallback":
        return _ByteFallback()
    if kind == "Metaspace":
        return _Map(_metaspace(part["replacement"], part.get("prepend_scheme", "always") != "never"))
    if kind == "WordPiece":
        return _Map(_word_piece(part["prefix"], part["cleanup"]))
    if kind == "BPEDecoder":
        return _WordSuffix(part["suffix"])
    return None


class _Map:
    """Each token alone: a function of its index and its text."""

    def __init__(self, function: Callable[[int, str], str]):
        self._function = function
        self._index = 0

    def push(self, token: str) -> Iterable[str]:
        self._index += 1
        return (self._function(self._index - 1, token),)

    def close(self) -> Iterable[str]:
        return ()


def _replace(part: Mapping[str, Any], fused: bool) -> Stage | None:
    pattern = part["pattern"].get("String")
    if not pattern or (fused and len(pattern) > 1):  # a regex, or a match that could span pieces
        return None
    return _Map(lambda index, token: token.replace(pattern, part["content"]))


def _strip(part: Mapping[str, Any], fused: bool) -> Stage | None:
    if part["stop"]:  # of the end; no tokenizer uses it, and the library fails on short tokens
        return None
    char, start = part["content"], part["start"]
    return _StripText(char, start) if fused else _Map(lambda index, token: _strip_left(token, char, start))


def _strip_left(text: str, char: str, most: int) -> str:
    return text[min(most, len(text) - len(text.lstrip(char))) :]


def _metaspace(replacement: str, strips_first: bool) -> Callable[[int, str], str]:
    def function(index: int, token: str) -> str:
        return token.replace(replacement, "" if index == 0 and strips_first else " ")

    return function


_CLEANUP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
            (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip


def _word_piece(prefix: str, cleanup: bool) -> Callable[[int, str], str]:
    def function(index: int, token: str) -> str:
        if index > 0:
            token = token[len(prefix) :] if token.startswith(prefix) else " " + token
        for old, new in _CLEANUP if cleanup else ():
            token = token.replace(old, new)
        return token

    return function


class _StripText:
    """Strip on fused text: up to `most` leading characters of all the text."""

    def __init__(self, char: str, most: int):
        self._char, self._left = char, most

    def push(self, token: str) -> Iterable[str]:
        text = _strip_left(token, self._char, self._left)
        self._left = 0 if text else self._left - len(token)
        return (text,)

    def close(self) -> Iterable[str]:
        return ()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's reversible alphabet: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class _ByteLevel:
    """Byte-level BPE: tokens are bytes in GPT-2's alphabet; an incomplete character waits for its bytes."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> Iterable[str]:
        try:
            data = bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token is plain text
            data = token.encode()
        return (self._utf8.decode(data),)

    def close(self) -> Iterable[str]:
        return (self._utf8.decode(b"", final=True),)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _ByteFallback:
    """SentencePiece's byte tokens `<0x0A>`: a run of them is one text if it is UTF-8, else a U+FFFD a byte.

    A later byte can spoil the whole run, so that a run is held until another token ends it.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> Iterable[str]:
        if match := _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(match[1], 16))
            return ()
        return (*self.close(), token)

    def close(self) -> Iterable[str]:
        run, self._run = bytes(self._run), bytearray()
        try:
            return (run.decode(),) if run else ()
        except UnicodeDecodeError:
            return ("\ufffd",) * len(run)


class _WordSuffix:
    """BPEDecoder: a suffix such as `</w>` is a space, but at the end of the text nothing."""

    def __init__(self, suffix: str):
        self._suffix = suffix
        self._last: str | None = None

    def push(self, token: str) -> Iterable[str]:
        last, self._last = self._last, token
        return () if last is None else (last.replace(self._suffix, " "),)

    def close(self) -> Iterable[str]:
        return () if self._last is None else (self._last.replace(self._suffix, ""),)


class _HoldAll:
    """A decoder of unknown reach: everything waits for the end, where the library decodes it."""

    def __init__(self, decode: Callable[[list[str]], str]):
        self._decode = decode
        self._tokens: list[str] = []

    def push(self, token: str) -> Iterable[str]:
        self._tokens.append(token)
        return ()

    def close(self) -> Iterable[str]:
        return (self._decode(self._tokens),) if self._tokens else ()


class _Closed:
    """What is left of a finished stream."""

    def push(self, token: str) -> Iterable[str]:
        raise ValueError("this detokenizer has finished; make another for the next stream")

    def close(self) -> Iterable[str]:
        return ()
