"""Which model is meant where none is named: the environment's, the one set by `tinyllm use`, the embedded one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tinyllm.errors import SettingsError, UsageError

__all__ = ["DEFAULT", "ENVIRONMENT", "Choice", "choose", "save_choice", "saved_choice", "settings_file"]

ENVIRONMENT = "TINYLLM_MODEL"
DEFAULT = "default"  # the embedded model's short name
_WAY_OUT = "tinyllm use --clear forgets it"


@dataclass(frozen=True)
class Choice:
    """The name of a model, and who gave it. `is_fallback` where nobody did, so that it is the embedded one."""

    name: str
    source: str
    is_fallback: bool = False


def choose(name: str | None = None) -> Choice:
    """Return the model to use: `name` if there is one, else $TINYLLM_MODEL, the saved one, the embedded one."""
    if name is not None:
        if not name.strip():
            raise UsageError("the name of the model is empty")
        return Choice(name, "-m")
    if os.environ.get(ENVIRONMENT, "").strip():
        return Choice(os.environ[ENVIRONMENT], f"${ENVIRONMENT}")
    saved = saved_choice()
    if saved is not None:
        return Choice(saved, "tinyllm use")
    return Choice(DEFAULT, "no other was chosen", is_fallback=True)


def settings_file() -> Path:
    """Return the file that `tinyllm use` writes, in the platform's folder for settings."""
    from platformdirs import user_config_path

    return user_config_path("tinyllm") / "settings.json"


def saved_choice() -> str | None:
    """Return the model that `tinyllm use` has set, if any. Raises SettingsError for a file that is something else."""
    file = settings_file()
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{file}: cannot be read ({error}); {_WAY_OUT}") from error
    model = settings.get("model") if isinstance(settings, dict) else None
    if not isinstance(model, str) or not model:
        raise SettingsError(f"{file}: does not name a model; {_WAY_OUT}")
    return model


def save_choice(name: str | None) -> None:
    """Set the model that is used from now on, or with None forget it; the file is replaced whole."""
    file = settings_file()
    try:
        if name is None:
            file.unlink(missing_ok=True)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"model": name}) + "\n", encoding="utf-8")
        new.replace(file)
    except OSError as error:
        raise SettingsError(f"{file}: cannot be written: {error.strerror}") from error
