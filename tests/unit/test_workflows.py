"""The workflows in .github: what they run exists, and they run where the package says that it works."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / ".github").exists():
    pytest.skip("a source archive has no workflows", allow_module_level=True)
TEST, RELEASE = (
    yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text()) for name in ("test.yml", "release.yml")
)
JOBS = TEST["jobs"]


def commands(job):
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_every_python_of_the_metadata_is_tested():
    named = re.findall(r"Python :: (3\.\d+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert JOBS["cpu"]["strategy"]["matrix"]["python"] == named
    of_platforms = JOBS["platforms"]["strategy"]["matrix"]["python"]
    assert of_platforms == [named[0], named[-1]]


def test_macos_and_windows_run_the_cpu_and_the_simulator():
    job = JOBS["platforms"]
    assert job["strategy"]["matrix"]["os"] == ["macos-latest", "windows-latest"]
    assert "tests/unit/test_cpu.py" in commands(job) and "tests/sim/test_contract.py" in commands(job)
    assert any(step.get("env") == dict(NUMBA_ENABLE_CUDASIM="1") for step in job["steps"])


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if "steps" in job])
def test_what_a_job_runs_exists(name):
    for path in re.findall(r"\b(?:tests|scripts|recipe)/[\w./]+", commands(JOBS[name])):
        assert (ROOT / path).exists(), path


def test_a_release_is_tried_on_each_system_and_published_without_a_token():
    jobs = RELEASE["jobs"]
    assert {"ubuntu-latest", "macos-latest", "windows-latest"} == {*jobs["try"]["strategy"]["matrix"]["os"]}
    assert jobs["publish"]["needs"] == "try" and jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
