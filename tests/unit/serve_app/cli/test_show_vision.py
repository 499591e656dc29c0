"""`caravan show` of models with vision plans what an engine reserves."""

from pathlib import Path

import pytest
import torch

from model_zoo.registry import load
from model_zoo.store.store import Store
from runtime.engine.assembly import assemble
from runtime.host_limits import usable_cpus
from runtime.vision.encoder import LocalEncoder
from tests.families.vision_families import VISION_MODELS
from tests.gguf_files import rewrite
from tests.tiny_vision_model import write_tiny_vision_model
from tests.unit.serve_app.cli.cli_runs import put, run, said
from tests.unit.serve_app.cli.test_show import ENGINE_OPTIONS

CPU = torch.device("cpu")
OPTIONS = ("--device", "cpu", "--context", 96, "--slots", 3)


def files_of(kind: str, folder: Path) -> tuple[Path, Path | None]:
    path = folder / "tiny.gguf"
    if kind != "idefics3":
        return path, write_tiny_vision_model(path, flavour=kind)
    VISION_MODELS["idefics3"].write(folder)
    return path, folder / "mmproj-tiny.gguf"


@pytest.mark.parametrize("kind", ["ollama", "llama.cpp", "idefics3"])
def test_the_memory_shown_is_what_an_engine_with_vision_reserves(tmp_path, kind) -> None:
    path, projector = files_of(kind, tmp_path)
    beside = () if projector is None else ("--projector", projector)
    reported = said("show", path, *OPTIONS, *beside)
    assert reported["supported"] is True
    memory = reported["memory"]
    model = load(path, projector=projector, device=CPU, dtype=torch.float32)
    assert model.vision is not None
    torch.set_num_threads(usable_cpus())
    _, plan = assemble(
        model.decoder,
        model.tokenizer.token_bytes,
        device=CPU,
        options=ENGINE_OPTIONS,
        encoder=LocalEncoder(
            model.vision.tower, device=CPU, weight_bytes=model.vision.weight_bytes
        ),
    )
    assert memory["vision_weight_bytes"] == model.vision.weight_bytes > 0
    assert memory["weight_bytes"] == plan.weight_bytes
    assert memory["vision_bytes"] == plan.vision_bytes > 0
    assert memory["activation_bytes"] == plan.activation_bytes
    assert memory["sampler_bytes"] == plan.sampler_bytes
    assert memory["total_bytes"] == plan.reserved_bytes
    shown = run("show", path, *OPTIONS, *beside).stdout
    assert "of them for vision" in shown and "to encode them and for their features" in shown


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    projector = write_tiny_vision_model(path, flavour="llama.cpp")
    assert projector is not None
    return path, projector


def stored(pair: tuple[Path, Path], projector: Path, root: Path) -> Store:
    store = Store(root / "store")
    put(store, "seeing", {"model": pair[0].read_bytes(), "projector": projector.read_bytes()})
    return store


def test_a_stored_model_is_planned_with_its_projector(pair, tmp_path) -> None:
    store = stored(pair, pair[1], tmp_path)
    reported = said("show", "seeing", *OPTIONS, store=store)["memory"]
    blind = said("show", pair[0], *OPTIONS)["memory"]
    named = said("show", pair[0], *OPTIONS, "--projector", pair[1])["memory"]
    reported.pop("available_bytes"), named.pop("available_bytes")  # changes between the calls
    assert reported == named
    assert blind["vision_weight_bytes"] == blind["vision_bytes"] == 0
    assert reported["total_bytes"] > blind["total_bytes"] + reported["vision_weight_bytes"]


def test_an_unsuitable_projector_of_a_model_is_reported_and_not_planned(pair, tmp_path) -> None:
    keys = {"general.architecture": "clip", "clip.projector_type": "telescope"}
    odd = rewrite(pair[1], tmp_path / "odd.gguf", keys=keys)
    store = stored(pair, odd, tmp_path)
    reported = said("show", "seeing", *OPTIONS, store=store)
    assert reported["supported"] is True
    assert "telescope are not supported" in reported["memory"]["projector_left_alone"]
    assert (
        reported["memory"]["total_bytes"]
        == said("show", pair[0], *OPTIONS)["memory"]["total_bytes"]
    )
    assert "telescope are not supported" in run("show", "seeing", store=store).stdout


def test_a_named_projector_must_fit(pair, tmp_path) -> None:
    keys = {"general.architecture": "clip", "clip.projector_type": "telescope"}
    odd = rewrite(pair[1], tmp_path / "odd.gguf", keys=keys)
    for projector, words in ((odd, "telescope"), (tmp_path / "no.gguf", "no such file")):
        reported = said("show", pair[0], *OPTIONS, "--projector", projector)
        assert reported["supported"] is False and words in reported["unsupported_because"]
        assert reported["architecture"] == "gemma3"
