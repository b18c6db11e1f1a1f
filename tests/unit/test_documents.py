"""README.md, CHANGELOG.md, docs and docstrings: what they name exists, and the Python of README and docs runs.

A block of Python that starts with an import is run, all of a page in order and in one namespace; the others (a
signature, a part of a session) are only shown. Those for frameworks are run by tests/bridges. Commands of the package
are run, sessions with a debugger by tests/sim; of scripts the options are compared.
"""

import ast
import builtins
import functools
import io
import os
import re
import shlex
import tokenize
from pathlib import Path

import pytest

import numba_flash
from numba_flash import testing
from numba_flash.__main__ import _parser, main
from numba_flash.select.rungs import RUNGS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "numba_flash"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(PACKAGE.rglob("*.py"))
DEMO = sorted((ROOT / "examples" / "demo").glob("*.py"))
FOLDERS = [PACKAGE, *(ROOT / name for name in ("docs", "examples", "lessons", "scripts", "tests", ".github"))]
FILES = [path for folder in FOLDERS for path in folder.rglob("*")]
FILES += ROOT.glob("*")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FRAMEWORK = re.compile(r"^(?:import|from) (?:torch|jax|transformers|cupy)\b", re.MULTILINE)
# Not a part of something longer: an address on the web, a place below / or ~.
PATH = re.compile(r"(?<![\w/.:*~-])(?:[\w.*-]+/)*[\w.*-]+/?")
# What an example calls a file of the reader's own.
BARE_NAME = re.compile(r"(?<![\w/.*-])[\w-]+\.py\b")


def missing(text, places):
    """The files and folders of this project that `text` names and that are not there, seen from any of `places`."""
    names = [name.rstrip(".") for name in PATH.findall(text)]
    return [name for name in names if is_ours(name, places) and not exists(name, places)]


def is_ours(name, places):
    """By its ending, or because it begins with one of our folders; not and/or, application/json, v0.1. Nor build/...,
    which scripts/docs makes and git ignores."""
    first = name.partition("/")[0]
    folder = "/" in name and first != "build" and any((place / first).is_dir() for place in places)
    return folder or name.endswith((".py", ".md"))


def exists(name, places):
    if "/" not in name:
        return any(path.match(name) for path in FILES)
    # A table of contents names pages and examples without their endings.
    return any(True for place in places for ending in ("", ".md", ".py") for _ in place.glob(name + ending))


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_exist(path):
    text = path.read_text()
    examples = "\n".join(code for _, code in FENCE.findall(text))
    assert missing(FENCE.sub("", text) + BARE_NAME.sub("", examples), (ROOT, PACKAGE, path.parent)) == []


def test_the_editor_s_settings_name_files_that_exist():
    assert missing((ROOT / ".vscode" / "launch.json").read_text(), (ROOT, PACKAGE)) == []


@pytest.mark.parametrize("path", [*SOURCES, *DEMO], ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_name_files_that_exist(path):
    assert missing("\n".join(docstrings(path)), (ROOT, PACKAGE, path.parent)) == []


def runnable(path):
    """The blocks of Python that a page shows to be run, without those for frameworks."""
    blocks = [code for language, code in FENCE.findall(path.read_text()) if language == "python"]
    return [code for code in blocks if code.startswith(("import ", "from ")) and not FRAMEWORK.search(code)]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if runnable(path)], ids=lambda path: path.name)
def test_python_of_documents_runs(path):
    namespace = {"__name__": "document"}
    for code in runnable(path):
        exec(compile(code, path.name, "exec"), namespace)


def code_words(path):
    """The words of a file; of Python without those of comments and docstrings, which may be about what was there."""
    text = path.read_text()
    if path.suffix != ".py" and not text.startswith("#!/usr/bin/env python3"):
        return re.findall(r"\w+", text)
    nodes = list(ast.walk(ast.parse(text)))
    alone = {node.value for node in nodes if isinstance(node, ast.Expr)}  # strings that nothing is done with
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in alone]
    words = re.findall(r"\w+", " ".join(value for value in strings if isinstance(value, str)))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return words + [token.string for token in tokens if token.type == tokenize.NAME]


# Names that are not ours, and that no source of ours has; and test_x, which stands for any test.
FOREIGN = {"CUDA_VISIBLE_DEVICES", "tbb", "test_x"}


@functools.cache
def source_words():
    """When a test asks: each of pytest-xdist's processes imports all tests, and few run those of this file."""
    return {
        word
        for folder in ("numba_flash", "tests", "scripts", "examples", "lessons", "setup.cfg")
        for path in ([ROOT / folder] if "." in folder else (ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix in (".py", ".cfg", "") and path != Path(__file__)
        for word in code_words(path)
    }


def unknown_names(text):
    """The names in `backticks` that occur in no source, such as those that were renamed."""
    names = re.findall(r"`((?:\w+\.)*)([A-Za-z_]\w*)(?:\(.*?\)|=)?`", FENCE.sub("", text))
    return sorted({n for of, n in names if n not in source_words() | FOREIGN and not (ROOT / f"{of}{n}").exists()})


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.stem != "CHANGELOG"], ids=lambda path: path.name)
def test_names_in_documents_are_those_of_the_code(path):
    assert unknown_names(path.read_text()) == []


def test_the_finder_of_names_itself():
    assert (
        unknown_names("`kernel`, `numba_flash.attention`, `ring(count)`, `window=`, `CITATION.cff`; NOTICE, `/no/path`")
        == []
    )
    assert unknown_names("`NOTICE_FULL`, `config.colour(x)`, `hue=`") == ["NOTICE_FULL", "colour", "hue"]


# Dotted names that begin with one of these are a framework's, or an instruction's.
FOREIGN_ROOTS = {"torch", "jax", "mma", "wgmma"}
DOTTED = re.compile(r"(?<![\w/.-])((?:[A-Za-z_]\w*\.)+)([A-Za-z_]\w*)\b(?![/.])")


def last_name(node):
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@functools.cache
def owned():
    """{the last name of a module, or a class: what is in it, and what the package reads of something of this name}"""
    found = {}
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        module = path.parent.name if path.stem == "__init__" else path.stem
        inside = {each.stem for each in path.parent.iterdir()} if path.stem == "__init__" else set()
        for name, node in [(module, tree), *((x.name, x) for x in ast.walk(tree) if isinstance(x, ast.ClassDef))]:
            found.setdefault(name, set()).update(inside if node is tree else ())
            found[name].update(getattr(x, "name", getattr(x, "id", "")) for x in ast.walk(node))
    for attribute in (x for path in SOURCES for x in ast.walk(ast.parse(path.read_text()))):
        if isinstance(attribute, ast.Attribute) and last_name(attribute.value) in found:
            found[last_name(attribute.value)].add(attribute.attr)
    return found


def unknown_parts(text):
    """The names behind a module or a class of ours that are not there, such as `estimates.milliseconds`."""
    found = [(of.rstrip("."), name) for of, name in DOTTED.findall(text) if name not in ("py", "md", "html", "json")]
    found = [(of, name) for of, name in found if of.partition(".")[0] not in FOREIGN_ROOTS]
    owners = [(f"{of}.{name}", owned().get(of.rpartition(".")[2]), name) for of, name in found]
    return sorted({whole for whole, names, name in owners if names is not None and name not in names})


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.stem != "CHANGELOG"], ids=lambda path: path.name)
def test_what_documents_name_of_a_module_or_a_class_is_in_it(path):
    shown = re.findall(r"`([^`]+)`", FENCE.sub("", path.read_text()))
    assert unknown_parts("; ".join(shown)) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_comments_name_of_a_module_or_a_class_is_in_it(path):
    if "ptx" not in path.parts:  # there nearly all names are those of instructions
        assert unknown_parts(comments(path)) == []


IN_A_FILE = re.compile(r"((?:`[\w.]+`(?:, | and ))*`[\w.]+`) in `([\w/]+\.py)`(?: and `([\w/]+\.py)`)?")


def absent(text, places):
    """Of "`a` and `b` in `file.py`" the names that are not in the file."""
    for names, *files in IN_A_FILE.findall(text):
        for file in filter(None, files):
            found = set(code_words(next(path for place in places if (path := place / file).exists())))
            yield from (f"{name} in {file}" for name in re.findall(r"(\w+)`", names) if name not in found)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_documents_name_in_a_file_is_there(path):
    assert list(absent(path.read_text(), (ROOT, PACKAGE, path.parent))) == []


def test_the_finders_of_parts_themselves():
    text = "config.threads, `numba_flash.attention`, torch.compile; estimates.milliseconds, Config.colour"
    assert unknown_parts(text) == ["Config.colour", "estimates.milliseconds"]
    text = "`Rung` in `select/rungs.py`; `hue` and `plan` in `dispatch/forward.py` and `dispatch/backward.py`"
    assert list(absent(text, (PACKAGE,))) == ["hue in dispatch/forward.py", "hue in dispatch/backward.py"]


COMING_FROM = sorted((ROOT / "docs" / "coming_from").glob("*.md"))


@pytest.mark.parametrize("path", COMING_FROM, ids=lambda path: path.name)
def test_a_page_for_those_who_come_has_their_line_ours_and_what_differs(path):
    """And a measured row; README leads to it. Its Python runs here or in tests/bridges."""
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    kinds = [kind for kind, _ in FENCE.findall(text)]
    assert text.startswith("# Coming from ") and kinds[:2] == ["text", "python"] and "\n| --- |" in text
    assert re.search(r"<!-- (speed|times) of .*-->\n\| (head_dim|problem) \|.*\n\| ---", text)
    assert f"]({name})" in (ROOT / "README.md").read_text()
    assert f"coming_from/{path.stem}\n" in (ROOT / "docs" / "index.md").read_text()


def test_every_variable_is_on_the_page():
    named = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE))
    read = {word for word in source_words() if word.startswith("NUMBA_FLASH_")}
    assert read and read <= named


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in numba_flash.__all__ if f"numba_flash.{name}" not in page] == []


INDEX = (ROOT / "docs" / "index.md").read_text()
PATH_OF_LESSONS = re.search(r":caption: Learn\n:hidden:\n\n(.*?)```", INDEX, re.DOTALL)[1].split()


def test_the_path_on_the_index_is_that_of_the_sidebar():
    """Each with its minutes, and with what a reader can do then."""
    listed = INDEX.partition("<!-- the path")[2].partition("<!-- end of the path -->")[0]
    lines = re.findall(r"^1\. \[.*?\]\(([\w/]+)(?:\.md)?\), (\d+) minutes\. Then you (?:can|have) .*\.$", listed, re.M)
    assert [page for page, _ in lines] == PATH_OF_LESSONS
    assert len(lines) == len(re.findall(r"^1\. ", listed, re.M))


@pytest.mark.parametrize("page", [page for page in PATH_OF_LESSONS if not page.startswith("examples/")])
def test_a_lesson_is_short(page):
    """Its sentences and tables; code is not read at that speed."""
    assert len(FENCE.sub("", (ROOT / "docs" / f"{page}.md").read_text()).split()) <= 2000


def test_readme_is_short_and_has_python_to_run():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
    assert runnable(ROOT / "README.md")


def test_ten_variants_have_code_a_picture_and_a_speed():
    page = (ROOT / "docs" / "variants.md").read_text()
    parts = re.split(r"^### (\d+)\. .*\n", page.partition("\n## More variants\n")[0], flags=re.MULTILINE)
    assert parts[1::2] == [str(number) for number in range(1, 11)]
    for part in parts[2::2]:
        assert "```python\n" in part and "](drawings/variant_" in part and "<!-- speed of " in part


def commands(start):
    """What README and docs show to be typed behind `start`: in a fence, a table or a sentence. Not the history."""
    shown = re.compile(rf"(?:^|`)(?:\$ )?{start}(.*?)(?:`|$)", re.MULTILINE)
    found = {text for path in DOCUMENTS if path.stem != "CHANGELOG" for text in shown.findall(path.read_text())}
    return sorted(found)


OF_THE_PACKAGE = commands(r"(?:\S*)python -m numba_flash ")
OF_SCRIPTS = commands(r"(?:\S*python |sh )?scripts/(?!results/|results`)")


@pytest.mark.parametrize("arguments", OF_THE_PACKAGE)
def test_a_command_that_documents_show_runs(arguments, capsys):
    if arguments.startswith("bundle "):  # which compiles for minutes
        assert _parser().parse_args(shlex.split(arguments)).folder
        return
    assert main(shlex.split(arguments)) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", OF_SCRIPTS)
def test_a_script_that_documents_show_takes_these_options(command):
    name, *arguments = shlex.split(command)
    script = ROOT / "scripts" / name
    text = script.read_text()
    assert os.access(script, os.X_OK)
    passed_on = '"$@"' in text  # to pytest or Sphinx
    assert passed_on or [word for word in arguments if word.startswith("--") and f'"{word}"' not in text] == []


def test_documents_show_commands():
    assert {"info", "explain"} <= {command.split()[0] for command in OF_THE_PACKAGE}
    assert {"demo", "test", "docs", "step", "tune", "gpu_check"} <= {command.split()[0] for command in OF_SCRIPTS}


def test_what_is_cited_is_this_version():
    assert f"\nversion: {numba_flash.__version__}\n" in (ROOT / "CITATION.cff").read_text()


# The pages of the path with equations and listings, in their order. The numbers go on from page to page.
NUMBERED = ("algorithm", "first_kernels", "backward", "tensor_cores")
# {page: its equations}, {page: {listing: its lines' numbers}}
EQUATIONS = {
    page: [int(n) for n in re.findall(r"\\tag\{(\d+)\}", (ROOT / "docs" / f"{page}.md").read_text())]
    for page in NUMBERED
}
LISTING = re.compile(r"^```text\nListing (\d+): (.*?)^```$", re.MULTILINE | re.DOTALL)
LISTINGS = {
    page: {
        int(number): [int(line) for line in re.findall(r"^ ?(\d+)  ", body, re.MULTILINE)]
        for number, body in LISTING.findall((ROOT / "docs" / f"{page}.md").read_text())
    }
    for page in NUMBERED
}
ALL_LISTINGS = {number: lines for page in LISTINGS.values() for number, lines in page.items()}
CITED = re.compile(r"\b(equation|listing|line)s? (\d+)(?:(?: to| and) (\d+))?")


def cited(kind, text):
    """The numbers that `text` cites of a kind: equation, listing, line."""
    found = [numbers for name, *numbers in CITED.findall(" ".join(text.split())) if name == kind]
    return [int(number) for numbers in found for number in numbers if number]


def comments(path):
    """The comments and docstrings of a file."""
    text = path.read_text()
    return "\n".join([*docstrings(path), *re.findall(r"# (.*)$", text, re.MULTILINE)])


def test_equations_and_listings_are_numbered_from_1_on():
    equations = [number for page in NUMBERED for number in EQUATIONS[page]]
    assert equations == list(range(1, len(equations) + 1))
    assert list(ALL_LISTINGS) == list(range(1, len(ALL_LISTINGS) + 1))
    for lines in ALL_LISTINGS.values():
        assert lines == list(range(1, len(lines) + 1))


OF_READERS = [path for name in ("examples", "exercises", "lessons") for path in sorted((ROOT / name).rglob("*.py"))]
CITING = [path for path in [*SOURCES, *OF_READERS] if re.search(rf"docs/({'|'.join(NUMBERED)})\.md", path.read_text())]


def test_who_cites_says_of_which_page():
    citing = {path for path in SOURCES if "kernels" in path.parts and {*cited("listing", comments(path))}}
    assert citing and citing <= set(CITING)


@pytest.mark.parametrize("path", CITING, ids=lambda path: path.stem)
def test_code_cites_equations_and_listings_of_the_pages_that_it_names(path):
    text = comments(path)
    pages = set(re.findall(r"docs/(\w+)\.md", text)) & set(NUMBERED)
    assert set(cited("equation", text)) <= {number for page in pages for number in EQUATIONS[page]}
    listings = cited("listing", text)
    assert set(listings) <= {number for page in pages for number in LISTINGS[page]}
    lines = cited("line", text)
    assert bool(listings) >= bool(lines), "a line of which listing?"
    if listings:
        assert set(lines) <= set(ALL_LISTINGS[listings[0]])


@pytest.mark.parametrize(
    "name", ["softmax/safe", "softmax/online", "softmax/blocked", "simt/v1", "simt/v2", "simt/delta"]
)
def test_a_kernel_follows_its_listing_from_the_first_line_to_the_last(name):
    text = comments(PACKAGE / "kernels" / f"{name}.py")
    lines = cited("line", text)
    listing = ALL_LISTINGS[cited("listing", text)[0]]
    assert min(lines) == 1 and max(lines) == listing[-1]


# {file in kernels: the pages that explain its names; the last has a table of them}
NAMED = {
    "simt/v2": ("algorithm", "first_kernels", "names"),
    "mma/forward": ("algorithm", "first_kernels", "tensor_cores", "names"),
    "wgmma/forward": ("algorithm", "first_kernels", "tensor_cores", "hopper", "names"),
    "wgmma/backward": ("algorithm", "first_kernels", "tensor_cores", "backward", "hopper", "names"),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_pages_have_every_name_of_a_kernel(name):
    """The ones that a reader does not find there are those that he does not understand."""
    code = ast.parse((PACKAGE / "kernels" / f"{name}.py").read_text())
    names = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)} - set(dir(builtins))
    text = "\n".join((ROOT / "docs" / f"{page}.md").read_text() for page in NAMED[name])
    kernel = {node.name for node in ast.walk(code) if isinstance(node, ast.FunctionDef) and node.decorator_list}
    assert sorted(names - set(re.findall(r"\w+", text)) - kernel - {"_", "math"}) == []


@pytest.mark.parametrize("name", NAMED)
def test_the_table_has_no_name_that_the_kernel_does_not_have(name):
    table = (ROOT / "docs" / "names.md").read_text().partition(f"| in `kernels/{name}.py`")[2].partition("\n\n")[0]
    shown = " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))
    words = {word for code in re.findall(r"`(.*?)`", shown) for word in re.findall(r"[^\W\d]\w*", code)}
    assert len(words) > 40
    assert sorted(words - set(code_words(PACKAGE / "kernels" / f"{name}.py"))) == []


def test_comments_name_kernels_by_their_files():
    """mma/forward, not mma_forward, which no file is called."""
    kernels = PACKAGE / "kernels"
    old = {f"{file.parent.name}_{file.stem}" for file in kernels.glob("*mma/*.py")}
    for file in [path for room in ("kernels", "config", "select") for path in (PACKAGE / room).rglob("*.py")]:
        assert not old & set(re.findall(r"[\w/.]+", comments(file))), file


def test_the_finder_of_citations_itself():
    text = "listing 5, line 1: x; lines 7 to 11, line 12 and line 13; lines 19 and 20; equations 9 to 11"
    assert cited("listing", text) == [5]
    assert cited("line", text) == [1, 7, 11, 12, 13, 19, 20]
    assert cited("equation", text) == [9, 11]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see `kernels/simt/v2.py`, tests/unit/test_documents.py and numba_flash/kernels/.", []),
        ("cpu/*.py, kernels/*/*.py and reference.py; and/or, float16/float32, k/v, README.md", []),
        ("https://example.org/kernels/no.py, ~/kernels/no.py, /kernels/no.py", []),
        ("kernels/v0.py", ["kernels/v0.py"]),
        ("It is in kernal/v2.py.", ["kernal/v2.py"]),
        ("scripts/nothing, nothing.py, README.md (and HISTORY.md)", ["scripts/nothing", "nothing.py", "HISTORY.md"]),
    ],
)
def test_the_finder_itself(text, expected):
    assert missing(text, (ROOT, PACKAGE)) == expected


def test_the_contract_says_of_each_rung_what_its_row_says():
    text = (ROOT / "docs" / "contract.md").read_text()
    for name, rung in RUNGS.items():
        (line,) = (line for line in text.splitlines() if re.match(rf"\| (`\w+`, )*`{name}`(, `\w+`)* \|", line))
        _, _, where, dtypes, *_ = line.split("|")
        assert (where.strip() == "host memory") == rung.on_host
        every = len(rung.dtypes) in (0, len(testing.DTYPES))
        assert dtypes.strip() == ("all" if every else ", ".join(rung.dtypes))
        if rung.tensor_cores:
            version = "{}.{}".format(*rung.least_cc)
            assert where.strip().startswith(f"compute capability {version}{' and newer' * (rung.only_cc is None)}")
            assert rung.only_cc in (None, rung.least_cc)
