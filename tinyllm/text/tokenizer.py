"""Text to token ids and back, by a checkpoint's tokenizer.json.

Three encoders share one model (vocabulary and merges), because the `tokenizers` library keeps what it matches in
text as state of the encoder:

    full    control strings (`<|im_end|>`) become control ids: for rendered chat templates
    plain   control strings are text: for what people write
    mixed   made for one prompt that holds both
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tinyllm.checkpoint.contents import Contents
from tinyllm.checkpoint.gguf_header import GgufHeader
from tinyllm.checkpoint.gguf_tokenizer import read_tokenizer
from tinyllm.config.reader import is_there
from tinyllm.errors import ChatTemplateError, TokenizerError
from tinyllm.text.chat_template import ChatTemplate, Message, chat_values, find_templates
from tinyllm.text.detokenizer import Detokenizer, build_stages
from tinyllm.text.patterns import Risk, patterns_in, risk_of, within
from tinyllm.text.reasoning import FORMATS, ReasoningFormat, ReasoningSplitter
from tinyllm.text.special_tokens import SpecialTokens, read_json_object
from tinyllm.text.stand_ins import ControlStrings, StandIns

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as Backend

__all__ = ["Tokenizer"]

_T = TypeVar("_T")

MAX_TOKENIZER_BYTES = 512 * 2**20  # the largest in use are about 35 MB
_SECONDS, _SECONDS_PER_CHARACTER = 5.0, 1e-5  # for texts under patterns that may be slow
_MISTRAL_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OTHER_FORMATS = ("tokenizer.model", "tiktoken.model", "tokenizer.bpe", "tekken.json", "vocab.json", "vocab.txt")
_BRACKETS = {"<": ">", "[": "]", "{": "}", "◁": "▷", "【": "】"}
# What an assistant writes as tokens within its turn, and templates look for in its messages.
_ASSISTANT_MARKUP = frozenset({"<tool_call>", "</tool_call>"}).union(*(f.marks for f in FORMATS if not f.anywhere))


class Tokenizer:
    """Encodes and decodes as the checkpoint's tokenizer.json says; shared by threads, as nothing in it changes.

    `special` gives names to special tokens and adds those that `backend` lacks. `where` is how errors call it.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special: SpecialTokens | None = None,
        chat_template: ChatTemplate | None = None,
        where: str = "the tokenizer",
    ):
        _refuse_nested_repeats(backend, where)
        self._where = where
        self._full = backend
        backend.no_truncation()
        backend.no_padding()
        special = special or SpecialTokens()
        _add_tokens(backend, special, where)
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._named = {name: token.content for name, token in special.named.items()}
        self.chat_template = chat_template
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.bos_id = self._named_id("bos_token")
        self.pad_id = self._named_id("pad_token")
        eos_id = self._named_id("eos_token")
        self.eos_ids = frozenset[int]() if eos_id is None else frozenset({eos_id})

    @classmethod
    def of(cls, contents: Contents) -> Tokenizer:
        """Read a checkpoint's tokenizer: that of its folder, or its GGUF file's own. Raises as these do."""
        return cls.from_folder(contents.path) if contents.header is None else cls.from_gguf(contents.header)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read a checkpoint folder: tokenizer.json, and what is there of tokenizer_config.json,
        special_tokens_map.json, added_tokens.json and the chat templates.

        Raises TokenizerError (no tokenizer.json, a broken file) or ChatTemplateError, naming the file.
        """
        backend = _load_backend(path)
        config = read_json_object(path / "tokenizer_config.json")
        if config.get("fix_mistral_regex") is True:
            _fix_mistral_regex(backend)
        backend.encode_special_tokens = config.get("split_special_tokens") is True
        special = SpecialTokens.from_path(path, config)
        templates = find_templates(path, config)
        variables = {name: token.content for name, token in special.named.items()}
        template = ChatTemplate(templates, variables) if templates else None
        return cls(backend, special=special, chat_template=template, where=str(path / "tokenizer.json"))

    @classmethod
    def from_gguf(cls, header: GgufHeader) -> Tokenizer:
        """Make the tokenizer and the chat templates of a GGUF file. Raises TokenizerError or ChatTemplateError."""
        from tokenizers import AddedToken

        found = read_tokenizer(header)
        named = {name: AddedToken(text, special=True, normalized=False) for name, text in found.named.items()}
        template = ChatTemplate(dict(found.templates), dict(found.named)) if found.templates else None
        special = SpecialTokens(named)
        return cls(found.backend, special=special, chat_template=template, where=str(header.file))

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written so, if there is one."""
        return next((i for i in self.special_ids if self._added[i].content == text), None)

    # -- text to ids

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text, with the BOS or EOS that the tokenizer adds unless `add_special_tokens` is false.

        Control strings in the text (`<|im_end|>`) are plain text unless `parse_special`. Lone surrogates count as
        U+FFFD. "" gives [] or what the tokenizer adds. Raises TokenizerError where the library fails.
        """
        encoder = self._full if parse_special else self._plain
        encoding = self._run(encoder, _well_formed(text), add_special_tokens)
        if parse_special:
            return list(encoding.ids)
        added = encoding.special_tokens_mask
        return self._spell_controls(encoding, lambda position, _: not added[position])

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of messages in the model's chat template, see `ChatTemplate.render`.

        Control strings that the template writes become control ids; the same strings in messages, tools, documents
        and kwargs stay plain text. Without such strings the ids are those of the rendered text as it is: no BOS
        is added to the template's. Only the content of the assistant's messages may hold the marks of its reasoning
        and of tool calls, which templates look for there.

        Raises ChatTemplateError where there is no template or it rejects the messages.
        """
        if self.chat_template is None:
            raise ChatTemplateError("the model has no chat template; give a raw prompt (--raw) instead")
        values = chat_values(messages, tools=tools, documents=documents, **kwargs)
        stand_ins = StandIns(self.control_strings, values, kept=_ASSISTANT_MARKUP)
        rendered = self.chat_template.render_values(
            stand_ins.hide(values), add_generation_prompt=add_generation_prompt, template=template
        )
        rendered = _well_formed(stand_ins.reveal_escapes(rendered))
        encoder = self._mixed(stand_ins.texts) if stand_ins else self._full
        encoding = self._run(encoder, rendered, False)
        spans = encoding.offsets

        def is_text(position: int, token_id: int) -> bool:
            """Whether a control id is not the control string itself, but made by a stand-in or the normaliser."""
            return rendered[slice(*spans[position])].strip() != self._added[token_id].content

        return self._spell_controls(encoding, is_text)

    @functools.cached_property
    def control_strings(self) -> ControlStrings:
        """Strings that are plain text when people write them.

        The special tokens, and those other added tokens in brackets that the chat template names: `<tool_call>` in
        Qwen, `<｜User｜>` in DeepSeek. The rest (`<|fim_prefix|>`, runs of spaces, `<table>`) is vocabulary.
        """
        sources = list(self.chat_template.templates.values()) if self.chat_template else []

        def is_control(token: AddedToken) -> bool:
            text = token.content
            bracketed = _BRACKETS.get(text[:1]) == text[-1:]
            return token.special or (bracketed and any(text in source for source in sources))

        return ControlStrings([token.content for token in self._added.values() if is_control(token)])

    # -- ids to text

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, keep: Collection[str] = ()) -> str:
        """The text of ids, as the tokenizer's decoder gives it; ids outside of the vocabulary have none.

        `keep` are special tokens that are written even where the others are skipped. tokenizer_config.json's
        `clean_up_tokenization_spaces` is not applied: it takes spaces before punctuation out of what the model
        wrote (transformers ignores it as well, but for WordPiece and Unigram models).
        """
        if not keep:
            decode = functools.partial(self._full.decode, list(ids), skip_special_tokens=skip_special_tokens)
            return _guard(decode, self._where)
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens, keep=keep)
        return "".join([*map(stream.add, ids), stream.finish()])

    def detokenizer(self, *, skip_special_tokens: bool = True, keep: Collection[str] = ()) -> Detokenizer:
        """A new stream of ids to text, whose pieces join to what `decode` gives."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        skipped = frozenset(i for i in skipped if self._added[i].content not in keep)
        token_of = self._full.id_to_token

        def visible(token_id: int) -> str | None:
            return None if token_id in skipped else token_of(token_id)

        return Detokenizer(visible, build_stages(self._decoder_spec, self._decode_tokens))

    # -- reasoning

    @functools.cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How the model marks its reasoning, if its chat template or its added tokens know such marks.

        Streams that are to be split show the marks: `detokenizer(keep=format.shown)`.
        """
        sources = "".join(self.chat_template.templates.values()) if self.chat_template else ""
        added = {token.content for token in self._added.values()}
        return next((f for f in FORMATS if f.marks.keys() <= added or all(m in sources for m in f.marks)), None)

    def reasoning_splitter(self, prompt_ids: Sequence[int]) -> ReasoningSplitter:
        """A splitter for what the model writes after this prompt, which may have opened the reasoning."""
        fmt = self.reasoning_format
        tail = self.decode(prompt_ids[-16:], skip_special_tokens=False)
        return ReasoningSplitter(fmt, opened=fmt is not None and fmt.opened_by(tail))

    # -- facts

    @functools.cached_property
    def vocab_size(self) -> int:
        """The highest id + 1, added tokens included. The model may have more rows, not fewer."""
        return max(self._full.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact text, or None."""
        return self._full.token_to_id(token)

    def _named_id(self, name: str) -> int | None:
        return self._full.token_to_id(self._named[name]) if name in self._named else None

    # -- encoders

    @functools.cached_property
    def _plain(self) -> Backend:
        """All added tokens but the control strings are matched."""
        controls = self.control_strings.all
        encoder = self._derive(lambda token: _with_flags(token, special=token.content in controls))
        encoder.encode_special_tokens = True
        return encoder

    def _mixed(self, hidden: Mapping[str, str]) -> Backend:
        """`full`, with stand-ins put back by the normaliser: it runs when control strings have been cut out."""
        from tokenizers import normalizers

        controls = self.control_strings.all

        def unnormalized(token: AddedToken) -> AddedToken:
            return _with_flags(token, normalized=token.normalized and token.content not in controls)

        encoder = self._derive(unnormalized)
        steps: list[Any] = [normalizers.Replace(char, text) for char, text in hidden.items()]
        if self._full.normalizer is not None:
            steps.append(self._full.normalizer)
        encoder.normalizer = normalizers.Sequence(steps)
        return encoder

    def _derive(self, change: Callable[[AddedToken], AddedToken]) -> Backend:
        """An encoder with this one's model and steps, and its added tokens with other flags."""
        from tokenizers import Tokenizer as Backend

        encoder = Backend(self._full.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (step := getattr(self._full, part)) is not None:
                setattr(encoder, part, step)
        encoder.add_tokens([change(self._added[token_id]) for token_id in sorted(self._added)])
        moved = [t.content for i, t in self._added.items() if encoder.token_to_id(t.content) != i]
        if moved:
            raise TokenizerError(f"{self._where}: the ids of added tokens have gaps before {moved[0]!r}")
        return encoder

    def _run(self, encoder: Backend, text: str, add_special_tokens: bool) -> Encoding:
        if self._risk is Risk.NONE:
            return _guard(lambda: encoder.encode(text, add_special_tokens=add_special_tokens), self._where)
        return _guard(lambda: self._run_watched(encoder, text, add_special_tokens), self._where)

    def _run_watched(self, encoder: Backend, text: str, add_special_tokens: bool) -> Encoding:
        """The same, abandoned after a while (fault 55): a batch, unlike one text, leaves the interpreter's lock."""
        limit = _SECONDS + len(text) * _SECONDS_PER_CHARACTER
        return within(limit, lambda: encoder.encode_batch([text], add_special_tokens=add_special_tokens)[0])

    @functools.cached_property
    def _risk(self) -> Risk:
        steps = (self._full.normalizer, self._full.pre_tokenizer, self._full.decoder)
        patterns = [p for step in steps if step is not None for p in patterns_in(_spec(step))]
        return max(map(risk_of, patterns), default=Risk.NONE)

    def _spell_controls(self, encoding: Encoding, is_text: Callable[[int, int], bool]) -> list[int]:
        """The ids, with control ids that come from text spelled character by character.

        Unigram and word-level vocabularies may hold control strings as ordinary entries, and a normaliser may make
        `<s>` of full-width characters.
        """
        ids = list(encoding.ids)  # the library makes the list at each access
        if self._control_ids.isdisjoint(ids):
            return ids
        spelled: list[int] = []
        for position, token_id in enumerate(ids):
            if token_id in self._control_ids and is_text(position, token_id):
                for char in self._added[token_id].content:
                    spelled.extend(token.id for token in self._full.model.tokenize(char))
            else:
                spelled.append(token_id)
        return spelled

    @functools.cached_property
    def _control_ids(self) -> frozenset[int]:
        controls = self.control_strings.all
        return frozenset(i for i, token in self._added.items() if token.content in controls)

    # -- the decoder

    @functools.cached_property
    def _decoder_spec(self) -> dict[str, Any] | None:
        return None if self._full.decoder is None else _spec(self._full.decoder)

    def _decode_tokens(self, tokens: list[str]) -> str:
        return _guard(lambda: str(self._full.decoder.decode(tokens)), self._where)


def _load_backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json"
    if not is_there(file):
        others = [name for name in _OTHER_FORMATS if (path / name).is_file()]
        hint = f", only {' and '.join(others)}, which tinyllm does not read" if others else ""
        raise TokenizerError(f"{path} has no tokenizer.json{hint}; use a copy of the model that has one")
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise TokenizerError(f"{file} is larger than {MAX_TOKENIZER_BYTES:,} bytes")
    backend = _guard(lambda: Backend.from_file(str(file)), str(file))
    if not any(token.special and token.normalized for token in backend.get_added_tokens_decoder().values()):
        return backend
    # Normalized, a special token would be matched, and decoded, as another text than the one it is.
    values = json.loads(file.read_text(encoding="utf-8"))
    for token in values["added_tokens"]:
        token["normalized"] = token["normalized"] and not token["special"]
    return _guard(lambda: Backend.from_str(json.dumps(values)), str(file))


def _fix_mistral_regex(backend: Backend) -> None:
    """Cut text as Mistral's own tokenizers do, in place of the pattern that was published with them first.

    As transformers does for this key (`_patch_mistral_regex`).
    """
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(_MISTRAL_PATTERN), behavior="isolated")
    current = backend.pre_tokenizer
    if isinstance(current, pre_tokenizers.Sequence):
        current[0] = split
        return
    if isinstance(current, pre_tokenizers.Metaspace):
        current = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, *([] if current is None else [current])])


def _refuse_nested_repeats(backend: Backend, where: str) -> None:
    """Refuse patterns that take time exponential in the text (fault 55), before any text meets them."""
    for step in (backend.normalizer, backend.pre_tokenizer, backend.decoder):
        for pattern in patterns_in(_spec(step)) if step is not None else ():
            if risk_of(pattern) is Risk.NESTED:
                shown = pattern if len(pattern) <= 80 else pattern[:80] + "..."
                raise TokenizerError(f"{where}: a repeat within a repeat may take for ever: {shown}")


def _spec(step: Any) -> Any:
    """A step of the library's, as in tokenizer.json."""
    return json.loads(step.__getstate__())


def _guard(call: Callable[[], _T], where: str) -> _T:
    """The call's result; what the Rust library raises (panics are no `Exception`) becomes a TokenizerError."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{where}: {' '.join(str(error).split())[:300]}") from error


def _well_formed(text: str) -> str:
    """The text with U+FFFD for lone surrogates, as there are in arguments of a terminal that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _add_tokens(backend: Backend, special: SpecialTokens, where: str) -> None:
    """Add the tokens that the other files know, with their flags, as transformers does."""
    added = sorted(special.added.items())
    backend.add_tokens([token for _, token in added])
    for token_id, token in added:
        if (actual := backend.token_to_id(token.content)) != token_id:
            raise TokenizerError(f"{where}: {token.content!r} has id {actual}, but the config says {token_id}")
    flags = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    specials = [*special.named.values(), *special.extra]
    backend.add_special_tokens([_with_flags(flags.get(t.content, t), special=True) for t in specials if t.content])


def _with_flags(token: AddedToken, **flags: bool) -> AddedToken:
    """A copy of an added token with some flags changed."""
    from tokenizers import AddedToken

    return AddedToken(**(token.__getstate__() | flags))
