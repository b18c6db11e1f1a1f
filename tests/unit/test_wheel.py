"""What a wheel holds, by the list that its builder makes: nothing is built and nothing is fetched."""

import json
import subprocess
import sys
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
