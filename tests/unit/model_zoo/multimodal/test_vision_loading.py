"""Loading vision models from one file or two, and errors for files that do not fit."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from model_zoo.chat.messages import Message
from model_zoo.chat_model import ChatModel
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.images.decode import DecodingLimits
from model_zoo.models.gemma3.placeholders import START
from model_zoo.multimodal.image_settings import read_areas
from model_zoo.registry import LoadOptions, load
from runtime.errors import (
    CaravanError,
    ConfigurationError,
    ModelFileError,
    RequestError,
    UnsupportedModelError,
)
from tests.families.vision_agreement import WIDE
from tests.families.vision_families import VISION_MODELS
from tests.gguf_files import rewrite

CPU = torch.device("cpu")
ASK = [Message("user", (WIDE, "What is this?"))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for flavour in ("llama.cpp", "ollama"):
        folder = tmp_path_factory.mktemp("vision")
        VISION_MODELS["gemma3"].write(folder, flavour=flavour)
        found[flavour] = folder
    return found


@pytest.fixture(scope="module")
def text(folders) -> Path:
    return folders["llama.cpp"] / "tiny.gguf"


@pytest.fixture(scope="module")
def projector(folders) -> Path:
    return folders["llama.cpp"] / "mmproj-tiny.gguf"


@pytest.fixture(scope="module")
def single(folders) -> Path:
    return folders["ollama"] / "tiny.gguf"


def load_here(path: Path, projector: Path | None = None, **options: Any) -> ChatModel:
    return load(
        path, projector=projector, device=CPU, dtype=torch.float32, options=LoadOptions(**options)
    )


def changed(path: Path, tmp_path: Path, **changes: Any) -> Path:
    named = {"general.architecture": "clip" if "mmproj" in path.name else "gemma3"}
    keys = named | changes.pop("keys", {})
    return rewrite(path, tmp_path / f"changed-{path.name}", keys=keys, **changes)


def refusal(kind: type[CaravanError], path: Path, projector: Path | None = None) -> str:
    heard: list[tuple[int, int]] = []
    with pytest.raises(kind) as raised:
        load_here(path, projector, progress=lambda *now: heard.append(now))
    assert heard == [], "something was read of what is refused"
    assert type(raised.value) is kind
    return str(raised.value)


def test_both_flavours_have_vision(text, projector, single) -> None:
    two, one = load_here(text, projector), load_here(single)
    assert two.vision is not None and one.vision is not None
    assert two.description.projector is not None and one.description.projector is None
    assert two.description.projector["clip.projector_type"] == "gemma3"
    # `ollama show` expects the number, which projectors do not state.
    tensors = gguf.GGUFReader(projector).tensors
    stated = two.description.projector["general.parameter_count"]
    assert stated == sum(int(tensor.n_elements) for tensor in tensors) > 0
    first, second = two.prepare(ASK), one.prepare(ASK)
    assert first.tokens == second.tokens
    assert torch.equal(first.images[0].pixels, second.images[0].pixels)
    assert first.images[0].digest != second.images[0].digest, "towers of two files have one name"


def test_vision_models_with_other_weights_have_other_digests(text, projector, tmp_path) -> None:
    """Even with equal headers, since their features differ."""
    data = bytearray(projector.read_bytes())
    data[-64:] = bytes(64)  # of the last tensor
    other = tmp_path / "other.gguf"
    other.write_bytes(data)
    assert GGUFFile.open(other).digest == GGUFFile.open(projector).digest
    digests = [load_here(text, p).prepare(ASK).images[0].digest for p in (projector, other)]
    assert digests[0] != digests[1]


def test_weights_are_counted_per_model(text, projector, single) -> None:
    two, one = load_here(text, projector), load_here(single)
    assert two.vision is not None and one.vision is not None
    assert two.decoder.weight_bytes == one.decoder.weight_bytes
    assert two.vision.weight_bytes == one.vision.weight_bytes > 0


def test_a_text_file_alone_is_a_text_model(text) -> None:
    model = load_here(text)
    assert model.tower is None
    with pytest.raises(RequestError, match="does not support images"):
        model.prepare(ASK)
    assert model.prepare([Message("user", "hello")]).tokens


def test_progress_covers_both_files(text, projector) -> None:
    heard: list[tuple[int, int]] = []
    load_here(text, projector, progress=lambda *now: heard.append(now))
    done, totals = [now[0] for now in heard], {now[1] for now in heard}
    assert done == sorted(done) and len(totals) == 1
    alone: list[tuple[int, int]] = []
    load_here(text, progress=lambda *now: alone.append(now))
    assert done[-1] > alone[-1][0] and max(totals) > alone[-1][1]


def test_image_limits_are_configurable(single) -> None:
    model = load_here(single, image_limits=DecodingLimits(pixels=100))
    with pytest.raises(RequestError, match="at most 100 are accepted"):
        model.prepare(ASK)


def test_a_projector_of_another_family_is_refused_with_both_names(
    text, projector, tmp_path
) -> None:
    keys = {"clip.projector_type": "pixtral"}
    other = changed(projector, tmp_path, keys=keys)
    error = refusal(ConfigurationError, text, other)
    assert str(text) in error and str(other) in error and "mistral3 or mistral4 or llama" in error


def test_a_projector_of_another_width_is_refused_with_both_names(text, projector, tmp_path) -> None:
    wide = np.ones((48, 128), dtype=np.float32)
    other = changed(projector, tmp_path, tensors={"mm.input_projection.weight": wide})
    error = refusal(ConfigurationError, text, other)
    assert str(text) in error and str(other) in error and "128 wide" in error and "64" in error


def test_a_projector_for_a_file_with_vision_is_refused(single, projector) -> None:
    error = refusal(ConfigurationError, single, projector)
    assert str(single) in error and str(projector) in error and "contains a vision model" in error


def test_a_text_model_as_projector_is_refused(text) -> None:
    assert "not a projector" in refusal(ConfigurationError, text, text)


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"clip.projector_type": "telescope"}, "type telescope are not supported"),
        ({"clip.has_vision_encoder": False}, "does not support images"),
    ],
)
def test_a_projector_of_an_unknown_kind_is_refused(text, projector, tmp_path, keys, words) -> None:
    other = changed(projector, tmp_path, keys=keys)
    error = refusal(UnsupportedModelError, text, other)
    assert words in error and str(other) in error


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tensors": {"v.blk.1.ln1.weight": None}}, "v.blk.1.ln1.weight"),
        ({"tensors": {"v.telescope": np.ones(3, np.float32)}}, "v.telescope"),
        ({"keys": {"clip.vision.image_std": [0.5, 0.0, 0.5]}}, "clip.vision.image_std"),
        ({"keys": {"clip.vision.image_mean": [0.5]}}, "clip.vision.image_mean"),
    ],
)
def test_damage_in_a_projector_is_reported(text, projector, tmp_path, changes, words) -> None:
    other = changed(projector, tmp_path, **changes)
    error = refusal(ModelFileError, text, other)
    assert words in error and str(other) in error


def test_a_vocabulary_without_tokens_for_images_is_refused(text, projector, tmp_path) -> None:
    key = "tokenizer.ggml.tokens"
    known = load_here(text).description.metadata[key]
    tokens = [token.replace("_of_image", "_of_dream") for token in known]
    other = changed(text, tmp_path, keys={key: tokens})
    error = refusal(ModelFileError, other, projector)
    assert START in error and str(other) in error
    assert load_here(other).tower is None


@pytest.mark.parametrize(
    "least, most, words",
    [(200, 100, "more than `clip.most`, 100"), (1, 1 << 27, "limit"), (0, 5, "must be 1 or more")],
)
def test_invalid_areas_are_refused(least, most, words) -> None:
    values = {"general.architecture": "clip", "clip.least": least, "clip.most": most}
    with pytest.raises(ModelFileError) as raised:
        read_areas(Metadata(values, path=Path("x")), "least", "most", defaults=(1, 2))
    assert words in str(raised.value)
