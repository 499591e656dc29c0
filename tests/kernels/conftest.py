"""CPU kernels that are quickly compiled."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.kernels import build, cpu_levels, native
from tests.kernels.native_kernels import need_compiler


@pytest.fixture
def one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache and a source that compiles quickly, as on a new machine."""
    need_compiler()
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(build, "_SOURCES", tmp_path / "source")
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(native, "built_library", build.built_library)  # `make sanitize` replaces it
    monkeypatch.setattr(native, "load", lambda path: path)
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv(cpu_levels.FORCED, raising=False)
    native.library.cache_clear()
    yield source
    native.library.cache_clear()
