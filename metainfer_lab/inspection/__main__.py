"""Report on an engine's kernels: ENGINE [KERNEL ...] [--target sm_90a] [--config F] [--json]."""

from __future__ import annotations

import argparse
import sys

from metainfer_lab.errors import InputError
from metainfer_lab.inspection.engines import run


def main() -> int:
    """Print the reports; 2 and one line on stderr for what cannot be inspected."""
    parser = argparse.ArgumentParser(prog="metainfer_lab.inspection", description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--target", action="append", help="sm_90a (default) or sm_100a; repeatable")
    parser.add_argument("--config")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args()
    try:
        targets = given.target or ["sm_90a"]
        print(run(given.engine, targets, given.names, given.config, given.json))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
