"""The command line of a rank of a replay."""

import argparse
from pathlib import Path


def replay_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of a rank of a replay. Its arguments have other names than those of a training rank, whose logs and
    saves are kept."""
    parser = argparse.ArgumentParser(description=description)
    for name, kind in (("of", str), ("launch", int), ("root", str), ("from-step", int), ("to-step", int)):
        parser.add_argument(f"--{name}", required=True, type=kind)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--state-digest", default="")
    parser.add_argument("--results", required=True, type=Path)
    return parser
