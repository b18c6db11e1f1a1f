"""The project's own documentation, cut into passages of a few sentences that remember where they stand."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What is written for users.
PAGES = (
    "README.md",
    "docs/contract.md",
    "docs/environment.md",
    "docs/frameworks.md",
    "docs/numerics.md",
    "docs/stepping.md",
    "docs/testing_your_kernel.md",
    "docs/troubleshooting.md",
    "docs/variants.md",
)
MODULES = tuple(f"numba_flash/{name}.py" for name in ("api/*", "compat/*", "debug/*", "mods", "reference", "testing/*"))
MIN_WORDS = 25  # less says too little to be found by its meaning
MAX_WORDS = 100  # more no longer fits the 256 tokens the model reads


@dataclass(frozen=True)
class Passage:
    file: str
    line: int
    text: str


def project_passages() -> list[Passage]:
    found: list[Passage] = []
    for name in PAGES:
        found += split((ROOT / name).read_text(encoding="utf-8"), name)
    for path in sorted(path for names in MODULES for path in ROOT.glob(names)):
        for line, text in docstrings(path.read_text(encoding="utf-8")):
            if len(text.split()) >= MIN_WORDS:
                found += split(text, path.relative_to(ROOT).as_posix(), line)
    return found


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring: the module's, its classes' and its functions'."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            expression = node.body[0]
            assert isinstance(expression, ast.Expr) and isinstance(expression.value, ast.Constant)
            yield expression.lineno, str(expression.value.value)


def split(text: str, file: str, first_line: int = 1) -> list[Passage]:
    """Join paragraphs and list items until they say enough; a heading starts anew, too long is cut.

    What is left at the end says too little by itself. It goes to what is before it, if it fits.
    """
    passages: list[Passage] = []
    words: list[str] = []
    start, headed = first_line, False  # of the words: their first line, and whether a heading is above them
    in_code = False  # a line that starts with # is a comment there, not a heading

    def close() -> None:
        joined = [*passages[-1].text.split(), *words] if passages and not headed and len(words) < MIN_WORDS else []
        if joined and len(joined) <= MAX_WORDS:
            passages[-1] = Passage(file, passages[-1].line, " ".join(joined))
        elif words:
            passages.append(Passage(file, start, " ".join(words)))
        words.clear()

    for line, content in enumerate(text.splitlines(), first_line):
        in_code ^= content.startswith("```")
        heading = not in_code and re.match(r"#+ ", content)
        pause = re.match(r"\s*([-*|] .*)?$", content)  # an empty line, a list item, a table row
        if heading or (pause and len(words) >= MIN_WORDS) or len(words) + len(content.split()) > MAX_WORDS:
            close()
        if not words:
            start, headed = line, bool(heading)
        words += [word for word in content.split() if word.strip("|-:")]  # not the lines of a table
    close()
    return passages
