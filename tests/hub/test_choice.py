"""Which model is meant where none is named, and how the choice is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyllm.errors import SettingsError, UsageError
from tinyllm.hub.choice import choose, save_choice, saved_choice

pytestmark = pytest.mark.usefixtures("home")


def test_the_flag_goes_before_the_environment_the_saved_choice_and_the_embedded_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (choose().name, choose().is_fallback) == ("default", True)
    save_choice("org/saved")
    assert (choose().name, choose().source) == ("org/saved", "tinyllm use")
    monkeypatch.setenv("TINYLLM_MODEL", "org/environment")
    assert (choose().name, choose().source) == ("org/environment", "$TINYLLM_MODEL")
    assert (choose("org/flag").name, choose("org/flag").source) == ("org/flag", "-m")
    monkeypatch.setenv("TINYLLM_MODEL", " ")
    save_choice(None)
    assert choose().is_fallback and not choose("default").is_fallback


def test_an_empty_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="empty"):
        choose("")


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}', "{}", '"' + "[" * 10_000, "\udcff"])
def test_a_broken_settings_file_is_named_with_the_way_out(home: Path, content: str) -> None:
    file = home / "config" / "settings.json"
    file.parent.mkdir()
    file.write_text(content, errors="surrogateescape")
    with pytest.raises(SettingsError, match=rf"{file}: .*tinyllm use --clear") as failure:
        choose()
    assert "\n" not in str(failure.value)
    assert choose("org/flag").name == "org/flag"  # it is not in the way of a name that is given
    save_choice(None)
    assert saved_choice() is None


def test_a_saved_choice_replaces_the_file_whole(home: Path) -> None:
    save_choice("org/one")
    save_choice("org/two")
    assert saved_choice() == "org/two"
    assert [path.name for path in (home / "config").iterdir()] == ["settings.json"]


def test_settings_that_cannot_be_written_are_an_error_with_the_cause(home: Path) -> None:
    (home / "config").write_text("a file in the place of the folder")
    with pytest.raises(SettingsError, match="cannot be written: "):
        save_choice("org/one")
