"""Where models live on this machine. No mlx."""

from __future__ import annotations

from pathlib import Path

from tinyllm.errors import ModelNotFoundError

EMBEDDED = "SmolLM2-135M-Instruct-from-Q4_1"
FETCH_COMMAND = "python scripts/fetch_model.py"


def models_folder() -> Path:
    """Return models/ of the checkout that this package runs from, else the platform's data folder for tinyllm."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "models").is_dir():
        return checkout / "models"
    from platformdirs import user_data_path

    return user_data_path("tinyllm") / "models"


def find_model(name: str | None) -> Path:
    """Return the folder that a person means by `name`: a path, or None for the embedded model.

    Raises ModelNotFoundError, saying what to do, where there is none.
    """
    if name is not None:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        raise ModelNotFoundError(f"{name}: there is no such folder" if not path.exists() else f"{name}: not a folder")
    path = models_folder() / EMBEDDED
    if not path.is_dir():
        raise ModelNotFoundError(
            f"the embedded model has not been fetched: run {FETCH_COMMAND} (93 MB), or name a model with -m FOLDER"
        )
    return path
