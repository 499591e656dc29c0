"""The results of `make package`: the files in `dist`, and an environment with only the wheel."""

import email
import json
import os
import re
import signal
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.checkout import DEMO_MODEL, ROOT
from tests.loopback import free_port
from tests.patience import HANG_S

DIST, CLEAN = ROOT / "dist", ROOT / ".cache" / "package" / "bin"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = ("runtime", "model_zoo", "serve_app")
# Of what is tracked in the packages, all but these are in the wheel.
SOURCES_ONLY = {"README.md"}


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    (path,) = DIST.glob("caravan-*.whl")
    return zipfile.ZipFile(path)


def tracked() -> set[str]:
    command = ["git", "ls-files", *PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.splitlines() if Path(name).name not in SOURCES_ONLY}


def test_the_wheel_has_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    assert tracked() - set(wheel.namelist()) == set()


def test_the_wheel_has_nothing_else_but_kernels_and_metadata(wheel: zipfile.ZipFile) -> None:
    others = {name for name in wheel.namelist() if ".dist-info/" not in name} - tracked()
    assert others and all(re.fullmatch(r"runtime/kernels/prebuilt/.+\.so", name) for name in others)


def test_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "caravan" and metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("License-File", [])) == {"LICENSE", "NOTICE"}


def test_the_source_distribution_has_what_builds_and_describes_it() -> None:
    with tarfile.open(DIST / f"caravan-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    described = {"LICENSE", "NOTICE", "README.md", "CHANGELOG.md", "constraints.txt"}
    assert described | {"pyproject.toml", "setup.py"} | tracked() <= names


def test_the_bill_of_materials_lists_what_is_installed() -> None:
    bill = json.loads((DIST / "caravan.cdx.json").read_text())
    listed = {(part["name"].lower(), part["version"]) for part in bill["components"]}
    command = [CLEAN / "pip", "list", "--format", "json"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    installed = {(part["name"].lower(), part["version"]) for part in json.loads(shown)}
    assert installed - listed == {("caravan", VERSION)}
    assert bill["metadata"]["component"]["name"] == "caravan"


def test_installed_packages_agree() -> None:
    subprocess.run([CLEAN / "pip", "check"], check=True)


def test_type_checkers_read_its_annotations(tmp_path: Path) -> None:
    module = tmp_path / "user.py"
    module.write_text("from runtime.kv.cache_layout import CacheLayout\nx: str = CacheLayout\n")
    command = [ROOT / ".venv" / "bin" / "mypy", "--python-executable", CLEAN / "python", module]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert 'expression has type "type[CacheLayout]"' in shown


def test_the_installed_wheel_serves_a_model(tmp_path: Path) -> None:
    """In an empty folder, with nothing of this checkout but the model."""
    port = free_port()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY"))
    }
    server = subprocess.Popen(
        [CLEAN / "caravan", "serve", DEMO_MODEL, "--port", str(port)],
        cwd=tmp_path,
        env=environment | {"XDG_STATE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        shown = []
        for line in server.stdout:
            shown.append(line)
            if f"serves demo at http://localhost:{port}" in line:
                break
        else:
            pytest.fail("".join(shown))
        url = f"http://127.0.0.1:{port}"
        question = {"role": "user", "content": "What is 17 + 25?"}
        body = {"model": "demo", "messages": [question]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=HANG_S).json()
        assert "42" in answer["choices"][0]["message"]["content"]
        assert httpx.get(f"{url}/api/version").json()["caravan"] == VERSION
        page = httpx.get(url, headers={"accept": "text/html"})
        assert page.headers["content-type"].startswith("text/html")
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=HANG_S)
    assert server.returncode == 0
