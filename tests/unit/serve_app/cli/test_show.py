"""`caravan show` agrees with the reference reader and with the engine's memory plan."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModel

from model_zoo.registry import load
from runtime.engine.assembly import assemble, plan_engine_memory
from runtime.engine.engine_options import EngineOptions
from runtime.host_limits import usable_cpus
from runtime.kv.cache_types import CacheType
from serve_app.config.sections import SpeculationSettings
from tests.families.encoder_configs import ENCODERS
from tests.gguf_files import rewrite
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer, write_tiny, write_tiny_llama
from tests.unit.model_zoo.gguf.gguf_bytes import F32, STRING, Parts, pair, text
from tests.unit.serve_app.cli.cli_runs import put, run, said

# What serving takes with `--context 96 --slots 3` and the default settings.
ENGINE_OPTIONS = EngineOptions(
    96,
    max_sequences=3,
    kv_dtype=CacheType.FLOAT16,
    proposed_tokens=SpeculationSettings().proposed_tokens,
)
HOSTILE = "\x1b]0;owned\x07\x1b[31m\x9b2J\u202eevil\r\n[bold]"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_llama(path, type="Q8_0")
    return path


def hostile(folder: Path) -> Path:
    pairs = [
        pair("general.architecture", STRING, text("llama")),
        pair("general.name", STRING, text(HOSTILE)),
        pair("general.license", STRING, text(HOSTILE)),
        pair("tokenizer.chat_template", STRING, text(HOSTILE)),
        pair("llama.odd", F32, np.float32("nan").tobytes()),
    ]
    path = folder / "hostile.gguf"
    path.write_bytes(Parts(pairs=pairs).bytes())
    return path


def test_metadata_and_tensors_are_those_of_the_reference_reader(tiny):
    reported = said("show", tiny)
    reader = gguf.GGUFReader(tiny)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert reported["metadata"] == fields
    assert [(t["name"], t["type"], t["shape"], t["bytes"]) for t in reported["tensors"]] == [
        (t.name, t.tensor_type.name, t.shape.tolist(), t.n_bytes) for t in reader.tensors
    ]


def test_tensors_are_counted_by_type(tiny):
    reported = said("show", tiny)
    reader = gguf.GGUFReader(tiny)
    tensors, sizes, elements = Counter(), Counter(), Counter()
    for tensor in reader.tensors:
        tensors[tensor.tensor_type.name] += 1
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
        elements[tensor.tensor_type.name] += int(tensor.n_elements)
    counted = {row["type"]: row for row in reported["tensor_types"]}
    assert {kind: row["tensors"] for kind, row in counted.items()} == tensors
    assert {kind: row["bytes"] for kind, row in counted.items()} == sizes
    assert {kind: row["parameters"] for kind, row in counted.items()} == elements
    assert reported["parameters"] == elements.total()
    assert reported["file_bytes"] == tiny.stat().st_size


def test_the_memory_shown_is_what_an_engine_reserves(tiny):
    reported = said("show", tiny, "--device", "cpu", "--context", 96, "--slots", 3)["memory"]
    model = load(tiny, device=torch.device("cpu"), dtype=torch.float32)
    torch.set_num_threads(usable_cpus())
    _, plan = assemble(
        model.decoder,
        model.tokenizer.token_bytes,
        device=torch.device("cpu"),
        options=ENGINE_OPTIONS,
    )
    assert reported["weight_bytes"] == plan.weight_bytes
    assert reported["cache_bytes"] == plan.cache_bytes
    assert reported["activation_bytes"] == plan.activation_bytes
    assert reported["sampler_bytes"] == plan.sampler_bytes
    assert reported["total_bytes"] == plan.available_bytes - plan.headroom_bytes
    assert reported["cache_tokens"] == plan.cache_tokens == 3 * 96
    assert reported["least_bytes"] == reported["total_bytes"] - plan.cache_bytes * 12 // 19  # pages


def test_the_memory_shown_with_a_draft_model_is_what_an_engine_reserves(tiny, tmp_path):
    path = tmp_path / "draft.gguf"
    write_tiny_llama(path, type="Q4_0")
    given = ("show", tiny, "--device", "cpu", "--context", 96, "--slots", 3)
    alone, reported = said(*given)["memory"], said(*given, "--draft", path)
    cpu = torch.device("cpu")
    model, draft = (load(file, device=cpu, dtype=torch.float32) for file in (tiny, path))
    torch.set_num_threads(usable_cpus())
    token_bytes = model.tokenizer.token_bytes
    _, plan = assemble(
        model.decoder, token_bytes, device=cpu, options=ENGINE_OPTIONS, draft=draft.decoder
    )
    assert reported["memory"]["draft_bytes"] == plan.draft_bytes > draft.decoder.weight_bytes
    assert reported["memory"]["total_bytes"] == plan.reserved_bytes
    assert alone["draft_bytes"] == 0
    assert alone["total_bytes"] == plan.reserved_bytes - plan.draft_bytes
    assert (reported["draft"]["path"], reported["draft"]["quantization"]) == (str(path), "Q4_0")
    shown = run(*given, "--draft", path).stdout
    assert "draft model    " in shown and "its cache included" in shown


def test_the_memory_shown_of_an_encoder_is_for_whole_texts_in_one_step(tmp_path):
    path, context = tmp_path / "encoder.gguf", 2 * ENGINE_OPTIONS.step_tokens
    write_tiny(path, ENCODERS["nomic_bert"], maker=AutoModel)
    long = rewrite(path, tmp_path / "long.gguf", own_keys={"context_length": context})
    reported = said("show", long, "--device", "cpu", "--slots", 3)["memory"]
    model = load(long, device=torch.device("cpu"), dtype=torch.float32)
    torch.set_num_threads(usable_cpus())
    options = replace(
        ENGINE_OPTIONS,
        context_tokens=context,
        step_tokens=context,
        kv_dtype=CacheType.FLOAT32,
    )
    plan = plan_engine_memory(model.decoder, device=torch.device("cpu"), options=options)
    assert reported["activation_bytes"] == plan.activation_bytes
    assert reported["total_bytes"] == plan.reserved_bytes


def test_an_unsuitable_draft_model_is_the_reason_why_a_model_is_not_served(tiny, tmp_path):
    other = rewrite(tiny, tmp_path / "other.gguf", keys={"tokenizer.ggml.eos_token_id": 5})
    for draft, words in ((other, "another vocabulary"), (tmp_path / "no.gguf", "no such file")):
        reported = said("show", tiny, "--draft", draft)
        assert words in reported["unsupported_because"]
        assert "`speculation.draft`" in reported["unsupported_because"]


def test_without_options_memory_is_for_the_default_settings(tiny):
    reported = said("show", tiny)["memory"]
    assert (reported["slots"], reported["context_tokens"]) == (
        16,
        512,
    )  # the model's own, less than 4096
    keys_and_values = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, size, bytes of float16
    spare = 16  # positions of the page that no sequence has
    assert reported["cache_bytes"] == (16 * 512 + spare) * keys_and_values
    assert reported["whole_context_cache_bytes"] == (512 + spare) * keys_and_values


def test_memory_can_be_planned_for_an_absent_cuda_device(tiny):
    reported = said("show", tiny, "--device", "cuda")["memory"]
    assert reported["device"] == "cuda"
    host = said("show", tiny, "--device", "cpu")["memory"]
    assert (host["kv_dtype"], reported["kv_dtype"]) == ("float16", "bfloat16")
    assert host["cache_bytes"] == reported["cache_bytes"]


def test_a_context_longer_than_the_models_is_an_error(tiny):
    reported = said("show", tiny, "--context", 513)
    assert "513" in reported["memory"]["error"] and "512" in reported["memory"]["error"]
    assert reported["architecture"] == "llama"


@pytest.mark.parametrize(("num_ctx", "planned"), [(96, 96), (10**6, 512), ("soon", 512)])
def test_a_stored_model_is_planned_with_its_num_ctx(tiny, store, num_ctx, planned):
    params = json.dumps({"num_ctx": num_ctx}).encode()
    put(store, "sized", {"model": tiny.read_bytes(), "params": params})
    assert said("show", "sized", store=store)["memory"]["context_tokens"] == planned
    assert said("show", "sized", "--context", 64, store=store)["memory"]["context_tokens"] == 64


def test_an_architecture_that_is_not_supported_hides_nothing_else(tiny, tmp_path):
    other = rewrite(tiny, tmp_path / "other.gguf", keys={"general.architecture": "walrus"})
    reported = said("show", other)
    assert reported["supported"] is False
    assert "walrus is not supported" in reported["unsupported_because"]
    assert reported["architecture"] == "walrus"
    assert len(reported["tensors"]) == len(said("show", tiny)["tensors"])
    assert reported["template"]["source"] == CHAT_TEMPLATE
    assert "walrus is not supported" in run("show", other).stdout


def test_a_tokenizer_that_is_not_supported_hides_nothing_else(tiny, tmp_path):
    other = rewrite(tiny, tmp_path / "other.gguf", keys={"tokenizer.ggml.model": "unheard"})
    reported = said("show", other)
    assert reported["supported"] is False and "unheard" in reported["unsupported_because"]
    assert reported["template"]["source"] == CHAT_TEMPLATE


def test_the_template_is_shown_with_its_origin(tiny, tmp_path):
    reported = said("show", tiny)["template"]
    assert (reported["source"], reported["origin"], reported["problem"]) == (
        CHAT_TEMPLATE,
        "file",
        None,
    )
    without = rewrite(tiny, tmp_path / "without.gguf", keys={"tokenizer.chat_template": None})
    assert said("show", without)["template"]["origin"] == "fallback (chatml)"


def test_the_capabilities_are_those_of_the_served_model(tiny, tmp_path):
    assert said("show", tiny)["capabilities"] == ["completion"]
    pooled = rewrite(tiny, tmp_path / "pooled.gguf", own_keys={"pooling_type": 3})
    assert said("show", pooled)["capabilities"] == ["embedding"]
    damaged = rewrite(tiny, tmp_path / "damaged.gguf", own_keys={"pooling_type": "mean"})
    assert said("show", damaged)["capabilities"] == []


def test_the_text_output_has_the_same_facts(tiny):
    shown = run("show", tiny, "--device", "cpu").stdout
    facts = ("architecture   llama", "quantisation   Q8_0", "context        512")
    for line in (*facts, "capabilities   completion"):
        assert line in shown
    assert "Memory on cpu, for 16 concurrent requests of 512 tokens" in shown
    assert f"({tiny_tokenizer().get_vocab_size()} elements)" in shown  # arrays are shortened
    assert CHAT_TEMPLATE.split("\n")[0] in shown


def test_no_escape_sequence_of_a_file_reaches_the_terminal(tmp_path):
    shown = run("show", hostile(tmp_path)).stdout
    assert "\\x1b[31m" in shown and "\\u202e" in shown and "[bold]" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_json_of_a_hostile_file_is_plain_ascii_and_complete(tmp_path):
    result = run("show", hostile(tmp_path), "--json")
    assert all(c == "\n" or " " <= c <= "~" for c in result.stdout)
    reported = said("show", hostile(tmp_path))
    assert reported["metadata"]["general.name"] == HOSTILE
    assert reported["metadata"]["llama.odd"] == "nan"


def test_no_escape_sequence_reaches_the_terminal_in_an_error(tmp_path):
    path = tmp_path / "broken.gguf"
    key = pair(HOSTILE, STRING, text("x"))
    path.write_bytes(Parts(pairs=[key, key]).bytes())
    result = run("show", path, status=1)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert all(c.isprintable() or c == "\n" for c in result.stderr)


def test_a_stored_model_is_shown_by_its_name(tiny, store):
    blobs = {
        "model": tiny.read_bytes(),
        "license": b"\nTiny Licence\nmore",
        "system": b"Be brief.",
        "template": b"{{ .Prompt }}",
    }
    manifest = put(store, "tiny:small", blobs)
    reported = said("show", "tiny:small", store=store)
    assert reported["stored"]["name"] == "tiny:small"
    assert reported["stored"]["bytes"] == manifest.size_bytes
    assert reported["stored"]["texts"]["system"] == ["Be brief."]
    assert reported["stored"]["texts"]["license"] == ["\nTiny Licence\nmore"]
    assert reported["template"]["source"] == CHAT_TEMPLATE
    assert reported["architecture"] == "llama"
    assert said("show", "ollama://Tiny:small", store=store)["stored"] == reported["stored"]
    shown = run("show", "tiny:small", "--store", store.root).stdout
    for words in ("stored as      tiny:small, ", "Be brief.", "own template   used instead"):
        assert words in shown


def test_a_projector_alone_is_called_one_and_has_no_capabilities(tmp_path):
    path = tmp_path / "eye.gguf"
    path.write_bytes(Parts(pairs=[pair("general.architecture", STRING, text("clip"))]).bytes())
    shown = run("show", path).stdout
    assert "served         no: " in shown and "is the image projector of a model" in shown
    assert "capabilities   unknown" in shown


def test_a_projector_beside_the_model_is_shown(tiny, store):
    eye = Parts(pairs=[pair("general.architecture", STRING, text("clip"))]).bytes()
    put(store, "seeing", {"model": tiny.read_bytes(), "projector": eye})
    reported = said("show", "seeing", store=store)["projector"]
    assert reported["architecture"] == "clip"
    assert reported["file_bytes"] == len(eye)
    assert "clip" in run("show", "seeing", store=store).stdout


def test_an_absent_model_or_file_is_one_line(store):
    cases = (("nobody", "nobody:latest"), ("./no.gguf", "no such file"), ("/", "is a directory"))
    for model, words in cases:
        result = run("show", model, status=1, store=store)
        assert len(result.stderr.splitlines()) == 1 and words in result.stderr


def sparse_llama(path: Path, tiny: Path, rows: int) -> int:
    """A sparse file: the header of `tiny` with so many rows of embeddings; returns its size."""
    reader, writer = gguf.GGUFReader(tiny), gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], element)
    data_bytes = 0
    for tensor in reader.tensors:
        shape = tensor.shape.tolist()[::-1]
        if tensor.name in ("token_embd.weight", "output.weight"):
            shape[0] = rows
        nbytes = int(tensor.n_bytes) // int(tensor.shape[-1]) * shape[0]
        data_bytes = -(-data_bytes // 32) * 32 + nbytes
        writer.add_tensor_info(
            tensor.name, shape, np.dtype(np.float32), nbytes, raw_dtype=tensor.tensor_type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    size = -(-path.stat().st_size // 32) * 32 + data_bytes
    with path.open("r+b") as file:
        file.truncate(size)
    return size


def test_only_the_header_of_a_large_file_is_read(tiny, tmp_path):
    large = tmp_path / "large.gguf"
    f32 = tmp_path / "f32.gguf"
    write_tiny_llama(f32, type="F32")
    size = sparse_llama(large, f32, rows=20_000_000)
    assert size > 8 * 2**30
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    done = run("show", str(large), "--device", "cpu")
    assert "served         yes" in done.stdout
    assert resident_bytes("VmHWM") - before < 2**30


def resident_bytes(what: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{what}:\s+(\d+) kB", status)[1])


def test_the_first_line_of_a_separate_licence_is_shown(tiny, store, tmp_path):
    silent = rewrite(tiny, tmp_path / "silent.gguf", keys={"general.license": None})
    put(store, "silent", {"model": silent.read_bytes(), "license": b"\n  Tiny Licence\nmore"})
    assert "licence        Tiny Licence\n" in run("show", "silent", store=store).stdout
