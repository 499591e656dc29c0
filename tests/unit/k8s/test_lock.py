"""The locked packages of the image match constraints.txt and cover all dependencies."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.checkout import ROOT

LINE = re.compile(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}")


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / "k8s" / name).read_text().splitlines()
    found = [LINE.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found)
    return {line[1]: line[2] for line in found if line}


def test_locked_versions_are_those_of_the_constraints() -> None:
    pins = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
        for pin in [Requirement(line)]
    }
    everywhere = locked("requirements.lock")
    assert {name: pins.get(name) for name in everywhere} == everywhere
    cuda = locked("requirements-cuda.lock")
    assert cuda["torch"] == pins["torch"] and not cuda.keys() & everywhere.keys()


def test_all_dependencies_are_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    versions = locked("requirements.lock") | locked("requirements-cuda.lock")
    for requirement in map(Requirement, needed):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier


def test_only_the_cpu_build_of_torch_is_installed_without_a_hash() -> None:
    dockerfile = (ROOT / "k8s" / "Dockerfile").read_text()
    installs = re.findall(r"pip install (.+?)(?:; |$|\\)", dockerfile, flags=re.MULTILINE)
    assert len(installs) == 4
    for command in installs:
        hashed = "--require-hashes" in command or "--no-index" in command
        assert hashed or "-r torch.txt" in command
