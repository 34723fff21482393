"""A prompt's keys and values in a file, so that the next process does not compute them again.

A safetensors file, which other tools can read:

    __metadata__     what they depend on, as `Fingerprint` has it: all of it must be the same for them to be read
    tokens           (length,) int32
    layers.N.keys    (kv_heads, held, head_dim), of the last `held` tokens: all of them, but where a window has passed
    layers.N.values  and the first pages were evicted; latent attention has no values of its own
    layers.N.state0  (1, 1, elements), of recurrent layers: the arrays of the state after the last token

What is packed is uint32 words, beside layers.N.keys.scales and layers.N.keys.biases (kv_heads, held, groups).

Nothing in a file is trusted, and no name in it is looked up: names and shapes must be those that this model has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tinyllm._mx import dtype_name, mx
from tinyllm.checkpoint.digest import weights_digest
from tinyllm.checkpoint.safetensors_header import TensorInfo, read_safetensors_header, write_safetensors_header
from tinyllm.checkpoint.weights import DTYPES
from tinyllm.config.config import Config
from tinyllm.config.layers import rope_of
from tinyllm.engine.engine import Engine
from tinyllm.errors import CheckpointError, CorruptFileError, PrefixFileError, UsageError
from tinyllm.kv.kinds import StoredArray
from tinyllm.kv.manager import PageManager
from tinyllm.kv.paged import carry_out_copies
from tinyllm.kv.pages import PADDING
from tinyllm.ops.packed_kv import packed_heads

__all__ = ["Fingerprint", "load_prefix", "save_prefix"]

_TOKENS = "tokens"
_WORDS = "U32"
_LONGEST_VALUE = 200  # characters that are shown
_Layout = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype and shape, in the order of the data


@dataclass(frozen=True)
class Fingerprint:
    """What the keys and values of a prompt depend on, as a file's metadata has it.

    Which kernels computed them is not part of it, nor is the device: these differ in the last bits only.
    """

    dtype: str
    page_size: str
    rope: str
    config: str
    weights: str
    cache: str = "TinyKvPagedCache"
    version: str = "1"
    format: str = "tinyllm prefix"

    @classmethod
    def of(cls, engine: Engine, folder: Path) -> Fingerprint:
        """Take the fingerprint of a model that was loaded from `folder`. Raises CheckpointError."""
        config, bits = engine.model.config, engine.pools.kv_bits
        return cls(
            dtype=dtype_name(engine.model.dtype),
            page_size=str(engine.pools.manager.page_size),
            rope="; ".join(dict.fromkeys(repr(rope_of(layer.attention)) for layer in config.layers)),
            config=_config_digest(config),
            weights=weights_digest(folder),
            cache=cls.cache if bits is None else f"{cls.cache}, packed to {bits} bits",
        )

    def check(self, metadata: Mapping[str, Any], path: Path) -> None:
        """Raise PrefixFileError, naming what differs, unless a file's metadata is this."""
        ours = asdict(self)
        if metadata.get("format") != self.format:
            raise PrefixFileError(f"{path}: not a prefix that tinyllm saved: give another file")
        for name in ("version", *ours):
            if metadata.get(name) != ours[name]:
                raise PrefixFileError(
                    f"{path}: made with {name.replace('_', ' ')} {_brief(metadata.get(name))}, and this is"
                    f" {_brief(ours[name])}: delete it to make a new one, or give another file"
                )
        if unknown := metadata.keys() - ours.keys():
            raise PrefixFileError(f"{path}: made with {_brief(min(unknown))}, which is unknown: give another file")


def save_prefix(engine: Engine, tokens: Sequence[int], path: Path, fingerprint: Fingerprint) -> int:
    """Write what the engine has computed of a prompt's `tokens` to `path`; return how many tokens that is.

    The file appears when it is whole, and only its owner may read it. One layer at a time is copied. Raises
    PrefixFileError if nothing is there to be saved, or nothing can be written there.
    """
    pools, manager = engine.pools, engine.pools.manager
    _check_shares(manager)
    pages, length = manager.known(tokens, pools.regime(len(tokens)))
    if not length:
        raise PrefixFileError(f"{path}: not written, since nothing of the prompt is computed")
    columns = list(zip(*pages, strict=True))
    firsts = [manager.page_size * first for first in map(_present_from, columns)]

    def data() -> Iterator[mx.array]:
        yield mx.array(list(tokens[:length]), dtype=mx.int32)
        for kind, layer in pools.layers:
            pool = pools.pools[kind]
            first, end = (len(pages) - 1, len(pages)) if pool.states else (firsts[kind], length)
            for array in pool.read(layer, columns[kind], first, end):
                yield array[0]

    _write(path, asdict(fingerprint), _layout(engine, length, firsts), data())
    return length


def load_prefix(engine: Engine, path: Path, fingerprint: Fingerprint) -> tuple[int, ...]:
    """Let requests find the prefix that is saved in `path`; return its tokens, those that the KV cache has room for.

    They stay as long as others that are cached do. Raises PrefixFileError, by name, for a file that is damaged or
    was made with something else, and where there is no room for any of it.
    """
    pools, manager = engine.pools, engine.pools.manager
    _check_shares(manager)
    saved = _SavedPrefix(path, engine, fingerprint)
    regime = pools.regime(len(saved.tokens))
    tables = manager.open((), regime)
    try:
        while (start := tables.length) < len(saved.tokens):
            end = min(start + manager.page_size, len(saved.tokens))
            if not manager.reserve(tables, end):
                break
            carry_out_copies(pools.pools)
            for kind in saved.put([table.pages for table in tables.by_kind], start, end):
                tables.by_kind[kind].drop_before(end // manager.page_size)  # or what is in it would be shared
            manager.advance(tables, end, saved.tokens)
        manager.publish(tables, saved.tokens, ended=True)
    except BaseException:
        manager.drop(tables)  # zeroing is not needed: everything that was written is finite
        raise
    manager.release(tables)
    _, length = manager.known(saved.tokens, regime)
    if not length:
        raise PrefixFileError(f"{path}: the KV cache has no room for its {len(saved.tokens):,} tokens")
    return saved.tokens[:length]


class _SavedPrefix:
    """A file whose header, metadata, names, shapes and tokens are checked. Its `tokens` are read, the rest is not.

    Of each kind of layer it holds the positions from `firsts` on; of recurrent ones the last page, which is a state.
    """

    def __init__(self, path: Path, engine: Engine, fingerprint: Fingerprint) -> None:
        self._path = path
        self._dtype = engine.model.dtype
        self._pools = engine.pools
        self._tensors, metadata = _read_header(path)
        fingerprint.check(metadata, path)
        length = self._size(_TOKENS, axis=0)
        if length < 1:
            raise self._damaged("it has no tokens")
        size = self._pools.manager.page_size
        self.firsts = [(length - 1) // size * size if pool.states else length for pool in self._pools.pools]
        for n, (kind, _) in enumerate(self._pools.layers):
            if not self._pools.kinds[kind].states:
                keys = _name(n, self._pools.kinds[kind].arrays[0])
                self.firsts[kind] = min(self.firsts[kind], length - self._size(keys, axis=1))
        expected = _layout(engine, length, self.firsts)
        found = {name: (info.dtype, info.shape) for name, info in self._tensors.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise self._damaged(f"{_brief(name)} is not what this model has")
        for form, first in zip(self._pools.manager.kinds, self.firsts, strict=True):
            if first % size or not 0 <= first <= form.first_page(length, size) * size:
                raise self._damaged("it lacks keys and values of some tokens")
        self.tokens: tuple[int, ...] = tuple(self._map(_TOKENS).tolist())
        vocab = engine.model.config.vocab_size
        if min(self.tokens) < 0 or max(self.tokens) >= vocab:
            raise self._damaged(f"it has tokens that are not of the model's {vocab:,}")

    def put(self, pages: Sequence[Sequence[int]], start: int, end: int) -> list[int]:
        """Write the positions from `start` to `end`, one page, into the pools, where each kind has these `pages`.

        Returns the kinds that the file does not have it of. Raises PrefixFileError, before anything is written, for
        values that are not finite.
        """
        pools, new = self._pools.pools, list[tuple[int, int, list[mx.array]]]()
        for n, (kind, layer) in enumerate(self._pools.layers):
            first = self.firsts[kind]
            if start >= first:
                last = 1 if pools[kind].states else end - first
                forms = self._pools.kinds[kind].arrays
                new.append((kind, layer, [self._read(n, form, start - first, last) for form in forms]))
        if not all(mx.isfinite(a).all().item() for kind, _, arrays in new for a in self._computed(kind, arrays)):
            raise self._damaged("it holds inf or NaN")
        for kind, layer, arrays in new:
            pools[kind].make_room(arrays)
            at = start // self._pools.manager.page_size if pools[kind].states else start
            pools[kind].write(layer, pages[kind], at, arrays)
        mx.eval([array for pool in pools for array in pool.flat])
        return [kind for kind, first in enumerate(self.firsts) if start < first]

    def _size(self, name: str, *, axis: int) -> int:
        shape = self._tensors[name].shape if name in self._tensors else ()
        return shape[axis] if axis < len(shape) else 0

    def _read(self, layer: int, form: StoredArray, start: int, end: int) -> mx.array:
        read = mx.array(self._map(_name(layer, form))[None, :, start:end])
        return read if form.packed else read.view(mx.float32 if form.wide else self._dtype)

    def _computed(self, kind: int, arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        """Return what is read as it is computed with: packed heads are unpacked."""
        bits = self._pools.kinds[kind].bits
        return arrays if bits is None else [heads.unpacked() for heads in packed_heads(arrays, bits)]

    def _map(self, name: str) -> Any:
        """Return a tensor's data, mapped: whole numbers as wide as its elements."""
        import numpy as np  # takes a tenth of a second to import

        info = self._tensors[name]
        wide = {"I32": np.int32, "F32": np.uint32, "U32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
        return np.memmap(info.file, wide[info.dtype], mode="r", offset=info.start, shape=info.shape)

    def _damaged(self, what: str) -> PrefixFileError:
        return PrefixFileError(f"{self._path}: damaged, {what}: delete it to make a new one, or give another file")


def _layout(engine: Engine, length: int, firsts: Sequence[int]) -> _Layout:
    """Return what a file of `length` tokens holds, of each kind of layer from the first of `firsts` on."""
    stored = next(name for name, dtype in DTYPES.items() if dtype == engine.model.dtype)
    layout: _Layout = {_TOKENS: ("I32", (length,))}
    for n, (number, _) in enumerate(engine.pools.layers):
        kind = engine.pools.kinds[number]
        held = 1 if kind.states else length - firsts[number]
        for form in kind.arrays:
            dtype = _WORDS if form.packed else "F32" if form.wide else stored
            layout[_name(n, form)] = (dtype, (form.heads, held, form.width))
    return layout


def _present_from(pages: Sequence[int]) -> int:
    """Return the index after the last page that is gone."""
    return 1 + max((i for i, page in enumerate(pages) if page == PADDING), default=-1)


def _name(layer: int, form: StoredArray) -> str:
    return f"layers.{layer}.{form.name}"


def _check_shares(manager: PageManager) -> None:
    if not manager.shares:
        raise UsageError("a prefix can be saved and loaded only where prefixes are shared, in the paged cache")


def _write(path: Path, metadata: Mapping[str, str], layout: _Layout, data: Iterator[mx.array]) -> None:
    """Write a safetensors file from arrays that are made one by one, and give it its name when it is whole."""
    header = write_safetensors_header(((name, *kind) for name, kind in layout.items()), metadata)
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:  # its mode is 600
            unfinished = Path(file.name)
            try:
                file.write(header)
                for array in data:
                    file.write(memoryview(mx.contiguous(array).view(mx.uint8)))  # type: ignore[arg-type]
                file.flush()
                unfinished.replace(path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise PrefixFileError(f"{path}: not written: {error.strerror}") from error


def _read_header(path: Path) -> tuple[dict[str, TensorInfo], Mapping[str, str]]:
    """Return the checked entries of a file's header, and its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        tensors = read_safetensors_header(path)
        with safe_open(path, framework="numpy") as file:
            return tensors, file.metadata() or {}
    except (CorruptFileError, SafetensorError) as error:
        raise PrefixFileError(f"{path}: damaged, or not a prefix that tinyllm saved: give another file") from error
    except (CheckpointError, OSError) as error:
        raise PrefixFileError(f"{path}: not readable as a saved prefix") from error


def _config_digest(config: Config) -> str:
    """Return a digest of what a network computes, its names, limits and RoPE left out."""
    return _digest(
        repr((config.vocab_size, config.hidden_size, config.layers, config.tie_word_embeddings, config.quantization))
    )


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
