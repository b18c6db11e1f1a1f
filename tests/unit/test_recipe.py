"""The recipe of the conda package says what setup.cfg says."""

import configparser
import re
from pathlib import Path

import pytest

import numba_flash

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
ROOT = Path(__file__).resolve().parents[2]
RECIPE = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())


def setup(section, option):
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser[section][option]


def lines(text):
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def requirement(text):
    """A name, its versions and where it is needed, in one spelling."""
    name, versions, where = re.fullmatch(r"([\w.-]+) *([^;]*?) *(?:; *(.*))?", text).groups()
    return name, versions, where or ""


def of_recipe(requirements, where=""):
    for x in requirements:
        if isinstance(x, str):
            if not x.startswith("__"):  # a package that stands for a system
                yield (*requirement(x)[:2], where)
        else:
            assert x["if"] == "osx" and x["then"] == "__osx"
            yield from of_recipe(x["else"], 'sys_platform != "darwin"')


def test_the_version():
    assert RECIPE["context"]["version"] == numba_flash.__version__
    assert RECIPE["package"] == dict(name=setup("metadata", "name"), version="${{ version }}")


def test_the_dependencies():
    python = ("python", setup("options", "python_requires"), "")
    expected = {python, *map(requirement, lines(setup("options", "install_requires")))}
    assert set(of_recipe(RECIPE["requirements"]["run"])) == expected
    assert python in set(of_recipe(RECIPE["requirements"]["host"]))


def test_what_builds_it():
    (found,) = re.findall(r'requires = \["(\w+)(\S+)"\]', (ROOT / "pyproject.toml").read_text())
    assert " ".join(found) in RECIPE["requirements"]["host"]
    assert RECIPE["build"]["noarch"] == "python"


def test_the_commands():
    assert RECIPE["build"]["python"]["entry_points"] == lines(setup("options.entry_points", "console_scripts"))


def test_what_it_is():
    about = dict(
        summary=setup("metadata", "description"),
        license=setup("metadata", "license"),
        license_file=setup("metadata", "license_files"),
    )
    assert RECIPE["about"] == about
