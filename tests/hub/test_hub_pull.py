"""Pulling from a hub: what is asked for and in which order, what is refused before that, and what each fault says."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
from gguf_files import convert_golden, split_gguf
from hub_server import TOKEN, Hub
from huggingface_hub import constants, file_download

from tinyllm import hardware
from tinyllm.checkpoint.contents import read_contents
from tinyllm.checkpoint.summary import summarize
from tinyllm.errors import (
    ConfigError,
    CorruptFileError,
    DoesNotFitError,
    GatedRepositoryError,
    HubError,
    MissingFileError,
    ModelNotFoundError,
    OfflineError,
    TensorMismatchError,
    TinyllmError,
    TokenizerError,
    UnknownKeyError,
    UnsafePathError,
    UnsupportedModelError,
    UnsupportedQuantizationError,
)
from tinyllm.hub import cache, failures, inventory
from tinyllm.hub.locate import find_model, model_name
from tinyllm.hub.pull import pull as pull_repository
from tinyllm.hub.sizes import disk_size

REPO = "org/tiny"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub().running() as running:
        yield running


@pytest.fixture
def remote(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub, as the library of this process sees it, with an empty cache and nobody logged in."""
    server.forget()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return server


@pytest.fixture
def published(remote: Hub, tiny_checkpoint: Path) -> Hub:
    remote.add(REPO, tiny_checkpoint)
    return remote


def pull(**options: Any) -> Path:
    return pull_repository(REPO, report=lambda line: None, **options)


def blob_of(snapshot: Path, name: str = "model.safetensors") -> Path:
    return (snapshot / name).resolve()


def only_headers(requests: list[Any]) -> bool:
    """Whether no weight was asked for: headers are read by a range that says where it ends."""
    return all(request.range is not None and not request.range.endswith("-") for request in requests)


# ---------------------------------------------------------------- what is fetched


@pytest.mark.parametrize("below", [".", "F32"])
def test_headers_of_all_parts_are_checked_before_any_is_downloaded(remote: Hub, tmp_path: Path, below: str) -> None:
    (source := tmp_path / "source").mkdir()
    (source / below).mkdir(exist_ok=True)
    parts = split_gguf(convert_golden("llama", source / below / "tiny-F32.gguf", tokenizer=True), 10)
    good = parts[1].read_bytes()
    shutil.copy(parts[2], parts[1])
    remote.add(REPO, source)
    with pytest.raises(CorruptFileError, match=rf"^{REPO}/{parts[1].relative_to(source)}: is part 2 of 3"):
        pull_repository(f"{REPO}:F32", report=lambda line: None)
    assert only_headers(remote.downloads())
    parts[1].write_bytes(good)
    remote.add(REPO, source)
    lines: list[str] = []
    path = pull_repository(f"{REPO}:F32", report=lines.append)
    assert disk_size(sum(part.stat().st_size for part in parts)) in lines[0]
    assert path.name == parts[0].name and model_name(path) == f"{REPO}:F32"
    assert [(path.parent / part.name).read_bytes() for part in parts] == [part.read_bytes() for part in parts]
    assert find_model(f"{REPO}:F32", offline=True) == path
    assert summarize(read_contents(path)).family == "llama"
    [entry] = (entry for entry in inventory.inventory() if entry.place == "hub cache")
    assert (entry.name, entry.problem) == (f"{REPO}:F32", None)


def test_a_pull_gives_a_folder_that_loads_with_the_files_as_they_were(published: Hub, tiny_checkpoint: Path) -> None:
    folder = pull()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in tiny_checkpoint.iterdir()
    }
    assert folder == cache.find_snapshot(REPO) and cache.why_incomplete(folder) is None
    assert summarize(read_contents(folder)) == summarize(read_contents(tiny_checkpoint))


def test_only_the_files_that_are_needed_are_asked_for(remote: Hub, tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "sharded", shards=3)
    needed = {path.name for path in folder.iterdir()} | {"additional_chat_templates/tools.jinja"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (folder / "original").mkdir()
    for surplus in (
        "README.md", "pytorch_model.bin", "consolidated.safetensors", "model-00001-of-00002.safetensors",
        "tokenizer.model", "modeling_tiny.py", "original/consolidated.00.pth", "original/params.json",
    ):  # fmt: skip
        (folder / surplus).write_bytes(b"x")
    remote.add(REPO, folder)
    snapshot = pull()
    assert {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()} == needed
    assert remote.fetched() == needed


def test_the_sizes_are_told_before_a_weight_is_asked_for(published: Hub) -> None:
    lines: list[tuple[str, bool]] = []
    pull_repository(REPO, report=lambda line: lines.append((line, only_headers(published.downloads()))))
    [(line, nothing_large)] = lines
    assert nothing_large and not only_headers(published.downloads())
    assert line.startswith(f"{REPO}: llama, f32, ") and line.endswith("of memory: fits")
    assert "of disk free" in line


def test_a_second_pull_downloads_nothing_and_a_new_commit_only_what_changed(published: Hub) -> None:
    first = pull()
    published.requests.clear()
    assert pull() == first
    assert only_headers(published.downloads())
    published.repositories[REPO].files["config.json"] += b" "
    second = pull()
    assert second != first and cache.find_snapshot(REPO) == second
    assert blob_of(second) == blob_of(first) and only_headers(published.downloads())


def test_a_revision_is_kept_under_its_name(published: Hub) -> None:
    commit = published.repositories[REPO].commit
    assert pull(revision=commit).name == commit
    assert cache.find_snapshot(REPO, commit) is not None and cache.find_snapshot(REPO) is None
    with pytest.raises(ModelNotFoundError, match="no such revision"):
        pull(revision="v2")
    with pytest.raises(ModelNotFoundError, match=r"not the name of a branch"):
        pull(revision="../../elsewhere")


def test_a_repository_that_has_moved_is_followed(published: Hub) -> None:
    published.repositories["org/new"] = published.repositories[REPO]
    published.repositories[REPO] = type(published.repositories[REPO])({}, moved_to="org/new")
    assert cache.why_incomplete(pull()) is None


# ---------------------------------------------------------------- what is refused before a weight is downloaded


def with_config(folder: Path, **changes: Any) -> None:
    tiny.write_json(folder / "config.json", tiny.config(**changes))


def with_other_weights(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)


def with_an_index_to(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    tiny.write_json(folder / "model.safetensors.index.json", {"weight_map": {"lm_head.weight": name}})


def renamed(old: str, new: str, folder: Path) -> None:
    (folder / old).rename(folder / new)


def as_gguf(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "tiny.Q4_0.gguf").write_bytes(b"GGUF")


TERABYTES = (1 << 41).to_bytes(8, "little") + b"{}"
HQQ = {"quant_method": "hqq", "bits": 4}
REFUSALS: list[tuple[Callable[[Path], object], type[TinyllmError], str]] = [
    (partial(with_config, model_type="mamba"), UnsupportedModelError, "org/tiny/config.json: model_type 'mamba'"),
    (partial(with_config, frobnicate=3), UnknownKeyError, "org/tiny/config.json: .*frobnicate = 3"),
    (partial(with_config, quantization_config=HQQ), UnsupportedQuantizationError, "'hqq'"),
    (partial(with_config, num_hidden_layers=3), TensorMismatchError, "org/tiny: .*missing"),
    (lambda folder: (folder / "config.json").write_text("{"), ConfigError, "org/tiny/config.json: not readable"),
    (partial(renamed, "model.safetensors", "model.bin"), MissingFileError, "org/tiny: holds only pickled weights"),
    (partial(renamed, "tokenizer.json", "tokenizer.model"), TokenizerError, "org/tiny has .*only tokenizer.model"),
    (partial(with_an_index_to, "../evil.safetensors"), UnsafePathError, "leads out of the folder"),
    (partial(with_an_index_to, "absent.safetensors"), MissingFileError, "absent.safetensors"),
    (as_gguf, MissingFileError, "org/tiny: there is no config.json in it; it has GGUF files: add :Q4_0"),
    (partial(with_other_weights, content=TERABYTES), CorruptFileError, "org/tiny/model.safetensors: its header"),
    (partial(with_other_weights, content=b""), CorruptFileError, "org/tiny/model.safetensors"),
]


@pytest.mark.parametrize(("spoil", "error", "told"), REFUSALS, ids=[told for _, _, told in REFUSALS])
def test_faults_52_53_what_cannot_run_is_refused_before_a_weight_is_downloaded(
    remote: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], object],
    error: type[TinyllmError],
    told: str,
) -> None:
    spoil(folder := tiny.write_checkpoint(tmp_path / "source"))
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    remote.add(REPO, folder)
    with pytest.raises(error, match=told) as failure:
        pull()
    assert "\n" not in str(failure.value) and str(scratch) not in str(failure.value)
    assert only_headers(remote.downloads())
    assert not (tmp_path / "hub").exists() and not list(scratch.iterdir())


def test_what_the_small_files_tell_is_refused_before_a_header_is_read(remote: Hub, tmp_path: Path) -> None:
    foreign, mute = tiny.write_checkpoint(tmp_path / "foreign"), tiny.write_checkpoint(tmp_path / "mute")
    with_config(foreign, model_type="mamba")
    (mute / "tokenizer.json").unlink()
    for folder in (foreign, mute):
        remote.add(REPO, folder)
        with pytest.raises(TinyllmError):
            pull()
    assert remote.fetched() == {"config.json"}


def test_a_refusal_is_word_for_word_that_of_loading_the_folder(remote: Hub, tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "source")
    with_config(folder, num_hidden_layers=3)
    remote.add(REPO, folder)
    with pytest.raises(TinyllmError) as here:
        summarize(read_contents(folder))
    with pytest.raises(TinyllmError) as there:
        pull()
    assert str(there.value) == str(here.value).replace(str(folder), REPO)


def test_fault_53_names_that_lead_out_of_the_folder_are_not_touched(published: Hub, tmp_path: Path) -> None:
    hostile = ("../evil.safetensors", "/tmp/evil.json", "a\\..\\b.json", "..", "additional_chat_templates/../x.jinja")
    published.repositories[REPO].files |= dict.fromkeys(hostile, b"{}")
    snapshot = pull()
    assert not published.fetched() & set(hostile)
    assert {path.name for path in tmp_path.rglob("*")}.isdisjoint(Path(name).name or name for name in hostile)
    assert cache.why_incomplete(snapshot) is None


def test_long_headers_are_read_whole(remote: Hub, tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "source")
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length] + b" " * 200_000
    tiny.write_raw_safetensors(folder / "model.safetensors", header, [data[8 + length :]])
    remote.add(REPO, folder)
    assert cache.why_incomplete(pull()) is None


# ---------------------------------------------------------------- what does not fit


def test_what_memory_cannot_hold_is_downloaded_only_with_force(
    published: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "total_memory", lambda: 1000)
    lines: list[str] = []
    with pytest.raises(DoesNotFitError, match=r"this machine has .*--force"):
        pull_repository(REPO, report=lines.append)
    assert only_headers(published.downloads())
    assert cache.why_incomplete(pull_repository(REPO, force=True, report=lines.append)) is None
    assert [line.endswith("does not fit") for line in lines] == [True, True]
    pull_repository(REPO, report=lines.append)  # what is here already is no matter of force


def test_what_the_disk_cannot_hold_is_not_begun_even_with_force(
    published: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DoesNotFitError, match=r"10 kB of disk free: make room"):
        pull(force=True)
    assert only_headers(published.downloads())


def test_fault_45_a_disk_that_fills_up_is_called_that(published: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", no_space)
    with pytest.raises(DoesNotFitError, match=r"the disk of .* is full: make room and pull again"):
        pull()
    assert cache.find_snapshot(REPO) is None  # the revision does not name what is not whole


# ---------------------------------------------------------------- interrupted downloads


def test_a_connection_that_is_cut_goes_on_where_it_was_and_nothing_is_said(
    published: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    published.cuts = [40_000, 40_000]
    snapshot = pull()
    ranges = [request.range for request in published.downloads() if not only_headers([request])]
    assert ranges == [None, f"bytes={2 << 14}-", f"bytes={4 << 14}-"]
    assert cache.why_incomplete(snapshot) is None
    assert capfd.readouterr() == ("", "")


def test_a_partial_file_of_an_earlier_run_is_completed_and_counts_as_here(
    published: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = pull()
    small = sum(path.stat().st_size for path in snapshot.iterdir() if path.name != "model.safetensors")
    data, blob = blob_of(snapshot).read_bytes(), blob_of(snapshot)
    shutil.rmtree(snapshot)
    blob.unlink()
    blob.with_name(f"{blob.name}.incomplete").write_bytes(data[:50_000])
    published.requests.clear()
    usage = shutil.disk_usage("/")._replace(free=len(data) - 40_000)  # enough for the rest of it
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    lines: list[str] = []
    pull_repository(REPO, report=lines.append)
    assert f"{disk_size(len(data) + small - 50_000)} of it to download" in lines[0]
    assert [request.range for request in published.downloads() if not only_headers([request])] == ["bytes=50000-"]
    assert blob.read_bytes() == data and not blob.with_name(f"{blob.name}.incomplete").exists()


@pytest.mark.parametrize("length", [50_000, 10**7])
def test_a_partial_file_of_other_content_is_not_built_upon(published: Hub, length: int) -> None:
    snapshot = pull()
    blob = blob_of(snapshot)
    shutil.rmtree(snapshot)
    blob.unlink()
    blob.with_name(f"{blob.name}.incomplete").write_bytes(b"x" * length)
    if length < published.repositories[REPO].size("model.safetensors"):
        with pytest.raises(CorruptFileError, match="arrived damaged"):
            pull()
        assert not blob.exists()
    assert cache.why_incomplete(pull()) is None


def test_a_hub_that_keeps_breaking_off_is_an_error_that_says_so(
    published: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    published.cuts = [100] * 20
    with pytest.raises(HubError, match="cannot be reached: peer closed connection"):
        pull()
    published.cuts = []
    assert cache.why_incomplete(pull()) is None


# ---------------------------------------------------------------- what the hub says


def test_a_gated_repository_says_where_to_accept_and_opens_with_a_token(
    published: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.repositories[REPO].gated = True
    with pytest.raises(GatedRepositoryError, match=f"{published.address}/{REPO} while logged in, .*HF_TOKEN"):
        pull()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert cache.why_incomplete(pull()) is None
    assert not any(request.authorized for request in published.downloads())  # the token stays with the hub


def test_fault_45_each_cause_has_its_own_line(published: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"modl/x: the hub .* has no such repository"):
        pull_repository("modl/x", report=print)
    published.fails_with = 503
    with pytest.raises(HubError, match="answered 503: try again later"):
        pull()
    published.fails_with = 403
    with pytest.raises(GatedRepositoryError, match="refuses the token"):
        pull()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"the hub \(http://127.0.0.1:9\) cannot be reached: .*refused"):
        pull()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineError, match="HF_HUB_OFFLINE"):
        pull()


def test_an_error_that_nobody_foresaw_is_not_dressed_up() -> None:
    with pytest.raises(PermissionError), failures.told(REPO):
        raise PermissionError(errno.EACCES, "Permission denied", "/hub")


# ---------------------------------------------------------------- fault 08: caches that are not whole


def test_fault_08_links_into_the_blobs_load_and_a_dangling_one_is_downloaded_again(published: Hub) -> None:
    snapshot = pull()
    assert (snapshot / "model.safetensors").is_symlink() and find_model(REPO, offline=True) == snapshot
    blob_of(snapshot).unlink()
    again = rf"download is not whole \(model.safetensors links to nothing; .*run tinyllm pull {REPO}"
    with pytest.raises(OfflineError, match=again):
        find_model(REPO, offline=True)
    with pytest.raises(MissingFileError, match=r"model.safetensors links to nothing; download again"):
        find_model(str(snapshot))
    assert find_model(REPO) == snapshot and cache.why_incomplete(snapshot) is None


def test_fault_08_a_snapshot_of_which_only_a_part_has_arrived_is_not_taken_as_whole(published: Hub) -> None:
    snapshot = pull()
    blob = blob_of(snapshot)
    (snapshot / "model.safetensors").unlink()
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    with pytest.raises(OfflineError, match=r"download is not whole .*no weights"):
        find_model(REPO, offline=True)
    published.requests.clear()
    assert find_model(REPO) == snapshot and cache.why_incomplete(snapshot) is None
    assert only_headers(published.downloads())  # the part was all of it


def test_what_a_snapshot_lacks_is_named(published: Hub) -> None:
    snapshot = pull()
    for name, told in (("config.json", "there is no config.json"), ("tokenizer.json", "has no tokenizer.json")):
        link = (snapshot / name).readlink()
        (snapshot / name).unlink()
        assert told in str(cache.why_incomplete(snapshot))
        (snapshot / name).symlink_to(link)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in str(cache.why_incomplete(snapshot))


def test_a_repository_that_is_here_is_taken_without_asking_the_hub(published: Hub) -> None:
    snapshot = pull()
    published.connections = 0
    published.requests.clear()
    assert find_model(REPO) == find_model(f"{REPO}@main") == snapshot
    assert (published.requests, published.connections) == ([], 0)


def test_a_reference_to_no_commit_is_no_snapshot(published: Hub) -> None:
    snapshot = pull()
    reference = cache.repository_folder(REPO) / "refs" / "main"
    for content in ("", "../../..", snapshot.name + "0", "0" * 40):
        reference.write_text(content)
        assert cache.find_snapshot(REPO) is None
