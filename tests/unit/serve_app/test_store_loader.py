"""Models of the store as a pool loads them: what they will take is known before."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from model_zoo.chat import Message
from model_zoo.creation import create
from model_zoo.definition import Definition
from model_zoo.model_name import ModelName
from model_zoo.sources.reference import RegistrySource
from model_zoo.store import Store
from runtime.errors import DoesNotFitError, ModelNotFoundError
from runtime.request import SamplingParams
from serve_app.on_demand.loader import StoreLoader
from serve_app.on_demand.settings import OnDemandSettings
from serve_app.task import ChatTask, Conversation, merge
from tests.tiny_seeing import write_tiny_seeing
from tests.unit.serve_app.cli_runs import put

DEMO = Path(__file__).parents[3] / "models" / "demo.gguf"
NAME = "127.0.0.1:5000/library/demo:latest"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    store = Store(tmp_path_factory.mktemp("models"))
    put(store, NAME, {"model": DEMO.read_bytes(), "system": b"Be brief.", "template": b"{{ .X }}"})
    folder = tmp_path_factory.mktemp("seeing")
    projector = write_tiny_seeing(folder / "tiny.gguf", flavour="llama.cpp")
    assert projector is not None
    eyes = {"model": (folder / "tiny.gguf").read_bytes(), "projector": projector.read_bytes()}
    put(store, "seeing", eyes)
    return store


def loader_of(store: Store, **model) -> StoreLoader:
    stated = {"context_tokens": 64, "max_sequences": 3, "device": "cpu", "threads": 1, **model}
    settings = OnDemandSettings.model_validate({"model": stated})
    return StoreLoader(settings, {"CARAVAN_MODELS": str(store.root)})


@pytest.mark.parametrize("name", [NAME, "seeing"])
def test_what_a_model_takes_is_known_before_it_is_loaded(store, name):
    loader = loader_of(store)
    found = loader.find(name)
    card, sizes = loader.outline(found)
    assert sizes.least < sizes.full
    for budget in (sizes.least, sizes.full):
        replica = loader.load(found, budget)
        assert replica.describe().reserved_bytes == budget
        told = replica.describe()
        assert (told.capabilities, told.digest) == (card.capabilities, card.digest)
        assert (told.chat_template, told.context_tokens) == (card.chat_template, 64)
        loader.unload(replica)
    with pytest.raises(DoesNotFitError):
        loader.load(found, sizes.least - 1)


def test_names_are_found_whatever_their_case_and_others_are_not(store):
    loader = loader_of(store)
    assert loader.find("SEEING:Latest").name == "seeing:latest"
    assert loader.find("seeing") == loader.find("Seeing")
    for name in ("nobody", "../seeing", "a/b/c/d", "", "seeing:7b"):
        with pytest.raises(ModelNotFoundError, match="not found"):
            loader.find(name)


def test_a_name_that_was_given_to_another_model_is_another_one(store):
    loader = loader_of(store)
    name, base = ModelName.parse("changing"), RegistrySource(ModelName.parse("seeing"))
    create(name, Definition(base=base, system="one"), store)
    first = loader.find("changing")
    create(name, Definition(base=base, system="two"), store)
    assert loader.find("changing") != first
    store.remove(name)
    with pytest.raises(ModelNotFoundError):
        loader.find("changing")
    with pytest.raises(ModelNotFoundError, match="not whole in the store any more"):
        loader.load(first, 10**9)


def test_arrays_are_told_where_they_are_asked_for(store):
    loader = loader_of(store)
    found = loader.find(NAME)
    brief, verbose = loader.outline(found)[0], loader.outline(found, True)[0]
    assert brief.metadata["tokenizer.ggml.tokens"] is None
    assert len(verbose.metadata["tokenizer.ggml.tokens"]) > 100
    assert loader.outline(found)[0] is brief


def test_a_template_of_the_models_own_is_used(store):
    name, base = ModelName.parse("spoken"), RegistrySource(ModelName.parse(NAME))
    template = "{{ messages[0].content }}|{{ messages[-1].content }}"
    create(name, Definition(base=base, system="ab", template=template), store)
    loader = loader_of(store)
    replica = loader.load(loader.find("spoken"), 10**9)
    task = ChatTask(
        "t",
        "spoken",
        Conversation((Message("user", "cd"),)),
        SamplingParams(seed=1),
        max_tokens=1,
        prompt_wanted=True,
    )

    async def prompt() -> tuple[int, ...]:
        async with aclosing(replica.generate(task)) as deltas:
            return merge([delta async for delta in deltas]).prompt

    tokens = asyncio.run(prompt())
    spoken = "".join(replica._model.tokenizer.token_text(token) for token in tokens)
    loader.unload(replica)
    assert spoken.removeprefix("<s>") == "ab|cd"
    assert replica.describe().chat_template == template


def test_what_is_free_is_the_limit_unless_one_is_stated(store):
    assert 0 < loader_of(store).max_loaded_bytes < 1 << 50
    settings = OnDemandSettings(max_loaded_bytes=5)
    assert StoreLoader(settings, {"CARAVAN_MODELS": str(store.root)}).max_loaded_bytes == 5
