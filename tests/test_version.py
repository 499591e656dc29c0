"""pyproject.toml states the version; files that tools read without Python repeat it."""

import re
import tomllib
from importlib import metadata

import pytest

from tests.checkout import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CITATION.cff", r"^version: (\S+)"),
        ("k8s/rayservice.yaml", r"caravan:(\d[^-\s]*)-c"),
        ("k8s/README.md", r"caravan:(\d[^-\s]*)-c"),
        ("k8s/Dockerfile", r"caravan:(\d[^-\s]*)-c"),
    ],
)
def test_copies_of_the_version_agree(file: str, pattern: str) -> None:
    assert set(re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)) == {VERSION}


def test_the_installed_package_has_the_version_of_the_sources() -> None:
    assert metadata.version("caravan") == VERSION
