"""The examples of README and docs for frameworks; tests/unit/test_documents.py runs the others."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FRAMEWORK = re.compile(r"^(?:import|from) (torch|jax|transformers)\b", re.MULTILINE)
BLOCKS = [
    pytest.param(code, id=f"{page.stem}-{FRAMEWORK.search(code)[1]}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    if FRAMEWORK.search(code)
]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_of_documents_runs(code):
    for framework in FRAMEWORK.findall(code):
        pytest.importorskip(framework, reason=f"needs {framework}")
    exec(compile(code, "document", "exec"), {"__name__": "document"})


def test_each_framework_has_an_example():
    named = {framework for block in BLOCKS for framework in FRAMEWORK.findall(block.values[0])}
    assert named == {"torch", "jax", "transformers"}


def test_the_report_of_the_page_is_what_is_printed(capsys):
    """docs/testing_your_kernel.md: torch's own attention against the contract; not the notes, which name numbers."""
    pytest.importorskip("torch", reason="needs torch")
    page = (ROOT / "docs" / "testing_your_kernel.md").read_text()
    code, shown = re.search(
        r"^```python\n(import torch.*?)^```\n+```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    ).groups()
    exec(compile(code, "document", "exec"), {"__name__": "document"})
    printed = [line[:58].rstrip() for line in capsys.readouterr().out.splitlines()]
    lines = [line[:58].rstrip() for line in shown.splitlines() if line != "..."]
    assert lines and [line for line in lines if line not in printed] == []
