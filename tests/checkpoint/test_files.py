"""Which files are the checkpoint: what the index names, inside the folder, and never a pickle."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny

from tinyllm.checkpoint.files import INDEX, SINGLE, checked_file, find_weight_files
from tinyllm.checkpoint.weights import WeightStore
from tinyllm.errors import CheckpointError, ConfigError, MissingFileError, TinyllmError, UnsafePathError


def files_of(folder: Path) -> list[str]:
    return [file.name for file in find_weight_files(folder).files]


def write_index(folder: Path, weight_map: Any) -> None:
    tiny.write_json(folder / INDEX, {"weight_map": weight_map})


def write_empty(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tiny.write_safetensors(path, {})


def test_a_single_file_is_read(tmp_path: Path) -> None:
    write_empty(tmp_path / SINGLE)
    write_empty(tmp_path / "another.safetensors")
    assert files_of(tmp_path) == [SINGLE]


def test_the_index_decides_which_files_are_read(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "stray.safetensors"):
        write_empty(tmp_path / name)
    write_index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    assert files_of(tmp_path) == ["a.safetensors", "b.safetensors"]


def test_a_file_in_a_folder_below_is_read(tmp_path: Path) -> None:
    write_empty(tmp_path / "text" / "a.safetensors")
    write_index(tmp_path, {"x": "text/a.safetensors"})
    assert find_weight_files(tmp_path).files == (tmp_path / "text" / "a.safetensors",)


def test_without_index_all_files_but_the_consolidated_duplicate_are_read(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "consolidated.safetensors"):
        write_empty(tmp_path / name)
    assert files_of(tmp_path) == ["a.safetensors", "b.safetensors"]


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(MissingFileError, match="no weights"):
            find_weight_files(folder)


# Fault 01: an index that names what is not there.


def test_fault_01_absent_shards_are_listed(tmp_path: Path) -> None:
    write_empty(tmp_path / "a.safetensors")
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"})
    with pytest.raises(MissingFileError, match=r"b\.safetensors, c\.safetensors.*download"):
        find_weight_files(tmp_path)


def test_fault_01_a_single_file_beside_a_stale_index_is_read_and_the_absent_are_told(tmp_path: Path) -> None:
    write_empty(tmp_path / SINGLE)
    write_index(tmp_path, {"x": "a.safetensors"})
    found = find_weight_files(tmp_path)
    assert ([file.name for file in found.files], found.absent) == ([SINGLE], ("a.safetensors",))


@pytest.mark.parametrize(
    "weight_map",
    [None, [], "a.safetensors", 1, {"x": 1}, {"x": None}, {"x": ["a.safetensors"]}, {"x": {}}, {"x": True}],
    ids=repr,
)
def test_fault_01_an_index_without_a_map_of_names_is_refused(tmp_path: Path, weight_map: Any) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: has no weight_map"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"weight_map": {"x": "a", "x": "b"}}', b"{" * 9999])
def test_fault_01_an_index_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ConfigError, match=r"index\.json"):
        find_weight_files(tmp_path)


def test_fault_01_an_index_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).mkdir()
    with pytest.raises(TinyllmError, match=r"index\.json"):
        find_weight_files(tmp_path)


def test_an_index_of_a_very_large_model_is_read(tmp_path: Path) -> None:
    write_empty(tmp_path / "a.safetensors")
    write_index(tmp_path, {f"model.layers.0.mlp.experts.{i}.{'x' * 90}": "a.safetensors" for i in range(150_000)})
    assert (tmp_path / INDEX).stat().st_size > 16 << 20
    assert files_of(tmp_path) == ["a.safetensors"]


# Fault 53: names and links that lead out of the folder.

OUTSIDE = [
    "../x.safetensors",
    "a/../../x.safetensors",
    "..",
    "/etc/passwd",
    "//etc/passwd",
    "..\\x.safetensors",
    "a\\x.safetensors",
    "",
]
NOWHERE = ["a\0.safetensors", "\ud800.safetensors", "x" * 5000, "a/" * 3000 + "x"]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_fault_53_a_name_that_leads_out_of_the_folder_is_refused_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "model"
    write_empty(tmp_path / "x.safetensors")
    folder.mkdir()
    write_index(folder, {"x": name})
    opened: list[str] = []
    original = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self.name) or original(self, *a, **k))
    with pytest.raises(UnsafePathError) as failure:
        find_weight_files(folder)
    assert repr(name)[1:-1].replace("\\\\", "\\") in str(failure.value).replace("\\\\", "\\")
    assert set(opened) <= {INDEX}


@pytest.mark.parametrize("name", NOWHERE, ids=["NUL", "half a character", "too long", "too deep"])
def test_fault_53_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, {"x": name})
    with pytest.raises(CheckpointError) as failure:
        find_weight_files(tmp_path)
    assert str(failure.value).isprintable()


@pytest.mark.parametrize("name", [SINGLE, "a.safetensors", "sub/a.safetensors"])
def test_links_are_followed_anywhere_from_a_folder_of_the_users(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    (folder / name).parent.mkdir(parents=True)
    write_empty(tmp_path / "elsewhere" / "real.safetensors")
    (folder / name).symlink_to(tmp_path / "elsewhere" / "real.safetensors")
    if "/" in name:
        write_index(folder, {"x": name})
    assert find_weight_files(folder).files == (folder / name,)


def test_a_linked_folder_in_a_download_is_not_followed(tmp_path: Path) -> None:
    write_empty(tmp_path / "outside" / "a.safetensors")
    snapshot = hub_snapshot(tmp_path)
    (snapshot / "sub").symlink_to(tmp_path / "outside")
    write_index(snapshot, {"x": "sub/a.safetensors"})
    with pytest.raises(UnsafePathError, match="a link that leads out of the folder"):
        find_weight_files(snapshot)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"x": 1}], ids=repr)
def test_a_single_file_beside_an_index_without_a_map_is_read_with_a_warning(
    tmp_path: Path, weight_map: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_empty(tmp_path / SINGLE)
    write_index(tmp_path, weight_map)
    assert files_of(tmp_path) == [SINGLE]
    assert "model.safetensors is read instead" in caplog.text


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    write_empty(tmp_path / "real.bin")
    (tmp_path / SINGLE).symlink_to("real.bin")
    assert files_of(tmp_path) == [SINGLE]


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    write_empty(tmp_path / "real" / SINGLE)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert files_of(tmp_path / "link") == [SINGLE]


def test_links_that_lead_to_themselves_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to("b.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    with pytest.raises(CheckpointError):
        WeightStore.from_path(tmp_path, tiny_config(tmp_path))
    write_index(tmp_path, {"x": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        find_weight_files(tmp_path)


def tiny_config(folder: Path) -> Any:
    from tinyllm.config.config import Config

    return Config.from_dict(tiny.config(), source=str(folder))


def test_a_users_folder_of_snapshots_is_no_download(tmp_path: Path) -> None:
    write_empty(tmp_path / "elsewhere.safetensors")
    folder = tmp_path / "snapshots" / "mine"
    folder.mkdir(parents=True)
    (folder / SINGLE).symlink_to(tmp_path / "elsewhere.safetensors")
    assert files_of(folder) == [SINGLE]


def test_an_index_that_names_what_its_files_lack_gives_way_to_a_single_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.safetensors", SINGLE):
        write_empty(tmp_path / name)
    write_index(tmp_path, {"x": "a.safetensors"})
    assert files_of(tmp_path) == [SINGLE]
    assert "model.safetensors is read instead" in caplog.text


# Fault 08: the hub's cache.


def hub_snapshot(cache: Path, **links: str) -> Path:
    """Make a repository as the hub's cache has it; `links` are names in the snapshot and the blobs they lead to."""
    repository = cache / "models--owner--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name, blob in links.items():
        (snapshot / f"{name}.safetensors").symlink_to(Path("..", "..", "blobs", blob))
    return snapshot


def test_fault_08_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, model="abc")
    write_empty(tmp_path / "models--owner--name" / "blobs" / "abc")
    assert files_of(snapshot) == [SINGLE]


def test_fault_08_a_blob_that_is_gone_is_named_by_its_link_and_to_be_downloaded_again(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, a="abc", b="def")
    write_empty(tmp_path / "models--owner--name" / "blobs" / "abc")
    (tmp_path / "models--owner--name" / "blobs" / "def.incomplete").write_bytes(b"")
    write_index(snapshot, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(MissingFileError, match=r"b\.safetensors.*download"):
        find_weight_files(snapshot)


@pytest.mark.parametrize(
    "target",
    [
        "../../../models--owner--other/blobs/abc",
        "../../../../secret",
        "../../refs/main",
        "../../blobs/../refs/main",
        "../other/model.safetensors",
    ],
)
def test_fault_53_a_link_out_of_the_cached_repositorys_blobs_is_refused(tmp_path: Path, target: str) -> None:
    snapshot = hub_snapshot(tmp_path)
    (snapshot / SINGLE).symlink_to(target)
    write_empty(Path(os.path.normpath(snapshot / target)))
    with pytest.raises(UnsafePathError):
        find_weight_files(snapshot)


@pytest.mark.parametrize("name", ["config.json", "sub/config.json"])
def test_a_checked_file_is_inside_the_folder(tmp_path: Path, name: str) -> None:
    assert checked_file(tmp_path, name) == tmp_path / name


# Fault 52: pickles.


class Pickled:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_fault_52_pickled_weights_are_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    (tmp_path / name).write_bytes(pickle.dumps(Pickled(marker)))
    pickle.loads((tmp_path / name).read_bytes())
    assert marker.exists(), "the trap works"
    marker.unlink()
    with pytest.raises(MissingFileError, match=f"{name}.*pickled|pickled.*{name}"):
        find_weight_files(tmp_path)
    assert not marker.exists()


def test_fault_52_an_index_that_names_a_pickle_is_refused_unread(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled(marker)))
    tiny.write_json(tmp_path / "config.json", tiny.config())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "pytorch_model.bin"}}))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        WeightStore.from_path(tmp_path)
    assert not marker.exists()
