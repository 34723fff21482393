"""How byte-level tokenizers cut text before they merge its pieces, by the names that GGUF files have for it. No mlx.

The patterns are those of the tokenizer.json (or tiktoken's definition) of the model that a name is called after, as
llama.cpp's llama-vocab.cpp restates them. Each is applied to what the one before it has left whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ADDS_BOS", "CUTS", "Cut"]


@dataclass(frozen=True)
class Cut:
    """How text is cut: by `patterns` one after the other, or by GPT-2's own where there are none.

    Digits stand alone where they are `single`. Text is in Unicode's normal form C where it is `composed`, and a piece
    that is a token is taken whole, without merging, where it is `whole`.
    """

    patterns: Sequence[str] = ()
    single: bool = False
    composed: bool = False
    whole: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASCADE = (
    r"\s*[\r\n]+|"
    + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ONE_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"


def _words(digits: str, letters: str = r"\p{L}", signs: str = rf"{_SIGNS}[\r\n]*", lines: str = _LINES) -> str:
    """Contractions, words, so many digits, punctuation, lines (Llama 3, Qwen 2)."""
    return rf"{_CONTRACTIONS}|{_ONE_BEFORE}{letters}+|{digits}|{signs}|{lines}"


def _cased_words(contractions: str, digits: str, *, but: str = "", signs: str = rf"{_SIGNS}[\r\n/]*") -> str:
    """Words that begin anew where a capital follows a small letter (Tekken, GPT-4o)."""
    upper, lower = (f"[{letters}{but}]" for letters in (_UPPER, _LOWER))
    word = rf"{_ONE_BEFORE}{upper}*{lower}+{contractions}|{_ONE_BEFORE}{upper}+{lower}*{contractions}"
    return rf"{word}|{digits}|{signs}|{_LINES}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN3_5 = _words(r"\p{N}", r"[\p{L}\p{M}]", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_GPT_4O = _cased_words(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_CHINESE = "[一-龥ࠀ-一가-퟿]+"
_HAN_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _HAN_KANA,
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")
# Letters that have a case, as they were when DeepSeek's first tokenizer was made.
_CASED = """
    41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c
    38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b
    1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4
    1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113
    2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b
    2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06
    fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df
    1e900-1e943
    """.split()
_CASED_LETTERS = "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in _CASED)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CHINESE,
    r"\p{N}+",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_KIMI_K2 = r"\p{Han}+|" + _cased_words(
    f"{_CONTRACTIONS}?", r"\p{N}{1,3}", but=r"&&[^\p{Han}]", signs=rf"{_SIGNS}[\r\n]*"
)
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_ONE_BEFORE}\p{{L}}+|\p{{N}}|{_SIGNS}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_YOUTU = (
    f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_HAN_KANA}",
    _cased_words(f"{_CONTRACTIONS}?", r"\p{N}"),
)
_SEED_CODER = _words(r"\p{N}{1}", signs=r" ?[^\s\p{L}\p{N}\r\n]+")
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|{_ONE_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SIGNS}[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _alike(names: str, cut: Cut) -> dict[str, Cut]:
    return dict.fromkeys(names.split(), cut)


CUTS: Mapping[str, Cut] = {
    **_alike("gpt-2 phi-2 mpt olmo jais trillion mellum modern-bert gigachat a.x-4.0 exaone4 granite-docling", Cut()),
    **_alike("smollm starcoder refact codeshell exaone minerva-7b mellum2", Cut(single=True)),
    "command-r": Cut(single=True, composed=True),
    **_alike("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", Cut((_LLAMA3,), whole=True)),
    **_alike("dbrx smaug-bpe chatglm-bpe glm4", Cut((_LLAMA3,))),
    "minicpm5": Cut((r"\p{N}{1,3}", _words(r"\p{N}+")), whole=True),
    "jais-2": Cut((_words(r"\p{N}{1,3}", lines=_CASCADE),)),
    **_alike("qwen2 deepseek-r1-qwen megrez kormo", Cut((_QWEN2,), composed=True)),
    **_alike("stablelm2 hunyuan solar-open grok-2", Cut((_QWEN2,))),
    "qwen35": Cut((_QWEN3_5,), composed=True),
    "seed-coder": Cut((_SEED_CODER,)),
    "exaone-moe": Cut((_EXAONE_MOE,)),
    **_alike("bailingmoe bailingmoe2 llada-moe", Cut((_BAILING,))),
    "tekken": Cut((_cased_words("", r"\p{N}"),), whole=True),
    **_alike("gpt-4o llama4 kanana2 minimax-m2", Cut((_GPT_4O,), whole=True)),
    **_alike("tiny_aya cohere2moe", Cut((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O))),
    "kimi-k2": Cut((_KIMI_K2,)),
    "youtu": Cut(_YOUTU, whole=True),
    "deepseek-llm": Cut(_DEEPSEEK_LLM),
    "deepseek-coder": Cut(_DEEPSEEK_CODER),
    **_alike("deepseek-v3 hunyuan-dense joyai-llm", Cut(_DEEPSEEK3)),
    "falcon": Cut(_FALCON),
    **_alike("bloom poro-chat gpt3-finnish", Cut((_BLOOM,))),
    "viking": Cut((_BLOOM, r"\p{N}")),
    "superbpe": Cut((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}
# Those whose encodings begin with the token for that, where a file does not say.
ADDS_BOS = frozenset("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split())
