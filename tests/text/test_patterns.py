import threading

import pytest

from tinyllm.text.patterns import Risk, patterns_in, risk_of, within

IN_USE = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "kimi": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "digits from the right": r"(?=(\d{3})+(?!\d))",
    "digits in threes": r"\d{1,3}(?=(?:\d{3})*\b)",
}


@pytest.mark.parametrize("name", IN_USE)
def test_patterns_in_use_are_without_risk(name):
    """fault 55: what real tokenizers have is neither refused nor watched."""
    assert risk_of(IN_USE[name]) is Risk.NONE


@pytest.mark.parametrize(
    "pattern", [r"(a+)+$", r"(a*)*b", r"(x+x+)+y", r"(?:\p{L}+)+\d", r"((?:a+)b?)*c", r"(?:(a+)+)(?=z)", r"(a{2,})*b"]
)
def test_a_repeat_within_a_repeat_is_refused(pattern):
    """fault 55."""
    assert risk_of(pattern) is Risk.NESTED


@pytest.mark.parametrize(
    "pattern", [r"(a|aa)+$", r"a*a*b", r"(a?){30}a{30}", r"(\w)\1+", r"(?:a+b)*c", r"(unclosed", r"[unclosed"]
)
def test_what_may_be_slow_is_watched(pattern):
    """fault 55."""
    assert risk_of(pattern) is Risk.SLOW


@pytest.mark.parametrize("pattern", [r"(?>a+)+b", r"(?:a++)+b", r"(a+)+", r"(?#(a+)+b)c", r"[(a+)+]b", r"\(a+\)b"])
def test_what_only_looks_like_it_is_without_risk(pattern):
    assert risk_of(pattern) is Risk.NONE


def test_patterns_are_found_wherever_they_are():
    spec = {"type": "Sequence", "pretokenizers": [{"pattern": {"Regex": "a+"}}, {"pattern": {"String": "b"}}]}
    assert list(patterns_in(spec)) == ["a+"]


def test_within_gives_the_result_or_the_error():
    assert within(5, lambda: 1) == 1
    with pytest.raises(KeyError):
        within(5, lambda: {}["absent"])


def test_within_gives_up():
    release = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, lambda: release.wait(60))
    release.set()
