"""Models whose layers are on several devices give the logits of one.

The devices are the CPU under several numbers: torch computes all of them in one place, but weights,
pages and inputs of a step are requested by device number.
"""

from pathlib import Path

import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import LoadOptions, load
from runtime.distributed.layer_placement import LayerPlacement, inseparable
from runtime.engine.assembly import assemble
from runtime.engine.engine_options import EngineOptions
from runtime.errors import DoesNotFitError
from runtime.worker.model import Batch, DecoderModel
from tests.families.agreement import load_decoder, random_tokens
from tests.families.engine_runs import answers, mixed_requests, running
from tests.families.gemma_families import SHARED_PAGES
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
MAIN, *OTHERS = (torch.device("cpu", number) for number in range(3))
# Between them: windows, shared keys, chosen tokens, experts, sinks, recurrent layers, and layers
# with two caches or none.
FAMILIES = (
    "deepseek2",
    "falcon-h1",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm-dsa",
    "gpt-oss",
    "lfm2",
    "minimax-m3",
    "nemotron_h",
    "olmo2",
    "qwen3next",
)


def staged(decoder: DecoderModel) -> LayerPlacement:
    """Two layers here, two there, and so on, or more that use the same pages; the main device has
    none."""
    parts = enumerate(inseparable(decoder.source_layers))
    return LayerPlacement(tuple(OTHERS[n // 2 % 2] for n, part in parts for _ in part), MAIN)


def decoder_of(path: Path, layer_placement: LayerPlacement | None) -> DecoderModel:
    device = CPU if layer_placement is None else MAIN
    return load_decoder(path, device=device, layer_placement=layer_placement)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_one_device(tmp_path, family: str) -> None:
    path, row = tmp_path / "tiny.gguf", TEXT_MODELS[family]
    name = row.divided or "plain"
    row.write(path, name, **SHARED_PAGES.get(family, {}))
    tokens, found, whole = random_tokens(41, seed=1), [], decoder_of(path, None)
    for decoder in (whole, decoder_of(path, staged(whole))):
        paged = PagedDecoder(decoder)
        found.append(torch.cat([paged.feed({0: tokens[:30]}), paged.feed({0: tokens[30:]})]))
    assert torch.equal(*found)


@pytest.mark.parametrize("family", SHARED_PAGES)
def test_a_layer_may_not_use_pages_on_another_device(tmp_path, family: str) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS[family].write(path, **SHARED_PAGES[family])
    sources = decoder_of(path, None).source_layers
    apart = (OTHERS[source == layer] for layer, source in enumerate(sources))
    with pytest.raises(AssertionError, match="pages on another device"):
        decoder_of(path, LayerPlacement(tuple(apart), MAIN))


def test_every_device_holds_its_layers_and_the_main_one_the_rest(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, config="gqa")
    whole, parts = decoder_of(path, None), decoder_of(path, LayerPlacement((OTHERS[0], MAIN), MAIN))
    sizes = {n: i.nbytes for n, i in GGUFFile.open(path).tensors.items()}
    first = sum(size for name, size in sizes.items() if name.startswith("blk.0."))
    assert parts.weight_bytes_on(OTHERS[0]) == first
    assert parts.weight_bytes_on(MAIN) == whole.weight_bytes - first == sum(sizes.values()) - first
    assert parts.weight_bytes == whole.weight_bytes
    assert whole.cache_devices is whole.layer_devices is None
    assert parts.cache_devices == parts.layer_devices == (OTHERS[0], MAIN)


def test_a_step_travels_once_to_each_device(tmp_path, monkeypatch) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["gemma3"].write(path)
    layer_placement = staged(decoder_of(path, None))
    paged = PagedDecoder(decoder_of(path, layer_placement))
    went: list[torch.device] = []
    move = Batch.to
    monkeypatch.setattr(Batch, "to", lambda batch, to: went.append(to) or move(batch, to))
    paged.feed({0: random_tokens(5, seed=1)})
    # The test itself puts the step on the first one.
    assert went == [CPU, *OTHERS[: len(set(layer_placement.layers))]]


def test_an_engine_over_stages_answers_as_one_device(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, config="gqa")
    model = load(path, device=CPU, dtype=torch.float32)
    requests = mixed_requests(model.tokenizer.vocab_size)[:8]
    with running(model) as engine:
        alone = answers(engine, requests, together=True)
    layer_placement = LayerPlacement((OTHERS[0], OTHERS[1]), MAIN)
    options = LoadOptions(place=lambda file, outline: layer_placement)
    model = load(path, device=MAIN, dtype=torch.float32, options=options)
    options = EngineOptions(context_tokens=256, max_sequences=8, step_tokens=32)
    engine, memory = assemble(
        model.decoder, model.tokenizer.token_bytes, device=MAIN, options=options
    )
    assert memory.weight_bytes == model.decoder.weight_bytes_on(MAIN) < model.decoder.weight_bytes
    assert memory.others_bytes > model.decoder.weight_bytes - memory.weight_bytes
    engine.start()
    try:
        divided = answers(engine, requests, together=True)
    finally:
        engine.close()
    assert [d.tokens for d in divided] == [d.tokens for d in alone]


def test_each_device_must_have_room(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, config="gqa")
    layer_placement = LayerPlacement((OTHERS[0], OTHERS[0]), MAIN)
    options = LoadOptions(place=lambda file, outline: layer_placement)
    model = load(path, device=MAIN, dtype=torch.float32, options=options)
    options = EngineOptions(
        context_tokens=256, max_sequences=2, step_tokens=8, memory_bytes=model.decoder.weight_bytes
    )
    with pytest.raises(DoesNotFitError, match="cpu"):
        assemble(model.decoder, model.tokenizer.token_bytes, device=MAIN, options=options)
