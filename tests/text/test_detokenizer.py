import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, byte_level, metaspace, sentencepiece, with_decoder

from tinyllm.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(byte_level())
SENTENCEPIECE = Tokenizer(sentencepiece())
# The characters that stand for the bytes 0 to 255, by GPT-2's rule.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
REST = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_CHARS = [chr(byte) if byte in PRINTABLE else chr(256 + REST.index(byte)) for byte in range(256)]


def stream(tokenizer, ids, **kwargs):
    """The pieces, the last of them from finish."""
    detokenizer = tokenizer.detokenizer(**kwargs)
    return [*map(detokenizer.add, ids), detokenizer.finish()]


def ids_of(tokenizer, *tokens):
    ids = [tokenizer.token_id(token) for token in tokens]
    assert None not in ids
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_the_joined_stream_is_the_decode(kind):
    """fault 16, and every decoder that tokenizer.json may name."""
    tokenizer = Tokenizer(KINDS[kind]())

    @given(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24), st.booleans())
    def check(ids, skip):
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == expected

    check()


@pytest.mark.parametrize(
    ("kind", "words"),
    [("byte level", "ab"), ("sentencepiece", "ab"), ("metaspace", "ab"), ("word piece", ["a", "##b"]),
     ("no decoder", ["x", "xx"])],
)  # fmt: skip
def test_text_comes_with_its_token(kind, words):
    tokenizer = Tokenizer(KINDS[kind]())
    pieces = stream(tokenizer, ids_of(tokenizer, *words))
    assert all(pieces[:2])
    assert pieces[2] == ""


def test_a_character_split_over_tokens_waits_for_its_bytes():
    """fault 15: an emoji as two tokens of two bytes."""
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("😀")
    assert len(ids) == 4
    assert stream(tokenizer, ids) == ["", "", "", "😀", ""]


def test_half_a_character_before_a_space_is_one_replacement_mark():
    """fault 15: the first half, then a token that begins with a space."""
    tokenizer = Tokenizer(byte_level())
    ids = [*tokenizer.encode("😀")[:2], *ids_of(tokenizer, "Ġa")]
    assert stream(tokenizer, ids) == ["", "", "\ufffd a", ""]


def test_half_a_character_at_the_end_is_one_replacement_mark():
    """fault 15: the stream ends in mid-character."""
    tokenizer = Tokenizer(byte_level())
    assert stream(tokenizer, tokenizer.encode("a😀")[:3]) == ["a", "", "", "\ufffd"]


@given(st.binary(max_size=12))
def test_any_bytes_are_what_the_library_makes_of_them(data):
    """fault 15: invalid bytes too, by byte-level tokens and by byte-fallback tokens."""
    for tokenizer, ids in (
        (BYTE_LEVEL, [BYTE_LEVEL.token_id(BYTE_CHARS[byte]) for byte in data]),
        (SENTENCEPIECE, [SENTENCEPIECE.token_id(f"<0x{byte:02X}>") for byte in data]),
    ):
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert BYTE_LEVEL.decode([BYTE_LEVEL.token_id(BYTE_CHARS[byte]) for byte in data]) == data.decode(
        errors="replace"
    )


def test_a_stream_drops_one_leading_space_and_no_other():
    """fault 16: ids "▁", "▁a", "▁b"."""
    tokenizer = Tokenizer(metaspace())
    ids = ids_of(tokenizer, "▁", "▁a", "▁b")
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == " a b"
    ids = ids_of(SENTENCEPIECE, "▁", "▁a", "▁b")
    assert "".join(stream(SENTENCEPIECE, ids)) == SENTENCEPIECE.decode(ids) == " a b"


def test_a_byte_token_for_a_line_break_is_a_line_break():
    """fault 16: no raw <0x0A>."""
    ids = ids_of(SENTENCEPIECE, "▁a", "<0x0A>", "b")
    assert stream(SENTENCEPIECE, ids) == ["a", "", "\nb", ""]


def test_byte_tokens_of_one_character_come_together():
    ids = [SENTENCEPIECE.token_id(f"<0x{byte:02X}>") for byte in "日".encode()]
    assert stream(SENTENCEPIECE, [*ids, *ids_of(SENTENCEPIECE, "a")]) == ["", "", "", "日a", ""]


def test_byte_level_text_shows_no_marker_for_a_space():
    """fault 16: no raw Ġ."""
    ids = BYTE_LEVEL.encode(" the a\n\n")
    assert "".join(stream(BYTE_LEVEL, ids)) == " the a\n\n"


def test_special_tokens_are_skipped_unless_kept():
    ids = [*BYTE_LEVEL.encode("a"), BYTE_LEVEL.token_id("<|im_end|>"), BYTE_LEVEL.token_id("<think>")]
    assert "".join(stream(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids) == "a<think>"
    kept = {"<|im_end|>"}
    assert "".join(stream(BYTE_LEVEL, ids, keep=kept)) == BYTE_LEVEL.decode(ids, keep=kept)
    assert BYTE_LEVEL.decode(ids, keep=kept) == "a<|im_end|><think>"


def test_an_unknown_decoder_holds_its_text_to_the_end():
    from tokenizers import decoders

    tokenizer = Tokenizer(with_decoder(decoders.Fuse(), decoders.Replace("xx", "y"))())
    assert stream(tokenizer, ids_of(tokenizer, "x", "xx", "x")) == ["", "", "", "yy"]


def test_a_finished_stream_takes_no_more():
    detokenizer = BYTE_LEVEL.detokenizer()
    assert detokenizer.finish() == ""
    assert detokenizer.finish() == ""
    with pytest.raises(ValueError, match="finished"):
        detokenizer.add(5)
