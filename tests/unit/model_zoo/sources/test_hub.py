"""Pulls from a fake Hugging Face Hub, which `huggingface_hub` accepts as one."""

from contextlib import contextmanager

import pytest
from huggingface_hub import HfApi

from model_zoo.sources.hub import HubAccess
from model_zoo.sources.pull import pull
from model_zoo.sources.reference import parse_source
from model_zoo.store.store import Store
from runtime.errors import SourceError
from tests.loopback import Exchange, digest, serving
from tests.published import COMMIT, Hub

TOKEN = "hf_secret"


def fetch(text: str, store: Store, **environment: str):
    return pull(parse_source(text), store, environment=environment, first_pause_s=0.001)


@contextmanager
def hub(token: str | None = None, page: int = 1000, **repositories: dict[str, bytes]):
    """The Hub and the separate host of its files."""
    published: list[Hub] = []
    with serving(lambda exchange: published[0].cdn()(exchange)) as cdn:
        published.append(Hub(cdn.url, token=token, page=page))
        published[0].repositories |= {f"org/{name}": f for name, f in repositories.items()}
        with serving(published[0]) as server:
            yield server, cdn


REPOSITORY = {
    ".gitattributes": b"*.gguf filter=lfs",
    "README.md": b"# tiny",
    "tiny-Q4_K_M.gguf": b"GGUF four bits",
    "tiny-Q8_0.gguf": b"GGUF eight bits",
    "mmproj-tiny-f16.gguf": b"GGUF projector",
    "BF16/tiny-BF16-00001-of-00002.gguf": b"GGUF first",
    "BF16/tiny-BF16-00002-of-00002.gguf": b"GGUF second",
}


def test_huggingface_hub_accepts_the_fake_hub(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with hub(repo=REPOSITORY, page=3, token=TOKEN) as (server, _):
        api = HfApi(endpoint=server.url, token=TOKEN)
        listed = {entry.path: entry for entry in api.list_repo_tree("org/repo", recursive=True)}
        assert {path for path, entry in listed.items() if hasattr(entry, "lfs")} == set(REPOSITORY)
        lfs = listed["tiny-Q4_K_M.gguf"].lfs
        assert f"sha256:{lfs.sha256}" == digest(REPOSITORY["tiny-Q4_K_M.gguf"])
        assert api.model_info("org/repo", revision="main", expand=["sha"]).sha == COMMIT


def test_the_default_quantisation_and_projector_are_pulled(store) -> None:
    with hub(repo=REPOSITORY) as (server, _):
        model = fetch("hf://org/repo", store, HF_ENDPOINT=server.url)
    assert [path.read_bytes() for path in model.files] == [b"GGUF four bits"]
    assert [path.name for path in model.files] == ["tiny-Q4_K_M.gguf"]
    assert [path.read_bytes() for path in model.projectors] == [b"GGUF projector"]
    assert str(model.name) == "huggingface.co/org/repo:latest"
    assert model.manifest.annotations == {
        "org.opencontainers.image.source": "hf://org/repo",
        "org.opencontainers.image.revision": COMMIT,
    }


def test_parts_of_a_split_model_keep_their_names(store) -> None:
    with hub(repo=REPOSITORY, page=2) as (server, _):
        model = fetch("hf://org/repo:bf16@refs/pr/1", store, HF_ENDPOINT=server.url)
    assert {path.name: path.read_bytes() for path in model.files} == {
        "tiny-BF16-00001-of-00002.gguf": b"GGUF first",
        "tiny-BF16-00002-of-00002.gguf": b"GGUF second",
    }


@pytest.mark.parametrize("kept", ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_the_token_is_sent_to_the_hub_only(store, tmp_path, monkeypatch, kept) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    places = {"HF_TOKEN_PATH": "token", "HF_HOME": "token", "XDG_CACHE_HOME": "huggingface/token"}
    places["HOME"] = ".cache/huggingface/token"
    environment = {"HF_HOME": str(tmp_path), kept: TOKEN}
    if kept in places:
        (tmp_path / places[kept]).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / places[kept]).write_text(TOKEN + "\n")
        environment = {kept: str(tmp_path / "token" if kept == "HF_TOKEN_PATH" else tmp_path)}
    with hub(repo=REPOSITORY, token=TOKEN) as (server, cdn):
        fetch("hf://org/repo/tiny-Q8_0.gguf", store, HF_ENDPOINT=server.url, **environment)
        shown = {exchange.headers.get("authorization") for exchange in server.exchanges}
        assert shown == {f"Bearer {TOKEN}"}
        assert len(cdn.exchanges) == 2  # the model and its projector
        assert all("authorization" not in exchange.headers for exchange in cdn.exchanges)


def test_the_token_is_never_sent_over_an_unverified_connection(store) -> None:
    with hub(repo=REPOSITORY, token=TOKEN) as (server, cdn):
        environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN}
        with pytest.raises(SourceError, match="`insecure` is for registries only"):
            pull(parse_source("hf://org/repo"), store, environment=environment, insecure=True)
    assert server.exchanges == cdn.exchanges == []


def test_a_gated_repository_is_an_error_that_names_no_token(store, tmp_path) -> None:
    nowhere = {"HF_HOME": str(tmp_path)}
    with hub(repo=REPOSITORY, token=TOKEN) as (server, _):
        with pytest.raises(SourceError, match="HF_TOKEN is not set"):
            fetch("hf://org/repo", store, HF_ENDPOINT=server.url, **nowhere)
        with pytest.raises(SourceError, match="HF_TOKEN does not have access") as caught:
            fetch("hf://org/repo", store, HF_ENDPOINT=server.url, HF_TOKEN="hf_wrong")
    assert "hf_wrong" not in str(caught.value)
    with pytest.raises(SourceError, match="check HF_TOKEN") as caught:
        fetch("hf://org/repo", store, HF_TOKEN="hf\nbad")
    assert "bad" not in str(caught.value)


@pytest.mark.parametrize("source", ["hf://org/absent", "hf://org/repo@no-such-branch"])
def test_an_absent_repository_or_revision_is_an_error(store, tmp_path, source) -> None:
    with hub(repo=REPOSITORY) as (server, _), pytest.raises(SourceError, match="has no such"):
        fetch(source, store, HF_ENDPOINT=server.url, HF_HOME=str(tmp_path))


@pytest.mark.parametrize(
    ("target", "message"),
    [("https://example.com/", "another host"), ("?cursor=1", "more than 50 pages")],
)
def test_a_list_of_files_that_continues_elsewhere_or_never_ends_is_refused(
    store, tmp_path, target, message
) -> None:
    def answering(exchange: Exchange) -> None:
        if "/revision/" in exchange.path:
            exchange.json({"sha": COMMIT})
        else:
            exchange.json([], link=f'<{target}>; rel="next"')

    with serving(answering) as server, pytest.raises(SourceError, match=message):
        fetch("hf://org/repo", store, HF_ENDPOINT=server.url, HF_HOME=str(tmp_path))


@pytest.mark.parametrize(
    "tree",
    [
        {"error": "x"},
        [{"path": 5}],
        [{"type": "file", "path": "x-Q4_0.gguf", "lfs": {"oid": "../x", "size": 5}}],
        [{"type": "file", "path": "../x-Q4_0.gguf", "lfs": {"oid": "a" * 64, "size": 5}}],
        [{"type": "file", "path": "x-Q4_0.gguf", "lfs": {"oid": "a" * 64, "size": -5}}],
        [{"type": "file", "path": "x-Q4_0.gguf", "size": 5}],
    ],
)
def test_a_hostile_list_of_files_writes_nothing_anywhere(store, tmp_path, tree) -> None:
    def answering(exchange: Exchange) -> None:
        exchange.json({"sha": COMMIT} if "/revision/" in exchange.path else tree)

    with serving(answering) as server, pytest.raises(SourceError, match="hf://org/repo"):
        fetch("hf://org/repo", store, HF_ENDPOINT=server.url, HF_HOME=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_errors_do_not_contain_signed_addresses(store, tmp_path) -> None:
    with hub(repo=REPOSITORY) as (server, cdn):

        def refusing(exchange: Exchange) -> None:
            exchange.answer(status=403)

        with serving(refusing) as refuser:
            published = Hub(refuser.url)
            published.repositories["org/repo"] = REPOSITORY
            with serving(published) as server, pytest.raises(SourceError, match="403") as caught:
                fetch("hf://org/repo", store, HF_ENDPOINT=server.url, HF_HOME=str(tmp_path))
    assert "Signature" not in str(caught.value) and cdn.exchanges == []


def test_the_default_hub_is_encrypted() -> None:
    access = HubAccess.of({"HF_HOME": "/nowhere"})
    assert (str(access.endpoint), access.token) == ("https://huggingface.co", None)
