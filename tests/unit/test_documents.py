"""README.md, CHANGELOG.md and docstrings: the files they name exist, and README's Python runs.

A block of README's Python that starts with an import is run, all of them in order and in one namespace;
the others (a signature, a part of a session) are only shown. Those for frameworks are run by tests/bridges.
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
FRAMEWORK = re.compile(r"^(?:import|from) (?:torch|jax|transformers)\b", re.MULTILINE)
# Not a part of something longer: an address on the web, a place below / or ~.
PATH = re.compile(r"(?<![\w/.:*~-])(?:[\w.*-]+/)*[\w.*-]+/?")
# What an example calls a file of the reader's own.
BARE_NAME = re.compile(r"(?<![\w/.*-])[\w-]+\.py\b")


def missing(text, places):
    """The files and folders of this project that `text` names and that are not there, seen from any of `places`."""
    names = [name.rstrip(".") for name in PATH.findall(text)]
    return [name for name in names if is_ours(name, places) and not exists(name, places)]


def is_ours(name, places):
    """By its ending, or because it begins with one of our folders; not and/or, application/json, v0.1."""
    folder = "/" in name and any((place / name.partition("/")[0]).is_dir() for place in places)
    return folder or name.endswith((".py", ".md"))


def exists(name, places):
    if "/" not in name:
        return any(path.match(name) for path in FILES)
    return any(True for place in places for _ in place.glob(name))


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_exist(path):
    text = path.read_text()
    examples = "\n".join(code for _, code in FENCE.findall(text))
    assert missing(FENCE.sub("", text) + BARE_NAME.sub("", examples), (ROOT, PACKAGE)) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_name_files_that_exist(path):
    assert missing("\n".join(docstrings(path)), (ROOT, PACKAGE, path.parent)) == []


def test_readme_python_runs():
    blocks = [code for language, code in FENCE.findall((ROOT / "README.md").read_text()) if language == "python"]
    runnable = [code for code in blocks if code.startswith(("import ", "from ")) and not FRAMEWORK.search(code)]
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
        ("It is in kernal/v2.py.", ["kernal/v2.py"]),
        ("scripts/nothing, nothing.py, README.md (and HISTORY.md)", ["scripts/nothing", "nothing.py", "HISTORY.md"]),
    ],
)
def test_the_finder_itself(text, expected):
    assert missing(text, (ROOT, PACKAGE)) == expected
