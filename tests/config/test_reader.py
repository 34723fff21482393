"""A configuration file is read whole and strictly, or refused in one line that names it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tiny

from tinyllm.config.config import Config
from tinyllm.config.reader import ConfigReader, Key, read_json_object
from tinyllm.errors import ConfigError, MissingKeyError, ModelNotFoundError, TinyllmError, UnknownKeyError

NOT_JSON_OBJECTS = {
    "empty": b"",
    "blank": b" \n ",
    "cut off": b'{"model_type": "llama"',
    "trailing text": b'{"model_type": "llama"} {}',
    "a list": b"[1, 2]",
    "a string": b'"llama"',
    "null": b"null",
    "invalid UTF-8": b'{"model_type": "\xff\xfe"}',
    "UTF-16": '{"model_type": "llama"}'.encode("utf-16"),
    "nested 100,000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a list 100,000 deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 10,000 digits": b'{"hidden_size": ' + b"9" * 10_000 + b"}",
    "a key twice": b'{"hidden_size": 32, "hidden_size": 64}',
    "a nested key twice": b'{"rope_scaling": {"factor": 2.0, "factor": 4.0}}',
}


@pytest.mark.parametrize("content", NOT_JSON_OBJECTS.values(), ids=NOT_JSON_OBJECTS.keys())
def test_what_is_no_json_object_is_refused_in_one_line_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as failure:
        Config.from_json_file(path)
    message = str(failure.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < len(str(path)) + 300


def test_a_key_that_stands_twice_with_different_values_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"nested": {"factor": 1, "factor": 2}}')
    with pytest.raises(ConfigError, match="'factor' is there twice, as 1 and as 2"):
        read_json_object(path)


def test_a_key_that_stands_twice_with_the_same_value_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"factor": [1, {"a": 2}], "factor": [1, {"a": 2}]}')
    assert read_json_object(path) == {"factor": [1, {"a": 2}]}


@pytest.mark.parametrize("depth", [50, 200, 400, 800, 900, 950, 990, 1000, 1100, 3000])
def test_a_deeply_nested_unknown_value_is_refused_at_any_depth(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "config.json"
    nested = '{"a":' * depth + "1" + "}" * depth
    path.write_text(json.dumps(tiny.config())[:-1] + f', "surprise": {nested}}}')
    with pytest.raises(ConfigError):
        Config.from_json_file(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        Config.from_json_file(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"nowhere"):
        Config.from_json_file(tmp_path / "nowhere")


def test_a_path_below_a_file_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(TinyllmError, match="file"):
        Config.from_json_file(tmp_path / "file" / "config.json")


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        Config.from_json_file(tmp_path)


def test_a_pipe_in_the_place_of_the_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json"):
        Config.from_json_file(tmp_path)


def test_a_device_in_the_place_of_the_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"config\.json"):
        Config.from_json_file(tmp_path)


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(TinyllmError, match=r"config\.json"):
        Config.from_json_file(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(ConfigError, match=r"config\.json"):
        Config.from_json_file(path)


def test_a_file_whose_reading_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "config.json"
    path.write_text("{}")
    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Path, "read_text", fail)
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ConfigError, match="Permission denied"):
        Config.from_json_file(path)


def test_a_file_larger_than_any_configuration_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing, which takes no space
    with pytest.raises(ConfigError, match=r"config\.json: larger than"):
        read_json_object(path)


def test_control_characters_from_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    tiny.write_json(path, tiny.config(**{"line\nbreak": 1, "\x1b[31mred": 1, "half \ud800": 1}))
    with pytest.raises(UnknownKeyError) as failure:
        Config.from_json_file(path)
    message = str(failure.value)
    assert message.isprintable()
    message.encode("utf-8")


def test_a_key_is_read_with_its_type_and_default() -> None:
    reader = ConfigReader({"size": 3, "eps": 1, "flag": True, "none": None}, "config.json")
    assert reader.read(Key("size", int)) == 3
    assert reader.read(Key("eps", float)) == 1.0
    assert reader.read(Key("flag", bool)) is True
    assert reader.read(Key("none", int, 4, nullable=True)) is None
    assert reader.read(Key("absent", int, 5)) == 5
    reader.finish()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, True),
        (int, 3.0),
        (int, "3"),
        (int, None),
        (float, "1e-5"),
        (float, False),
        (bool, 1),
        (str, 1),
        (list, {}),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(kind: type, value: object) -> None:
    reader = ConfigReader({"key": value}, "config.json", within="text_config")
    with pytest.raises(ConfigError, match=r"config\.json: text_config: 'key' must be of type"):
        reader.read(Key("key", kind))


def test_an_absent_key_without_default_is_named_with_its_place() -> None:
    reader = ConfigReader({"inner": {}}, "config.json")
    inner = reader.object("inner")
    assert inner is not None
    with pytest.raises(MissingKeyError, match=r"config\.json: inner: the key 'size' is absent"):
        inner.read(Key("size", int))


def test_keys_that_nothing_read_are_all_named() -> None:
    reader = ConfigReader({"one": 1, "two": 2, "three": 3}, "config.json")
    reader.take("two")
    with pytest.raises(UnknownKeyError, match="one = 1, three = 3"):
        reader.finish()
