"""README.md, CHANGELOG.md and docstrings: the files they name exist, and README's Python runs.

A block of README's Python that starts with an import is run, all of them in order and in one namespace;
the others (a signature, a part of a session) are only shown.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "numba_flash"
DOCUMENTS = sorted(ROOT.glob("*.md"))
SOURCES = sorted(PACKAGE.rglob("*.py"))
FILES = [path for folder in (PACKAGE, ROOT / "scripts", ROOT / "tests") for path in folder.rglob("*")]
FILES += ROOT.glob("*")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Not a part of something longer: an address on the web, a place below / or ~.
WORD = re.compile(r"(?<![\w/.:*~-])(?:[\w.*-]+/)*[\w.*-]+/?")


def missing(text, places):
    """The files and folders that `text` names and that are not there, seen from any of `places`."""
    return [name for name in map(str.rstrip, WORD.findall(text)) if names_a_file(name.rstrip("."), places)]


def names_a_file(name, places):
    """Whether `name` reads like one of this project's files and none is there."""
    if "/" not in name:
        return name.endswith((".py", ".md")) and not any(path.match(name) for path in FILES)
    first = name.partition("/")[0]
    if not name.endswith(".py") and not any((place / first).is_dir() for place in places):
        return False  # and/or, application/json
    return not any(True for place in places for _ in place.glob(name))


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_exist(path):
    text = path.read_text()
    shown = "\n".join(code for _, code in FENCE.findall(text))
    own = re.compile(r"\b(?!numba_flash|scripts|tests)[\w-]+\.py\b")  # in an example: a file of the reader's
    assert missing(FENCE.sub("", text) + own.sub("", shown), (ROOT, PACKAGE)) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_name_files_that_exist(path):
    assert missing("\n".join(docstrings(path)), (ROOT, PACKAGE, path.parent)) == []


def test_readme_python_runs():
    blocks = [code for language, code in FENCE.findall((ROOT / "README.md").read_text()) if language == "python"]
    runnable = [code for code in blocks if code.startswith(("import ", "from "))]
    assert runnable
    namespace = {"__name__": "readme"}
    for code in runnable:
        exec(compile(code, "README.md", "exec"), namespace)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see `kernels/v2.py`, tests/unit/test_documents.py and numba_flash/kernels/.", []),
        ("simd*.py, kernels/*.py and reference.py; and/or, float16/float32, k/v, README.md", []),
        ("https://example.org/kernels/no.py, ~/kernels/no.py, /kernels/no.py", []),
        ("kernels/v0.py", ["kernels/v0.py"]),
        ("kernal/v2.py.", ["kernal/v2.py."]),
        ("scripts/no_such_script, nothing.py, README.md (and HISTORY.md)", None),
    ],
)
def test_the_finder_itself(text, expected):
    expected = ["scripts/no_such_script", "nothing.py", "HISTORY.md"] if expected is None else expected
    assert missing(text, (ROOT, PACKAGE)) == expected
