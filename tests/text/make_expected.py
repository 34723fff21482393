"""Write what transformers makes of the cases, to data/rendered.json and data/real_tokenizers.json.

python tests/text/make_expected.py        with transformers 5.24 and torch 2.13; npm on the path
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import real_tokenizers
from text_cases import CHATS, TEXTS
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, __version__

DATA = Path(__file__).parent / "data"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# Written for these tests, each with what templates of a family do.
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((DATA / "templates").glob("*.jinja"))}


def render(tokenizer: Any, source: str, chat: dict[str, Any]) -> str | None:
    """The rendered prompt, or None where the chat is rejected."""
    arguments = {"add_generation_prompt": True, **chat, "chat_template": source, "tokenize": False}
    try:
        return str(tokenizer.apply_chat_template(arguments.pop("messages"), **arguments))
    except Exception as error:
        print(f"rejected: {error!r:.100}")
        return None


def write_rendered() -> None:
    """The templates of data/templates, rendered."""
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)
    rendered = {
        name: {chat: render(tokenizer, source, case) for chat, case in CHATS.items()}
        for name, source in TEMPLATES.items()
    }
    write("rendered.json", special_tokens=SPECIAL_TOKENS, rendered=rendered)


def write_real() -> None:
    """Real tokenizers: ids of texts, and digests of prompts."""
    write("real_tokenizers.json", tokenizers={name: describe(name) for name in real_tokenizers.NAMES})


def describe(name: str) -> dict[str, Any]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(real_tokenizers.fetch(name))
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    return {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
        "special": sorted(tokenizer.all_special_ids),
        "ids": ids,
        "decoded": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
        "chats": {chat: digests(tokenizer, case) for chat, case in CHATS.items()}
        if tokenizer.chat_template
        else None,
    }


def digests(tokenizer: Any, chat: dict[str, Any]) -> tuple[str, str] | None:
    """Of the rendered prompt and of its ids."""
    prompt = render(tokenizer, tokenizer.chat_template, chat)
    if prompt is None:
        return None
    return digest(prompt), digest(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def digest(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(name: str, **data: Any) -> None:
    data = {"made": f"by tests/text/make_expected.py with transformers {__version__}", **data}
    (DATA / name).write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_rendered()
    write_real()
