"""Real tokenizers against what transformers makes of them, recorded in data/real_tokenizers.json."""

import hashlib
import json
import random
from pathlib import Path

import pytest
import real_tokenizers
from text_cases import CHATS, TEXTS

from tinyllm.text.tokenizer import Tokenizer

pytestmark = pytest.mark.parity
EXPECTED = json.loads((Path(__file__).parent / "data" / "real_tokenizers.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=real_tokenizers.NAMES)
def real(request):
    """A tokenizer, and what is expected of it."""
    return Tokenizer.from_folder(real_tokenizers.fetch(request.param)), EXPECTED["tokenizers"][request.param]


def digest(value):
    text = json.dumps(value, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_ids_of_texts_are_those_of_transformers(real):
    tokenizer, expected = real
    assert [tokenizer.encode(text, parse_special=True) for text in TEXTS] == expected["ids"]


def test_texts_without_control_strings_have_the_same_ids_as_plain_text(real):
    tokenizer, expected = real
    assert [tokenizer.encode(text) for text in TEXTS[:-1]] == expected["ids"][:-1]


def test_special_tokens_are_those_of_transformers(real):
    tokenizer, expected = real
    assert (tokenizer.bos_id, sorted(tokenizer.eos_ids), tokenizer.pad_id) == (
        expected["bos"],
        [expected["eos"]],
        expected["pad"],
    )
    assert set(expected["special"]) <= tokenizer.special_ids


def test_streamed_text_is_that_of_transformers(real):
    """fault 16: of texts, and of random ids."""
    tokenizer, expected = real
    generator = random.Random(0)
    noise = [[generator.randrange(tokenizer.vocab_size) for _ in range(40)] for _ in range(100)]
    for ids in [*expected["ids"], *noise]:
        stream = tokenizer.detokenizer()
        assert "".join([*map(stream.add, ids), stream.finish()]) == tokenizer.decode(ids)
    assert [tokenizer.decode(ids) for ids in expected["ids"]] == expected["decoded"]


def test_prompts_are_those_of_transformers(real):
    """fault 17 and fault 24: rendered and encoded; None where transformers rejects the chat as well."""
    tokenizer, expected = real
    if tokenizer.chat_template is None:
        assert expected["chats"] is None
        return
    for name, case in CHATS.items():
        if expected["chats"][name] is not None:
            rendered, ids = expected["chats"][name]
            assert digest(tokenizer.chat_template.render(**case)) == rendered, name
            assert digest(tokenizer.encode_chat(**case)) == ids, name


def test_control_strings_in_messages_are_plain_text(real):
    """fault 19: of every family."""
    tokenizer, _ = real
    if tokenizer.chat_template is None:
        return
    controls = sorted(tokenizer.control_strings.all)
    text = "a" + " b\n".join(random.Random(0).sample(controls, min(40, len(controls))))
    without = tokenizer.encode_chat([{"role": "user", "content": "a"}])
    encoded = tokenizer.encode_chat([{"role": "user", "content": text}])
    special = [i for i in encoded if i in tokenizer._control_ids]
    assert special == [i for i in without if i in tokenizer._control_ids]
    rendered = tokenizer.chat_template.render([{"role": "user", "content": text}])
    assert tokenizer.decode(encoded, skip_special_tokens=False) == rendered
