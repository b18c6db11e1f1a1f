"""README's examples for frameworks; tests/unit/test_documents.py runs the others."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
FRAMEWORK = re.compile(r"^(?:import|from) (torch|jax|transformers)\b", re.MULTILINE)
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "code", [code for code in BLOCKS if FRAMEWORK.search(code)], ids=lambda code: FRAMEWORK.search(code)[1]
)
def test_readme_python_runs(code):
    for framework in FRAMEWORK.findall(code):
        pytest.importorskip(framework, reason=f"needs {framework}")
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
