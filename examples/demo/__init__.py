"""A small language model answers questions about this project, and every attention in it is ours.

    python examples/demo [--model FOLDER] [--picture FILE] [--ask QUESTION] [--row]

`sh scripts/demo` does the same from a clean checkout, and installs what it needs.
"""

import argparse
import sys
from collections.abc import Sequence

PICTURE = "numba_flash_demo.png"


def run(
    model: str | None = None,
    picture: str = PICTURE,
    questions: Sequence[str] = (),
    quiet: bool = False,
    row: bool = False,
) -> bool:
    """Run the demo; True when every check held. No `questions` means the demo's own.

    row: show one row of attention, and nothing else.
    """
    from .story import tell

    return tell(model, picture, questions, quiet, row)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. 0: all checks held, 1: one did not, 2: the demo could not run as asked."""
    parser = argparse.ArgumentParser(prog="python examples/demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", metavar="FOLDER", help="holds MiniLM's config.json, tokenizer.json and model.safetensors"
    )
    parser.add_argument("--picture", metavar="FILE", default=PICTURE, help=f"the PNG; default {PICTURE}")
    parser.add_argument("--ask", metavar="QUESTION", action="append", default=[], help="may be repeated")
    parser.add_argument("--row", action="store_true", help="only one row of attention, tile by tile: some seconds")
    parser.add_argument("--quiet", action="store_true", help="say nothing; the exit status tells")
    arguments = parser.parse_args(argv)
    try:
        passed = run(arguments.model, arguments.picture, arguments.ask, arguments.quiet, arguments.row)
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    return 0 if passed else 1
