"""What the demo writes to the terminal: paragraphs, and a bar or a line while something takes its time."""

import importlib.util
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
WIDTH = 100


class Screen:
    def __init__(self, quiet: bool = False):
        self.quiet = quiet

    def line(self, text: str = "") -> None:
        if not self.quiet:
            print(text, flush=True)

    def title(self, text: str) -> None:
        self.line(f"\n{text}\n{'-' * len(text)}")

    def say(self, text: str, indent: str = "") -> None:
        # Paths stay whole, so that they can be copied.
        wrapper = textwrap.TextWrapper(WIDTH, indent, indent, break_on_hyphens=False, break_long_words=False)
        for line in wrapper.wrap(text):
            self.line(line)

    def progress(self, items: Sequence[T], what: str) -> Iterable[T]:
        """The items, one by one, with a bar that goes away at the end; in a file or a pipe only a line."""
        if self.quiet or not sys.stdout.isatty():
            self.line(f"{what} ...")
            return items
        if importlib.util.find_spec("rich") is None:
            return counted(items, what)
        from rich.progress import track

        return track(items, what, transient=True)


def counted(items: Sequence[T], what: str) -> Iterator[T]:
    for number, item in enumerate(items, 1):
        print(f"\r{what}: {number} of {len(items)} ", end="", flush=True)
        yield item
    print()
