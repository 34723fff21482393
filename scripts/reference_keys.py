"""Lists the keys that the reference's code of a family reads and tinyllm's row of the family does not account for.

    python scripts/reference_keys.py FOLDER

FOLDER holds the sources of transformers ("transformers/models/..."); nothing of it is imported. A key that a row does
not know is inert at the values that switch things off (`ConfigReader.finish`). That holds as long as this list has
keys of other modalities only, and aliases: read what it names before you add a family.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tinyllm.config.config import Config
from tinyllm.config.reader import read_json_object
from tinyllm.errors import ConfigError, UnknownKeyError

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
READS = re.compile(r"\bconfig\.([a-z]\w+)|getattr\((?:self\.)?config, \"(\w+)\"")
DECLARES = re.compile(r"^    ([a-z]\w+): .* = ", re.MULTILINE)
TYPE = re.compile(r'^    model_type = "([^"]+)"', re.MULTILINE)
NO_KEYS = frozenset(  # attributes and methods of a config object
    "get_text_config to_dict is_moe_layer items get keys text_config vision_config layer_type sub_configs"
    " attribute_map model_type name_or_path num_labels problem_type rope_parameters standardize_rope_params"
    " per_layer_config dtype base_config_key base_model_tp_plan base_model_pp_plan max_position_embeddings".split()
)


def reads(models: Path, model_type: str) -> set[str]:
    """Return the names that the code of a model_type reads of its config, or declares there."""
    names: set[str] = set()
    for path in models.glob("*/configuration_*.py"):
        source = path.read_text(encoding="utf-8")
        parts = TYPE.split(source)  # what stands before, and then each type with what follows it
        for found, body in zip(parts[1::2], parts[2::2], strict=True):
            if found == model_type:
                names.update(DECLARES.findall(body.split("\nclass ")[0]))
                for code in path.parent.glob("modeling_*.py"):
                    names.update(a or b for a, b in READS.findall(code.read_text(encoding="utf-8")))
    return names - NO_KEYS


def unknown(folder: Path, names: set[str]) -> list[str]:
    """Return those of the names that a golden folder's config is refused for."""
    values = read_json_object(folder / "config.json")
    inner = values.get("text_config") if isinstance(values.get("text_config"), dict) else values
    found = []
    for name in sorted(names - set(inner)):
        changed = {**inner, name: "?"}
        try:
            Config.from_dict(changed if inner is values else {**values, "text_config": changed})
        except UnknownKeyError:
            found.append(name)
        except ConfigError:
            pass  # known, and of another type
    return found


def main() -> None:
    """Print a line for each family with such keys."""
    models = Path(sys.argv[1]) / "transformers" / "models"
    bad = 0
    seen = set()
    for folder in sorted(path.parent for path in GOLDEN.glob("*/config.json")):
        config = Config.from_json_file(folder / "config.json")
        if config.model_type in seen:
            continue
        seen.add(config.model_type)
        if names := unknown(folder, reads(models, config.model_type)):
            bad += 1
            print(f"{config.model_type}: {' '.join(names)}")
    print(f"{len(seen)} families, {bad} with keys that are not accounted for")


if __name__ == "__main__":
    main()
