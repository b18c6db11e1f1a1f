"""What a wheel and a source archive hold. Nothing is fetched, and no wheel is built."""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# In a process of its own: setuptools replaces the distutils of the process that imports it.
LIST = """
import json
from setuptools.dist import Distribution
distribution = Distribution(dict(script_name="setup.py"))
distribution.parse_config_files()
command = distribution.get_command_obj("build_py")
command.build_lib = ""
command.ensure_finalized()
print(json.dumps(command.get_outputs(include_bytecode=False)))
"""


def test_a_wheel_holds_every_file_of_the_package_and_nothing_else():
    """No demo and no tests: an installed package is what its users import."""
    pytest.importorskip("setuptools", reason="needs setuptools, which builds wheels")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LIST], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    in_wheel = {Path(name).as_posix() for name in json.loads(done.stdout)}
    package = {path for path in (ROOT / "numba_flash").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert in_wheel == {path.relative_to(ROOT).as_posix() for path in package}


def test_a_source_archive_holds_every_tracked_file_but_those_of_services(tmp_path):
    """So that a packager can run the tests, and a reader builds the pages."""
    pytest.importorskip("setuptools", reason="needs setuptools, which makes archives")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or (ROOT / ".git").exists() is False:
        pytest.skip("needs git and a clone")
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    for name in tracked:  # in a copy, because the command writes beside its sources
        to = tmp_path / "clone" / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, to)
    command = [
        sys.executable,
        "-c",
        "import setuptools; setuptools.setup()",
        "-q",
        "sdist",
        "--dist-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path / "clone", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        found = {name.partition("/")[2] for name in opened.getnames() if opened.getmember(name).isfile()}
    wanted = {name for name in tracked if not name.startswith(".") and name != "MANIFEST.in"}
    assert wanted <= found, sorted(wanted - found)
    assert {name for name in found - wanted if "egg-info" not in name} == {"MANIFEST.in", "PKG-INFO"}
