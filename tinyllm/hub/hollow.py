"""A repository's files as they will be on disk, with no data in the large ones: what there is to check before a pull.

Reading such a folder with what reads a downloaded one gives the same refusals in the same order, and takes a few
requests of some kilobytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tinyllm.checkpoint.files import INDEX, check_tokenizer, find_weight_files
from tinyllm.checkpoint.gguf_facts import FACTORS
from tinyllm.checkpoint.gguf_header import HeaderTakesMoreError, read_gguf_header
from tinyllm.config.config import Config
from tinyllm.config.reader import MAX_CONFIG_BYTES
from tinyllm.errors import CorruptFileError, MissingFileError
from tinyllm.hub.gguf_files import variant_of
from tinyllm.hub.sizes import disk_size

__all__ = ["HollowCopy"]

TIMEOUT_S = 30.0
_TYPICAL_HEADER_BYTES = 100_000
_TYPICAL_GGUF_BYTES = 1 << 22  # most of it the tokenizer
_MOST_BYTES = 1 << 29  # of an index or a header


class HollowCopy:
    """Makes the copy in an empty `folder`; `sizes` has the names of a repository's files, checked, and their bytes.

    A safetensors file becomes its header and a hole up to its true length, which takes no disk.
    """

    def __init__(self, repo: str, commit: str, sizes: Mapping[str, int], folder: Path) -> None:
        self._repo = repo
        self._commit = commit
        self._sizes = sizes
        self._folder = folder

    def fill(self) -> list[str]:
        """Fetch the parts, the cheapest first, up to the first that is refused; return the names of the weights."""
        self.fill_config()
        weights = self._fill_index()
        check_tokenizer(self._folder)
        for name in weights:
            self._fetch_header(name)
        return weights

    def fill_config(self) -> None:
        """Fetch config.json, and read it; other files are empty."""
        for name in self._sizes:
            if "/" not in name:
                (self._folder / name).touch()
        self._fetch_whole("config.json", MAX_CONFIG_BYTES)
        Config.from_json_file(self._folder)

    def fill_gguf(self, names: Sequence[str]) -> Path:
        """Fetch the headers and short tensors of a GGUF file, or of its parts; return where the first is."""
        self._fill_part(names[0], _TYPICAL_GGUF_BYTES)
        for name in names[1:]:
            self._fill_part(name, _TYPICAL_HEADER_BYTES)
        return self._folder / names[0]

    def _fill_part(self, name: str, typical: int) -> None:
        """Fetch the header of a file, which says nowhere how long it is, and the short tensors beside it."""
        size, path = self._sizes[name], self._folder / name
        length, content = min(size, typical), b""
        path.parent.mkdir(exist_ok=True)
        while True:
            content += self._read(name, len(content), length)
            path.write_bytes(content)
            try:
                header = read_gguf_header(path, size)
                break
            except HeaderTakesMoreError:
                if length >= min(size, _MOST_BYTES):
                    raise
                length = min(size, 4 * length, _MOST_BYTES)
        with path.open("r+b") as file:
            file.truncate(size)
            for tensor in map(header.tensors.get, FACTORS):
                if tensor is not None and tensor.end - tensor.start <= _TYPICAL_HEADER_BYTES:
                    file.seek(tensor.start)
                    file.write(self._read(name, tensor.start, tensor.end))

    def fill_headers(self) -> None:
        """Fetch the headers of the weights; a tokenizer is not asked for."""
        for name in self._fill_index():
            self._fetch_header(name)

    def _fill_index(self) -> list[str]:
        if INDEX in self._sizes:
            self._fetch_whole(INDEX, _MOST_BYTES)
        return [file.name for file in find_weight_files(self._folder).files]

    def _fetch_whole(self, name: str, limit: int) -> None:
        if name not in self._sizes:
            files = sorted(n for n in self._sizes if n.endswith(".gguf"))
            hint = (
                f"; it has GGUF files: add :{variant_of(files[0])} (or another of them) to its name" if files else ""
            )
            raise MissingFileError(f"{self._folder}: there is no {name} in it{hint}")
        size = self._sizes[name]
        if size > limit:
            raise CorruptFileError(f"{self._folder / name}: claims {disk_size(size)}, which no such file has")
        (self._folder / name).write_bytes(self._read(name, 0, size))

    def _fetch_header(self, name: str) -> None:
        size = self._sizes[name]
        header = self._read(name, 0, min(size, _TYPICAL_HEADER_BYTES))
        end = 8 + int.from_bytes(header[:8], "little")
        if len(header) < end <= size:
            if end > _MOST_BYTES:
                raise CorruptFileError(f"{self._folder / name}: claims a header of {disk_size(end)}")
            header += self._read(name, len(header), end)
        with (self._folder / name).open("wb") as file:
            file.write(header[:end])
            file.truncate(size)

    def _read(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end` of a file of the repository."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        if start == end:
            return b""
        wanted = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
        url = hf_hub_url(self._repo, name, revision=self._commit)
        response = get_session().get(url, headers={**build_hf_headers(), **wanted}, timeout=TIMEOUT_S)
        hf_raise_for_status(response)
        content: bytes = response.content
        return content if response.status_code == 206 else content[start:end]
