"""Compiles the CPU kernels into wheels; everything else is in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # pip does not
from runtime.kernels.build import prebuild


class WithKernels(build_py):
    """An editable install has none: `python -m runtime.kernels.native` compiles for its machine."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            built = prebuild(Path(self.build_lib) / "runtime" / "kernels" / "prebuilt", os.environ)
            print("compiled kernels:", *(path.name for path in built))


setup(cmdclass={"build_py": WithKernels})
