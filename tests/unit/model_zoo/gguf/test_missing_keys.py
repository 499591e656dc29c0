"""Files of every architecture in which a key or tensor is missing or a tensor has a wrong shape.

Each key and each tensor is left out by itself, and each tensor gets other shapes. Loading must fail
and name it, unless the tables below state its default.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from model_zoo.gguf.header import TensorInfo
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.registry import class_for
from runtime.errors import ModelFileError
from tests.families.encoder_configs import ENCODERS
from tests.families.encoder_references import REFERENCES
from tests.families.text_families import TEXT_MODELS
from tests.families.text_family import CompleteFile
from tests.tiny_models import write_tiny

EPSILON = "attention.layer_norm_epsilon"
GEMMA = "gemma_embedding_with_every_other_layer_full"
GEMMA_KEYS = """
    attention.causal attention.layer_norm_rms_epsilon attention.sliding_window_pattern
    rope.freq_base rope.freq_base_swa rope.scaling.type
"""
FILES: Mapping[str, tuple[str, CompleteFile]] = {
    " ".join(filter(None, (family, file.config, file.flavour))): (family, file)
    for family, row in TEXT_MODELS.items()
    for file in row.files
} | {
    "bert": ("bert", CompleteFile(optional_keys=f"attention.causal {EPSILON}")),
    "eurobert": (
        "eurobert",
        CompleteFile(optional_keys="attention.causal attention.key_length attention.value_length"),
    ),
    "jina-bert-v2": (
        "jina-bert-v2",
        CompleteFile(
            optional_keys=f"attention.causal {EPSILON} pooling_type",
            optional_tensors="token_types.weight",
        ),
    ),
    "jina-bert-v3": (
        "jina_bert_v3",
        CompleteFile(
            optional_keys=f"attention.causal {EPSILON} rope.freq_base",
            optional_tensors="token_types.weight",
        ),
    ),
    "llama-embed": (
        "llama-embed",
        CompleteFile(
            optional_keys=f"""attention.causal {EPSILON} attention.layer_norm_rms_epsilon
            pooling_type rope.freq_base"""
        ),
    ),
    "gemma-embedding": (GEMMA, CompleteFile(optional_keys=GEMMA_KEYS)),
    # Without its direction, it is a file of Gemma 3.
    "gemma-embedding ollama": (GEMMA, CompleteFile(flavour="ollama", optional_keys=GEMMA_KEYS)),
    "modern-bert": (
        "modern_bert_of_granite",
        CompleteFile(
            optional_keys=f"""attention.causal {EPSILON} attention.sliding_window
            attention.sliding_window_pattern rope.freq_base rope.freq_base_swa hidden_activation"""
        ),
    ),
    "nomic-bert": (
        "nomic_bert",
        CompleteFile(optional_keys=f"attention.causal {EPSILON} rope.freq_base"),
    ),
    "nomic-bert-moe": (
        "nomic-bert-moe",
        CompleteFile(
            optional_keys=f"attention.causal {EPSILON} pooling_type rope.freq_base",
            optional_tensors="token_types.weight",
        ),
    ),
}
EVERYWHERE = {"vocab_size", "rope.dimension_count"}
# Without them the head is the embedding, rotation is plain, and keys are values as well.
OPTIONAL_TENSORS = {"output.weight", "rope_freqs.weight"}
LAYER = re.compile(r"^blk\.\d+\.")
every_case = pytest.mark.parametrize("case", FILES)


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Callable[[str], GGUFFile]:
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(case: str) -> GGUFFile:
        if case not in made:
            family, complete = FILES[case]
            path: Path = folder / f"{case}.gguf"
            if family in TEXT_MODELS:
                TEXT_MODELS[family].write(path, complete.config, flavour=complete.flavour)
            elif family in REFERENCES:
                REFERENCES[family].write(path)
            else:
                flavour = complete.flavour or "llama.cpp"
                write_tiny(path, ENCODERS[family], flavour=flavour, maker=AutoModel)
            made[case] = GGUFFile.open(path)
        return made[case]

    return get


def refusal(file: GGUFFile, **changes: Any) -> str | None:
    """How it is refused once changed so, before any data is read; None where it is not."""
    changed = copy.copy(file)
    for name, value in changes.items():
        setattr(changed, name, value)
    metadata = Metadata(changed.metadata, path=changed.path)
    scope = TensorScope(changed, device=META, dtype=torch.float32)
    try:
        class_for(metadata)(scope, metadata)
        scope.check()
    except ModelFileError as error:
        return str(error)
    return None


def without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def names(tensor: str, message: str) -> bool:
    """Whether a message names the tensor or, where it has an alternative, others of its layer."""
    layer, _, _ = tensor.rpartition(".")[0].rpartition(".")
    return tensor in message or (layer.startswith("blk.") and f"({layer}." in message)


def of_different_layers(file: GGUFFile) -> dict[str, TensorInfo]:
    """The tensors without those of layers that are made as a later one."""
    layers: dict[str, dict[str, TensorInfo]] = {}
    for name, info in file.tensors.items():
        layer = LAYER.match(name)
        layers.setdefault(layer.group() if layer else "", {})[name] = info
    made = {
        tuple((LAYER.sub("", name), info.shape) for name, info in tensors.items()): tensors
        for tensors in layers.values()
    }
    return {name: info for tensors in made.values() for name, info in tensors.items()}


@every_case
def test_a_missing_key_is_named_unless_it_has_a_known_default(opened, case) -> None:
    file = opened(case)
    assert refusal(file) is None
    prefix = file.metadata["general.architecture"] + "."
    silent = set()
    for key in file.metadata:
        if key.startswith(prefix):
            message = refusal(file, metadata=without(file.metadata, key))
            if message is None:
                silent.add(key.removeprefix(prefix))
            else:  # missing, or its default contradicts tensors or other keys
                assert f"`{prefix}" in message or "of its tensors, " in message, (key, message)
    assert silent - EVERYWHERE == set(FILES[case][1].optional_keys.split())


@every_case
def test_a_missing_tensor_is_named(opened, case) -> None:
    file = opened(case)
    silent = set()
    for name in of_different_layers(file):
        message = refusal(file, tensors=without(file.tensors, name))
        if message is None:
            silent.add(name)
        else:
            assert names(name, message), (name, message)
    row = FILES[case][1]
    assert silent <= OPTIONAL_TENSORS | {*row.optional_tensors.split(), *row.unused_tensors.split()}


@every_case
def test_a_tensor_that_no_layer_knows_is_named(opened, case) -> None:
    file = opened(case)
    name, other = "blk.0.attn_magic.weight", next(iter(file.tensors.values()))
    message = refusal(file, tensors={**file.tensors, name: replace(other, name=name)})
    assert message is not None
    assert f"1 is not known to this architecture ({name})" in message


Shape = tuple[int, ...]


def other_shapes(name: str, shape: Shape) -> list[Shape]:
    """The last dimension halved, the first one, and a dimension more; the same number for all."""
    halved = (*shape[:-1], shape[-1] // 2)
    more = (1, *shape) if prod(shape) > shape[-1] else halved  # a vector may be one row
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):  # for any vocabulary
        return [halved, more, halved]
    return [halved, more, (shape[0] // 2, *shape[1:])]


def spelled(shape: Shape) -> str:
    return " x ".join(map(str, shape))


@every_case
def test_a_tensor_of_another_shape_is_named(opened, case) -> None:
    """In files in which all are wrong, and alone where that does not name it and its own shape."""
    file, unused = opened(case), FILES[case][1].unused_tensors.split()
    tensors = {n: i for n, i in of_different_layers(file).items() if n not in unused}
    wrong = {name: other_shapes(name, info.shape) for name, info in tensors.items()}
    for which in range(3):
        changed = {n: replace(info, shape=wrong[n][which]) for n, info in tensors.items()}
        together = refusal(file, tensors=file.tensors | changed) or ""
        for name, other in changed.items():
            right = tensors[name].shape
            if f"{name} is {spelled(other.shape)}, not {spelled(right)}" in together:
                continue
            alone = refusal(file, tensors=file.tensors | {name: other})
            assert alone is not None, f"{name} {right} may be {other.shape}"
            stem = name.rpartition(".")[0]
            assert stem in alone or "laurel" in stem, (name, other.shape, alone)
