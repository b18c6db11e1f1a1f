"""Sphinx's configuration; `sh scripts/docs` builds with it."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numba_flash  # noqa: E402

project = "numba_flash"
author = "the authors of numba_flash"
version = release = numba_flash.__version__

extensions = ["sphinx.ext.autodoc", "myst_nb"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# The examples are scripts that are notebooks, too: "# %%" begins a cell. They are run while the pages are built, and an
# exception in one fails the build.
shutil.copytree(
    ROOT / "examples",
    ROOT / "docs" / "examples",
    ignore=shutil.ignore_patterns("comfyui", "demo", "distributed", "pipelines"),
    dirs_exist_ok=True,
)
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# The one that needs torch is not run where torch is not installed: its page is then without results, and the build
# says so. A notebook that is run says its language; this one has to be told.
NOT_RUN = [] if importlib.util.find_spec("torch") else ["train_a_language_model"]
nb_execution_excludepatterns = [f"*{name}*" for name in NOT_RUN]
for name in NOT_RUN:
    page = ROOT / "docs" / "examples" / f"{name}.py"
    page.write_text("# ---\n# jupyter:\n#   language_info: {name: python}\n# ---\n" + page.read_text())

exclude_patterns = ["drawings", "templates", "conf.py", "**/__pycache__"]
nitpicky = True
html_theme = "pydata_sphinx_theme"
html_title = f"numba_flash {release}"
html_show_sourcelink = False
html_math_renderer = "mathml"  # of browsers themselves: a page asks for nothing from elsewhere, and is whole offline
templates_path = ["templates"]
html_sidebars = {"**": ["path.html"]}  # the pages in their order, and the headings of the one that is open
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "secondary_sidebar_items": [],
    "navbar_center": [],  # the sidebar has the pages
}
autodoc_typehints = "none"
autodoc_docstring_signature = False  # a first line like "merge(o1, ...) -> ..." is a sentence


def as_it_is(app, what, name, obj, options, lines):
    """Docstrings are plain text with formulas in it, not markup: they are shown as they are written."""
    lines[:] = ["::", "", *(f"   {line}" for line in lines), ""] if any(lines) else []


PRIME = re.compile(r"<msup>(<mi>\w</mi>)<mi>(&#x02032;)</mi></msup>")


def formula(text, display):
    """MathML. A number that LaTeX's \\tag gives goes into an element of its own, and `\\_` is a character."""
    number = re.search(r"\\tag\{(\d+)\}", text)
    tex = (text.replace(number[0], "") if number else text).replace("{aligned}", "{align*}")
    # A prime is a raised sign already; as an exponent it would be too small and too high to read.
    made = PRIME.sub(r'<mrow>\1<mo lspace="0" rspace="0">\2</mo></mrow>', convert(tex, display=display))
    made = made.replace("\\_", "_")
    if "\\" in made or "<mi>&</mi>" in made:
        raise ValueError(f"latex2mathml does not know all of the formula {text!r}: it made {made!r}")
    if display == "inline":
        return made
    return (f'<span class="eqno">({number[1]})</span>' if number else "") + f'<div class="formula">{made}</div>'


def inline(translator, node):
    translator.body.append(formula(node.astext(), "inline"))
    raise nodes.SkipNode


def block(translator, node):
    translator.body.append(f'<div class="math">{formula(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def say_what_is_not_run(app):
    for name in NOT_RUN:
        print(f"torch is not installed: examples/{name}.py is shown, but not run")


def setup(app):
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    app.connect("builder-inited", say_what_is_not_run)
    app.connect("autodoc-process-docstring", as_it_is)
