"""The loader: memory is planned before a load, and contexts are limited."""

import asyncio
import dataclasses
import gc
import json
import threading
import weakref
from contextlib import aclosing

import gguf
import pytest

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.sources.reference import RegistrySource
from model_zoo.store.creation import create
from model_zoo.store.definition import Definition
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.engine.request import SamplingParams
from runtime.errors import (
    DoesNotFitError,
    ModelNotFoundError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
)
from serve_app.config.on_demand_settings import OnDemandSettings
from serve_app.messages.tasks import (
    ChatTask,
    Conversation,
    EmbeddingTask,
    RawText,
)
from serve_app.on_demand import loader as loader_module
from serve_app.on_demand.loader import StoreLoader
from serve_app.on_demand.model_pool import ModelPool, PoolLimits
from tests.checkout import DEMO_MODEL
from tests.families.text_families import TEXT_MODELS
from tests.gguf_files import rewrite
from tests.patience import HANG_S, until
from tests.tiny_models import write_tiny_llama
from tests.tiny_vision_model import write_tiny_vision_model
from tests.unit.serve_app.answers import answer_of
from tests.unit.serve_app.cli.cli_runs import put

NAME = "127.0.0.1:5000/library/demo:latest"
TRAINED = 512  # of "tiny"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    store = Store(tmp_path_factory.mktemp("models"))
    put(
        store,
        NAME,
        {"model": DEMO_MODEL.read_bytes(), "system": b"Be brief.", "template": b"{{ .X }}"},
    )
    folder = tmp_path_factory.mktemp("seeing")
    projector = write_tiny_vision_model(folder / "tiny.gguf", flavour="llama.cpp")
    assert projector is not None
    vision = {"model": (folder / "tiny.gguf").read_bytes(), "projector": projector.read_bytes()}
    put(store, "seeing", vision)
    write_tiny_llama(folder / "text.gguf", type="F16")
    put(store, "tiny", {"model": (folder / "text.gguf").read_bytes()})
    TEXT_MODELS["lfm2"].write(folder / "recurrent.gguf")
    put(store, "recurrent", {"model": (folder / "recurrent.gguf").read_bytes()})
    return store


def loader_of(store: Store, max_loaded_bytes: int | None = None, **model) -> StoreLoader:
    stated = {"context_tokens": 64, "max_sequences": 3, "device": "cpu", "threads": 1, **model}
    settings = OnDemandSettings(model=stated, max_loaded_bytes=max_loaded_bytes)
    return StoreLoader(settings, {"CARAVAN_MODELS": str(store.root)})


@pytest.mark.parametrize("name", [NAME, "seeing"])
def test_the_memory_of_a_model_is_planned_before_it_is_loaded(store, name):
    loader = loader_of(store)
    found = loader.find(name)
    card, need = loader.outline(found)
    assert need.minimum_bytes < need.full_bytes
    for budget in (need.minimum_bytes, need.full_bytes):
        replica = loader.load(found, budget)
        assert replica.describe().reserved_bytes == budget
        reported = replica.describe()
        assert (reported.capabilities, reported.digest) == (card.capabilities, card.digest)
        assert (reported.chat_template, reported.context_tokens) == (card.chat_template, 64)
        loader.unload(replica)
    with pytest.raises(DoesNotFitError):
        loader.load(found, need.minimum_bytes - 1)


def test_a_model_with_recurrent_states_needs_memory_for_one_of_them(store):
    loader = loader_of(store)
    found = loader.find("recurrent")
    _, need = loader.outline(found)
    replica = loader.load(found, need.minimum_bytes)
    assert replica.describe().reserved_bytes == need.minimum_bytes < need.full_bytes
    task = ChatTask("t", "recurrent", RawText("a"), SamplingParams(seed=1), max_tokens=3)
    assert asyncio.run(answer_of(replica, task)).tokens
    loader.unload(replica)
    with pytest.raises(DoesNotFitError):
        loader.load(found, need.minimum_bytes - 1)


def test_names_are_found_in_any_case_of_letters(store):
    loader = loader_of(store)
    assert loader.find("SEEING:Latest").name == "seeing:latest"
    assert loader.find("seeing") == loader.find("Seeing")
    for name in ("nobody", "../seeing", "a/b/c/d", "", "seeing:7b"):
        with pytest.raises(ModelNotFoundError, match="not found"):
            loader.find(name)


def test_a_recreated_model_is_another_version(store):
    loader = loader_of(store)
    name, base = ModelName.parse("changing"), RegistrySource(ModelName.parse("seeing"))
    create(name, Definition(base=base, system="one"), store)
    first = loader.find("changing")
    create(name, Definition(base=base, system="two"), store)
    assert loader.find("changing") != first
    store.remove(name)
    with pytest.raises(ModelNotFoundError):
        loader.find("changing")
    with pytest.raises(ModelNotFoundError, match="incomplete in the store"):
        loader.load(first, 10**9)


def test_a_version_that_was_replaced_since_it_was_found_is_neither_loaded_nor_planned(store):
    name, base = ModelName.parse("replaced"), RegistrySource(ModelName.parse("tiny"))
    create(name, Definition(base=base, system="one"), store)
    planned, unplanned = loader_of(store), loader_of(store)
    first = planned.find("replaced")
    need = planned.outline(first)[1]
    create(name, Definition(base=base, system="two"), store)
    with pytest.raises(OverloadedError, match="'replaced:latest' was replaced"):
        planned.load(first, need.full_bytes)
    with pytest.raises(OverloadedError, match="was replaced"):
        unplanned.outline(first)
    assert unplanned.outline(unplanned.find("replaced"))[0].system == "two"
    create(name, Definition(base=base, system="one"), store)
    assert unplanned.outline(first)[0].system == "one"


def test_only_verbose_cards_contain_arrays(store):
    loader = loader_of(store)
    found = loader.find(NAME)
    brief, verbose = loader.outline(found)[0], loader.outline(found, True)[0]
    assert brief.metadata["tokenizer.ggml.tokens"] is None
    assert len(verbose.metadata["tokenizer.ggml.tokens"]) > 100
    assert loader.outline(found)[0] is brief


@pytest.mark.parametrize("described", [NAME, "seeing"])
async def test_a_model_is_loaded_while_a_description_hangs(store, monkeypatch, described):
    begun, may_end = threading.Event(), threading.Event()

    def hang(card, model):
        begun.set()
        assert may_end.wait(HANG_S)
        return card

    monkeypatch.setattr(loader_module, "verbose_card", hang)
    pool = ModelPool(loader_of(store), PoolLimits(max_loaded_bytes=1 << 30))
    describing = asyncio.create_task(pool.describe(described, verbose=True))
    try:
        async with asyncio.timeout(HANG_S):
            await until(begun.is_set)
            await pool.load("seeing", None)
            assert not describing.done()
    finally:
        may_end.set()
        await describing
        await pool.close()


class WatchedLoader(StoreLoader):
    """Keeps weak references to the engines that it has loaded."""

    def load(self, version, memory_bytes):
        replica = super().load(version, memory_bytes)
        self.engine = weakref.ref(replica._engine._engine)
        return replica


@pytest.mark.parametrize("by_request", [True, False])
async def test_the_memory_of_an_unloaded_model_is_free_at_once(store, by_request):
    """The engine is part of reference cycles, which only the garbage collector frees."""
    settings = OnDemandSettings(model={"context_tokens": 64, "device": "cpu", "threads": 1})
    loader = WatchedLoader(settings, {"CARAVAN_MODELS": str(store.root)})
    pool = ModelPool(loader, PoolLimits(max_loaded_bytes=1 << 30))
    task = ChatTask("t", "tiny", RawText("a"), SamplingParams(seed=1), max_tokens=1)
    if by_request:
        task = dataclasses.replace(task, keep_alive_s=0.0)
    gc.disable()
    try:
        async with aclosing(pool.generate(task)) as deltas:
            assert [delta async for delta in deltas]
        if not by_request:
            assert loader.engine() is not None
            assert await pool.unload("tiny:latest")
        assert loader.engine() is None
    finally:
        gc.enable()
        await pool.close()


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

    tokens = asyncio.run(answer_of(replica, task)).prompt
    spoken = "".join(replica._model.tokenizer.token_text(token) for token in tokens)
    loader.unload(replica)
    assert spoken.removeprefix("<s>") == "ab|cd"
    assert replica.describe().chat_template == template


def sized(store: Store, num_ctx: int) -> str:
    """Creates a model with this `num_ctx`; its name."""
    name, base = ModelName.parse("sized"), RegistrySource(ModelName.parse("tiny"))
    create(name, Definition(base=base, parameters={"num_ctx": num_ctx}), store)
    return "sized"


def served_context(loader: StoreLoader, name: str) -> int:
    """The served context, which must be the planned one."""
    found = loader.find(name)
    card, need = loader.outline(found)
    replica = loader.load(found, need.minimum_bytes)
    reported = replica.describe()
    loader.unload(replica)
    assert reported.context_tokens == card.context_tokens
    return reported.context_tokens


def reduced(capsys) -> list[tuple[int, int, str]]:
    """The log lines about contexts that are shorter than requested."""
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[:1] == "{"]
    reported = [line for line in lines if line["event"] == "context reduced"]
    return [(line["num_ctx"], line["context_tokens"], line["reason"]) for line in reported]


@pytest.mark.parametrize("num_ctx", [16, 100, TRAINED])
def test_num_ctx_of_a_model_overrides_the_settings(store, capsys, num_ctx):
    assert served_context(loader_of(store), sized(store, num_ctx)) == num_ctx
    assert reduced(capsys) == []


def test_a_context_is_limited_to_the_trained_length_and_logged(store, capsys):
    assert served_context(loader_of(store), sized(store, 10**6)) == TRAINED
    ((asked, served, reason),) = reduced(capsys)
    assert (asked, served) == (10**6, TRAINED) and "trained" in reason


def test_a_context_is_limited_by_memory_and_logged(store, capsys):
    loader = loader_of(store)
    least = loader.outline(loader.find("tiny"))[1].minimum_bytes
    most = loader.outline(loader.find(sized(store, TRAINED)))[1].minimum_bytes
    for part in (0.25, 0.5):
        room = int(least + part * (most - least))
        tight = loader_of(store, max_loaded_bytes=room)
        served = served_context(tight, "sized")
        assert 64 < served < TRAINED
        assert tight.outline(tight.find("sized"))[1].minimum_bytes <= room
        ((asked, reported, reason),) = reduced(capsys)
        assert (asked, reported) == (TRAINED, served) and "max_loaded_bytes" in reason
        longer = loader_of(store, max_loaded_bytes=room)
        assert longer.outline(longer.find(sized(store, served + 16)))[0].context_tokens == served
        sized(store, TRAINED)


def test_a_context_is_not_reduced_below_that_of_the_settings(store):
    loader = loader_of(store)
    least = loader.outline(loader.find("tiny"))[1].minimum_bytes
    tight = loader_of(store, max_loaded_bytes=least - 1)
    for name in ("tiny", sized(store, TRAINED)):
        card, need = tight.outline(tight.find(name))
        assert (card.context_tokens, need.minimum_bytes) == (64, least), "the pool refuses it"


@pytest.mark.parametrize("common", [{"context_tokens": 10**6}, {"defaults": {"num_ctx": 10**6}}])
def test_settings_for_all_models_may_exceed_what_one_of_them_supports(store, common):
    assert served_context(loader_of(store, **common), "tiny") <= TRAINED


def question(text: str, *images: ImagePart) -> Conversation:
    return Conversation((Message("user", (text, *images)),))


REFUSED = {
    "seeing": ChatTask("t", "mine", question("hi", ImagePart(b"x")), SamplingParams(seed=1)),
    "a long chat": ChatTask("t", "mine", question("hi " * 100), SamplingParams(seed=1)),
    "a long text": EmbeddingTask("t", "mine", (RawText("hi " * 100),), truncate=False),
}


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None])
@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_an_error_does_not_name_the_model_of_the_file(tmp_path, refused, template):
    """The client has used another name, and must not learn that of the file."""
    write_tiny_llama(tmp_path / "tiny.gguf", type="F16")
    tokens = gguf.GGUFReader(tmp_path / "tiny.gguf").fields["tokenizer.ggml.tokens"].contents()
    keys = {
        "general.name": "Secret-7B",
        "tokenizer.chat_template": template,
        "tokenizer.ggml.tokens": [text.replace("<|im_start|>", "<plain>") for text in tokens],
    }
    path = rewrite(tmp_path / "tiny.gguf", tmp_path / "secret.gguf", keys=keys)
    put(Store(tmp_path / "models"), "mine", {"model": path.read_bytes()})
    loader = loader_of(Store(tmp_path / "models"))
    replica = loader.load(loader.find("mine"), 10**9)
    with pytest.raises(RequestError) as caught:
        asyncio.run(answer_of(replica, refused))
    loader.unload(replica)
    assert "Secret" not in str(caught.value)
    if isinstance(caught.value, PromptTooLongError):
        assert "'mine:latest'" in str(caught.value)


def test_free_memory_is_the_limit_unless_configured(store):
    assert 0 < loader_of(store).max_loaded_bytes < 1 << 50
    settings = OnDemandSettings(max_loaded_bytes=5)
    assert StoreLoader(settings, {"CARAVAN_MODELS": str(store.root)}).max_loaded_bytes == 5
