"""A machine of its own for each test: its models, its settings, its cache, and no hub to reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from tinyllm.hub import choice, locate


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with models/, hub/ and config/ where tinyllm looks; all of them are yet to be made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINYLLM_MODEL", raising=False)
    monkeypatch.setattr(choice, "settings_file", lambda: tmp_path / "config" / "settings.json")
    monkeypatch.setattr(locate, "models_folder", lambda: tmp_path / "models")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path
