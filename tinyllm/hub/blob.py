"""One large file of the hub, fetched into the hub library's cache so that an interrupted download goes on later.

The library itself starts an interrupted file anew (since version 2 its partial files are of one process): of a model
in one file of some gigabytes, all would be lost. So the partial file is kept here under its old name, SUM.incomplete.
"""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

from tinyllm.errors import CorruptFileError

__all__ = ["LARGEST_OVER_HTTP", "arrived_of", "fetch_blob", "sha256_of"]

LARGEST_OVER_HTTP = 50 * 10**9  # longer files the hub gives only through the library's own protocol


def fetch_blob(url: str, blob: Path, size: int, name: str) -> None:
    """Download `url` to `blob`, whose name is its sha256, going on where an earlier download ended.

    On a terminal the library's progress bar shows `name`. Raises what the library raises, and CorruptFileError where
    the sum is another, forgetting what was downloaded.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(blob)
    with partial.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another download of the same file: wait for it
        if blob.exists():
            return
        if file.tell() > size:
            file.seek(0)
            file.truncate()
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=size, displayed_filename=name)
        file.flush()
        found = sha256_of(partial)
        if found != blob.name:
            partial.unlink()
            raise CorruptFileError(f"{name}: arrived damaged (its sha256 is {found}, not {blob.name}): pull again")
        partial.rename(blob)


def arrived_of(blob: Path) -> int:
    """Return how many bytes of a file are here, whether that is all of it or not."""
    for path in (blob, _partial(blob)):
        if path.is_file():
            return path.stat().st_size
    return 0


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
