"""`caravan create` and `cp`: models from Modelfiles, with paths relative to them."""

import json
from pathlib import Path

import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.sources.resolve import resolve_stored
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.quant.weight import dequantize
from tests.families.tower_families import TOWERS
from tests.tiny_models import write_tiny_folder, write_tiny_llama
from tests.unit.model_zoo.convert.checkpoint_changes import TINY_LLAMA, reshaped
from tests.unit.model_zoo.gguf.test_split import split_like_a_converter
from tests.unit.serve_app.cli.cli_runs import put, run, said


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_llama(path, type="F16")
    return path


def modelfile(folder: Path, text: str) -> Path:
    path = folder / "Modelfile"
    path.write_text(text)
    return path


def stored(store: Store, name: str):
    return resolve_stored(store.open(ModelName.parse(name)), store)


def test_a_modelfile_creates_a_model_from_another_one(tiny, store, tmp_path):
    put(store, "base", {"model": tiny.read_bytes()})
    path = modelfile(tmp_path, "FROM base\nSYSTEM Be brief.\nPARAMETER top_k 3")
    result = run("create", "mine", "-f", path, store=store)
    assert result.stdout.startswith("mine:latest: ")
    assert (stored(store, "mine").system, stored(store, "mine").parameters) == (
        "Be brief.",
        {"top_k": 3},
    )


def test_paths_are_relative_to_the_modelfile(tiny, store, tmp_path):
    (tmp_path / "own.gguf").write_bytes(tiny.read_bytes())
    path = modelfile(tmp_path, "FROM ./own.gguf")
    run("create", "mine", "-f", path, "-q", "q8_0", store=store)
    made = stored(store, "mine").path
    assert 0 < made.stat().st_size < tiny.stat().st_size


def test_the_first_part_of_a_split_model_is_enough(tiny, store, tmp_path):
    first = split_like_a_converter(tiny, tmp_path, tensors_each=10)
    run("create", "mine", "-f", modelfile(tmp_path, f"FROM {first}"), store=store)
    assert stored(store, "mine").path.name == first.name


@pytest.mark.parametrize("stated", [".", "checkpoint", "./checkpoint"])
def test_a_folder_of_safetensors_is_converted(stated, store, tmp_path):
    folder = tmp_path if stated == "." else tmp_path / "checkpoint"
    write_tiny_folder(folder, TOWERS["mistral3"].make())
    path = modelfile(tmp_path, f"FROM {stated}\nSYSTEM Be brief.")
    run("create", "mine", "-f", path, "-q", "q8_0", store=store)
    made = stored(store, "mine")
    metadata = GGUFFile.open(made.path).metadata
    assert (metadata["general.architecture"], made.system) == ("mistral3", "Be brief.")
    assert made.projector is not None
    assert [*store.root.glob("**/*.gguf")] == []


@pytest.mark.parametrize("options", [(), ("-q", "bf16"), ("-q", "f32")])
def test_weights_beyond_the_range_of_halves_are_kept(options, store, tmp_path):
    folder = tmp_path / "checkpoint"
    write_tiny_folder(folder, TINY_LLAMA)
    large = {"model.layers.1.mlp.down_proj.weight": torch.full((64, 96), 1e6)}
    reshaped(folder, lambda w: w.update({n: t.bfloat16() for n, t in {**w, **large}.items()}))
    run("create", "mine", "-f", modelfile(tmp_path, "FROM ./checkpoint"), *options, store=store)
    weight = GGUFFile.open(stored(store, "mine").path).weight("blk.1.ffn_down.weight")
    assert weight.type.name == ("F32" if "f32" in options else "BF16")
    assert (dequantize(weight.data, weight.type) / 1e6 - 1).abs().max() < 0.01


@pytest.mark.parametrize("command", ["create", "convert"])
def test_a_folder_that_only_ollamas_files_express_is_converted_to_one(command, store, tmp_path):
    folder, out = tmp_path / "checkpoint", tmp_path / "out.gguf"
    write_tiny_folder(folder, TOWERS["mllama"].make())
    if command == "convert":
        run("convert", folder, out)
    else:
        run("create", "mine", "-f", modelfile(tmp_path, "FROM ./checkpoint"), store=store)
        out = stored(store, "mine").path
    assert GGUFFile.open(out).metadata["general.architecture"] == "mllama"


@pytest.mark.parametrize("source", ["file", "folder"])
@pytest.mark.parametrize("refused", [False, True])
def test_only_blobs_of_models_remain(source, refused, tiny, store, tmp_path):
    """Neither the file from which a quantised one was made, nor those of a refused model."""
    base = tiny
    if source == "folder":
        base = tmp_path / "checkpoint"
        write_tiny_folder(base, TINY_LLAMA)
    adapter = f"\nADAPTER {tiny}" if refused else ""
    path = modelfile(tmp_path, f"FROM {base}{adapter}")
    run("create", "mine", "-f", path, "-q", "q8_0", store=store, status=int(refused))
    manifests = [store.manifest(name) for name in store.names()]
    digests = {layer.digest for manifest in manifests for layer in manifest.blobs}
    assert {path.name.replace("-", ":") for path in (store.root / "blobs").iterdir()} == digests
    assert bool(digests) != refused


def test_a_folder_of_safetensors_is_no_model_file_but_can_be_converted(tmp_path):
    write_tiny_folder(tmp_path / "checkpoint", TINY_LLAMA)
    failed = run("show", f"{tmp_path}/checkpoint", status=1)
    assert "is a directory, not a model file. `caravan convert` writes one" in failed.stderr


def test_mistakes_are_one_line(tiny, store, tmp_path):
    same_name = tmp_path / "other" / tiny.name
    same_name.parent.mkdir()
    write_tiny_llama(same_name, type="Q8_0")
    for text, reported in [
        ("FROM nobody/here/too/long", "line 1: invalid model name"),
        ("FROM ./nowhere.gguf", "nowhere.gguf: there is no such file"),
        ("FROM nowhere.gguf", "nowhere.gguf: there is no such file"),
        ("FROM models/Nowhere.GGUF", "models/Nowhere.GGUF: there is no such file"),
        ("FROM .", "is a directory"),
        (f"FROM {tiny}\nFROM {same_name}", f"two files with the name {tiny.name}; rename one"),
        (f"FROM {tiny}\nADAPTER .", "is a folder; ADAPTER needs a GGUF file"),
        (f"FROM {tiny}\nPARAMETER x 1", 'line 2: option "x" is not known'),
        (f"FROM {tiny}\nPARAMETER num_ctx 2.5", 'line 2: option "num_ctx" must be of type integer'),
    ]:
        failed = run("create", "mine", "-f", modelfile(tmp_path, text), store=store, status=1)
        assert reported in failed.stderr and len(failed.stderr.strip().splitlines()[-1:]) == 1
    (tmp_path / "Modelfile").write_bytes(b"FROM \xff\xfe")
    assert "is not UTF-8 text" in run("create", "m", "-f", tmp_path / "Modelfile", status=1).stderr
    assert store.names() == []


@pytest.mark.parametrize(
    "line", ["PARAMETER top_k x", "TEMPLATE {{ end }}", "ADAPTER ./none.gguf", "MESSAGE robot hi"]
)
def test_files_are_copied_after_everything_else_is_checked(tiny, store, tmp_path, line):
    path = modelfile(tmp_path, f"FROM {tiny}\n{line}")
    failed = run("create", "mine", "-f", path, store=store, status=1)
    assert "copying" not in failed.stderr


def test_cp_reports_the_copy(tiny, store):
    put(store, "base", {"model": tiny.read_bytes()})
    copied = run("cp", "base", "me/mine:7b", store=store).stdout
    assert copied == "base:latest: copied to me/mine:7b\n"
    reported = json.loads(run("cp", "base", "other", "--json", store=store).stdout)
    assert reported == {"copied": "base:latest", "to": "other:latest"}
    assert {row["name"] for row in said("list", store=store)} == {
        *("base:latest", "me/mine:7b", "other:latest")
    }
    assert "has no model nobody" in run("cp", "nobody", "x", store=store, status=1).stderr
