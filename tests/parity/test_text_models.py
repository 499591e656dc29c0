"""Logits of every text family against `transformers`, float32 and eager, on tiny random models."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from model_zoo.convert.quantizers import fitting, k_quants
from runtime.errors import ModelFileError
from runtime.kernels.native import library
from runtime.kernels.recording import Arena, NotRecordableError, record
from runtime.worker.model import RowForm
from runtime.worker.recorded_steps import _without_spans
from tests.families.agreement import (
    CHECKS,
    PROMPT,
    TOLERANCE,
    Pair,
    check_bits_alone_and_in_a_batch,
    check_long_prompt,
    check_quantized,
    load_decoder,
    random_tokens,
)
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import DIVERSE, TEXT_MODELS
from tests.families.text_family import CONTEXT_TOKENS, changed, pair_of
from tests.kernels.native_kernels import require_native_kernels

ROWS = TEXT_MODELS.items()
CONFIGS = [(name, config) for name, row in ROWS for config in row.configs]
FIRST = [(name, next(iter(row.configs))) for name, row in ROWS]
# Two types of blocks in all kinds of layers, the third with and without experts.
QUANTIZED = [(name, "q4_k_m") for name in DIVERSE if TEXT_MODELS[name].wide]
QUANTIZED += [("llama", "q8_0"), ("qwen3moe", "q8_0")]
VARIANTS = [(name, variant) for name, row in ROWS for variant in row.variants]
EFFECTIVE_KEYS = [(name, key) for name, row in ROWS for key in row.effective_keys]
# Rows whose architecture the installed package does not name yet.
LATER = """
    cohere2moe granite_swa granite_swa_with_experts hy_v3 laguna mellum minimax-m3 muse-glimmer
    qwen4exp qwen4exp_with_choice
""".split()
REFUSED = [(name, keys, words) for name, row in ROWS for keys, words in row.refused]
# Families whose decode steps are not recorded, with the reasons.
COMPUTED = {
    "mllama": "it reads the spans of rows",  # which tell whether there are images
    "qwen4exp_with_choice": "it uses the torch operation",
}
ARENA = Arena(1 << 22)


# Of families that the format names: those of Ollama alone have other names.
NAMED = [
    (name, row.divided or "plain")
    for name, row in ROWS
    if row.options.get("flavour") != "ollama" and name not in LATER
]
NAMED += [("deepseek2", "glm_flash")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of the files of the pairs, which have their ids."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=CONFIGS, ids="-".join)
def pair(request, folder) -> Pair:
    family, config = request.param
    return TEXT_MODELS[family].pair(folder / f"{family}-{config}.gguf", config)


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("pair", FIRST, ids="-".join, indirect=True)
def test_bits_of_a_row_do_not_depend_on_its_batch(pair) -> None:
    """Of one configuration: others choose among the same kernels."""
    check_bits_alone_and_in_a_batch(pair)


@pytest.mark.parametrize("pair", NAMED, ids="-".join, indirect=True)
def test_names_and_types_are_those_of_the_gguf_format(pair, folder, request) -> None:
    reader = gguf.GGUFReader(folder / f"{request.node.callspec.id}.gguf")
    stated = reader.fields["general.architecture"].contents()
    [architecture] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == stated]
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[architecture]}
    found = {re.sub(r"\.(weight|bias|scale)$", "", tensor.name) for tensor in reader.tensors}
    for block in range(pair.twin.config.get_text_config().num_hidden_layers):
        found = {name.replace(f"blk.{block}.", "blk.{bid}.") for name in found}
    assert found <= known
    assert "token_embd" in found and len(found) > 8


def test_a_decode_step_is_recorded(pair, request) -> None:
    """Of every configuration, on a CPU: the calls of kernels give the same states again."""
    require_native_kernels()
    (family, _), decoder = request.node.callspec.params["pair"], pair.decoder
    paged, kernels = PagedDecoder(decoder), library()
    paged.feed({0: random_tokens(9, seed=1), 1: random_tokens(3, seed=2)})
    batch = _without_spans(paged.batch({0: [5], 1: [6]}), RowForm.ONE_EACH)
    with torch.inference_mode():
        if family in COMPUTED:
            with pytest.raises(NotRecordableError, match=COMPUTED[family]):
                record(lambda: decoder.states(batch, paged.cache), ARENA)
            return
        recording = record(lambda: decoder.states(batch, paged.cache), ARENA)
    states = recording.result.clone()
    stateless = not any(cache.kind.by_sequence for cache in decoder.cache_layers)
    assert torch.equal(recording.replay(kernels), states) or not stateless


@pytest.fixture
def first_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks get the first scales of those that the quantisers compare, which takes less time."""
    monkeypatch.setattr(fitting, "_SHIFTS", (0.0,))
    monkeypatch.setattr(k_quants, "_NEARBY", (0,))


@pytest.mark.parametrize(("family", "type"), QUANTIZED)
def test_quantized_copies_agree(tmp_path, first_scales, family: str, type: str) -> None:
    row = TEXT_MODELS[family]
    check_quantized(row.wide_config(), tmp_path, type, **row.options)


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_other_spellings_of_a_file_agree(tmp_path, family: str, variant: str) -> None:
    file, twin = TEXT_MODELS[family].variant(tmp_path / "tiny.gguf", variant)
    check_long_prompt(pair_of(file, twin, context_tokens=CONTEXT_TOKENS))


@pytest.mark.parametrize(("family", "key"), EFFECTIVE_KEYS)
def test_another_value_of_a_key_changes_the_logits(tmp_path, family: str, key: str) -> None:
    row, path = TEXT_MODELS[family], tmp_path / "tiny.gguf"
    twin = row.write(path)
    pair = pair_of(changed(path, {key: row.effective_keys[key]}), twin)
    tokens = random_tokens(PROMPT, seed=1)
    logits = PagedDecoder(pair.decoder).feed({0: tokens})
    assert pair.worst(logits, pair.expected(tokens)) > 10 * TOLERANCE


@pytest.mark.parametrize(("family", "keys", "words"), REFUSED)
def test_a_contradictory_file_is_refused(
    tmp_path, family: str, keys: Mapping[str, Any], words: str
) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS[family].write(path)
    with pytest.raises(ModelFileError, match=words):
        load_decoder(changed(path, keys))
