"""`python -m tools.reference_data`: puts published vocabularies and chat templates into
.cache/reference-data, for the tests of tokenizers and templates.

They are part of llama.cpp's sources, which the source distribution of llama-cpp-python contains.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

PACKAGE = "llama-cpp-python==0.3.36"
HASH = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_ROOT = Path(__file__).parents[1]
FOLDER = _ROOT / ".cache" / "reference-data"
_MODELS = "vendor/llama.cpp/models/"
FURTHER = "further-templates"  # the folder of all templates but `TEMPLATES`
VOCABULARIES = ("gpt-2", "llama-bpe", "llama-spm", "qwen2")
TEMPLATES = (
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
)


def folders() -> list[Path]:
    """Where the data may be: $CARAVAN_TEST_DATA, beside the checkout, and where `main` puts it."""
    given = os.environ.get("CARAVAN_TEST_DATA")
    return [*([Path(given)] if given else []), _ROOT.parent / "shared" / "data", FOLDER]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{HASH}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
        command += ["llama-cpp-python", "--require-hashes", "--dest", folder]
        subprocess.run([*command, "--requirement", str(requirements)], check=True)
        (sources,) = Path(folder).glob("*.tar.gz")
        _extract(sources)


def _extract(sources: Path) -> None:
    wanted = {
        f"{_MODELS}ggml-vocab-{name}.gguf{part}": Path("vocab")
        for name in VOCABULARIES
        for part in ("", ".inp", ".out")
    }
    wanted |= {f"{_MODELS}templates/{name}.jinja": Path("templates") for name in TEMPLATES}
    part = FOLDER.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(sources) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            template = name.startswith(f"{_MODELS}templates/") and name.endswith(".jinja")
            further = Path(FURTHER) if template else None
            if (folder := wanted.pop(name, further)) is not None:
                file = archive.extractfile(member)
                assert file is not None
                path = part / folder / PurePosixPath(name).name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
    if wanted:
        sys.exit(f"The sources of {PACKAGE} lack {', '.join(sorted(wanted))}.")
    part.rename(FOLDER)


if __name__ == "__main__":
    main()
