"""Text that is given: read as it is, and no further than anybody can mean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinyllm.errors import UsageError
from tinyllm.text import given
from tinyllm.text.given import MOST_BYTES, read_text

ENDLESS = Path("/dev/zero")


def test_a_text_is_read_as_python_reads_it(tmp_path: Path) -> None:
    (file := tmp_path / "a").write_bytes("é\r\nb\rc\n".encode())
    assert read_text(file) == file.read_text(encoding="utf-8") == "é\nb\nc\n"


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "a", tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            read_text(path)


def test_a_text_has_so_many_bytes_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "MOST_BYTES", 6)
    (file := tmp_path / "a").write_text("ééé")
    assert read_text(file) == "ééé"
    file.write_text("ééé.")
    with pytest.raises(UsageError, match="the most that is read of one text: give a part of it"):
        read_text(file)


def test_what_has_no_end_and_what_is_enormous_are_refused_by_name(tmp_path: Path) -> None:
    (huge := tmp_path / "huge").touch()
    os.truncate(huge, 1 << 42)
    for path in (ENDLESS, huge):
        with pytest.raises(UsageError, match=f"{path}: larger than {MOST_BYTES >> 20} MB"):
            read_text(path)
