"""Sources as text, and which files of a Hub repository a source means."""

import os
from pathlib import Path

import pytest

from model_zoo.sources.hub_choice import HubFile, choose, label_of
from model_zoo.sources.reference import HubSource, PathSource, RegistrySource, parse_source
from model_zoo.store.model_name import ModelName
from runtime.errors import SourceError


def files(*paths: str) -> list[HubFile]:
    return [HubFile(path, 100, "0" * 64) for path in paths]


def chosen(source: str, *paths: str) -> tuple[list[str], str | None]:
    parsed = parse_source(source)
    assert isinstance(parsed, HubSource)
    model, projector = choose(parsed, files(*paths))
    return [file.path for file in model], projector.path if projector else None


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("models/demo.gguf", PathSource(Path("models/demo.gguf"))),
        ("hf://org/repo", HubSource("org", "repo")),
        ("hf://org/repo:latest", HubSource("org", "repo")),
        ("hf://org/repo:q5_k_m", HubSource("org", "repo", quantization="Q5_K_M")),
        ("hf://org/repo:Q8_0@v1.0", HubSource("org", "repo", quantization="Q8_0", revision="v1.0")),
        ("hf://org/repo@refs/pr/1", HubSource("org", "repo", revision="refs/pr/1")),
        ("hf://org/repo/a/b.gguf@main", HubSource("org", "repo", file="a/b.gguf", revision="main")),
    ],
)
def test_sources_are_parsed(text, source) -> None:
    assert parse_source(text) == source
    if not isinstance(source, PathSource):
        assert parse_source(str(source)) == source


def test_a_registry_source_is_a_name() -> None:
    source = parse_source("ollama://someone/llama3:8b")
    assert isinstance(source, RegistrySource)
    assert source.name.parts == ("registry.ollama.ai", "someone", "llama3", "8b")
    assert str(source) == "ollama://someone/llama3:8b"


def test_one_part_before_a_name_is_its_namespace_even_with_a_dot() -> None:
    host = "registry.ollama.ai"
    assert ModelName.parse("some.one/llama3").parts == (host, "some.one", "llama3", "latest")
    assert ModelName.parse("a.host/some.one/x:1").parts == ("a.host", "some.one", "x", "1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hf://",
        "hf://org",
        "hf://org/",
        "hf://../repo",
        "hf://org/..",
        "hf://org/repo/../../x.gguf",
        "hf://org/repo/.hidden.gguf",
        "hf://org/repo//x.gguf",
        "hf://org/repo/x.safetensors",
        "hf://org/repo/x.gguf?download=true",
        "hf://org/repo:Q4/x.gguf",
        "hf://org/repo:Q 4",
        "hf://org/repo@",
        "hf://org/repo@../main",
        "hf://user:secret@host/x",
        "ollama://",
        "ollama://a/b/c/d",
        "ollama://../x",
        "ollama://x:",
        "ollama://x:a/b",
        "ollama://host:port/a/b",
        "https://huggingface.co/org/repo",
        "s3://bucket/x.gguf",
        "x\n.gguf",
        "a" * 600,
    ],
)
def test_invalid_sources_are_refused(text) -> None:
    with pytest.raises(SourceError) as caught:
        parse_source(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800


def test_a_path_that_is_not_utf_8_is_refused_as_such() -> None:
    with pytest.raises(SourceError, match=r"mod\\udce8le.gguf' is not UTF-8"):
        parse_source(os.fsdecode(b"./mod\xe8le.gguf"))


def test_the_error_for_a_page_of_the_hub_has_the_right_form() -> None:
    with pytest.raises(SourceError, match="write hf://org/repo"):
        parse_source("https://huggingface.co/org/repo")


def test_different_sources_have_different_names_in_the_store() -> None:
    texts = (
        "hf://org/repo hf://org/repo@v1 hf://org/repo:Q4_K_M hf://org/repo:Q4_K_M@v1 "
        "hf://org/repo/m.gguf hf://org/repo/a/m.gguf hf://org/repo/b/m.gguf hf://org/repo/-m.gguf "
        "hf://org/repo/é.gguf hf://org/repo@v1-a hf://org/repo@v1/a hf://org/other ollama://repo"
    ).split()
    names = {parse_source(text).name for text in texts}
    assert len(names) == len(texts)
    assert str(parse_source("hf://org/repo:Q4_K_M").name) == "huggingface.co/org/repo:Q4_K_M"


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("llama-2-7b-chat.Q4_K_S.gguf", "Q4_K_S"),
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("UD-Q4_K_XL/Qwen3-235B-A22B-UD-Q4_K_XL-00001-of-00003.gguf", "UD-Q4_K_XL"),
        ("Q6_K/model-00001-of-00003.gguf", "Q6_K"),
        ("Model.i1-IQ3_XXS.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("BitNet-TQ2_0.gguf", "TQ2_0"),
        ("mmproj-model-fp16.gguf", "F16"),
        ("Model-BF16.gguf", "BF16"),
        ("Model-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("Model-Q8_0-v2.gguf", "Q8_0"),
        ("Model_Q5_K_M_imat.gguf", "Q5_K_M"),
        ("Qwen3-8B.gguf", None),
        ("ggml-model.gguf", None),
    ],
)
def test_the_quantisation_is_parsed_from_the_name(path, label) -> None:
    stem = path.partition("-00001-of-")[0]
    assert label_of(stem) == label


BARTOWSKI = [
    f"Llama-3.2-1B-Instruct-{label}.gguf"
    for label in "f16 IQ3_M IQ4_XS Q3_K_XL Q4_0 Q4_0_4_4 Q4_K_L Q4_K_M Q4_K_S Q6_K Q8_0".split()
]


def test_a_good_four_bit_type_is_the_default() -> None:
    assert chosen("hf://o/r", *BARTOWSKI) == (["Llama-3.2-1B-Instruct-Q4_K_M.gguf"], None)


def test_a_quantisation_is_found_in_any_case() -> None:
    assert chosen("hf://o/r:q4_k_s", *BARTOWSKI)[0] == ["Llama-3.2-1B-Instruct-Q4_K_S.gguf"]
    assert chosen("hf://o/r:F16", *BARTOWSKI)[0] == ["Llama-3.2-1B-Instruct-f16.gguf"]


def test_an_absent_quantisation_is_an_error_that_lists_the_others() -> None:
    with pytest.raises(SourceError, match=r"has no Q5_K_M; it has F16, IQ3_M, .*Q8_0\."):
        chosen("hf://o/r:Q5_K_M", *BARTOWSKI)


@pytest.mark.parametrize(
    ("labels", "best"),
    [
        ("F16 Q8_0", "Q8_0"),
        ("Q2_K Q3_K_M F32", "Q3_K_M"),
        ("BF16 Q2_K", "BF16"),
        ("Q5_K_M Q4_0", "Q4_0"),
        ("UD-Q4_K_XL Q4_K_S", "UD-Q4_K_XL"),
        ("UD-Q4_K_M Q4_K_M", "Q4_K_M"),
        ("Q4_0_4_4", "Q4_0_4_4"),
    ],
)
def test_without_the_default_the_nearest_quantisation_is_chosen(labels, best) -> None:
    assert chosen("hf://o/r", *(f"m-{label}.gguf" for label in labels.split()))[0] == [
        f"m-{best}.gguf"
    ]


def test_dynamic_quantisations_are_found_without_their_prefix() -> None:
    assert chosen("hf://o/r:Q2_K_XL", "m-UD-Q2_K_XL.gguf", "m-Q2_K.gguf")[0] == [
        "m-UD-Q2_K_XL.gguf"
    ]


def parts(stem: str, count: int) -> list[str]:
    return [f"{stem}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]


def test_all_parts_of_a_split_file_are_chosen_in_order() -> None:
    split = parts("UD-Q4_K_XL/big-UD-Q4_K_XL", 12)
    assert chosen("hf://o/r", *reversed(split), "big-Q8_0.gguf")[0] == split
    assert chosen(f"hf://o/r/{split[4]}", *split)[0] == split


def test_a_whole_file_is_preferred_to_parts() -> None:
    assert chosen("hf://o/r:Q8_0", *parts("m-Q8_0", 2), "m-Q8_0.gguf")[0] == ["m-Q8_0.gguf"]


def test_a_missing_part_is_an_error_before_the_download() -> None:
    first, second, third = parts("m-Q8_0", 3)
    with pytest.raises(SourceError, match=rf"has 3 parts, and {second} is missing"):
        chosen("hf://o/r", first, third)


def test_an_ambiguous_source_is_an_error_that_lists_the_files() -> None:
    with pytest.raises(SourceError, match=r"a-Q4_K_M\.gguf, b-Q4_K_M\.gguf; name one"):
        chosen("hf://o/r", "a-Q4_K_M.gguf", "b-Q4_K_M.gguf")
    assert chosen("hf://o/r/b-Q4_K_M.gguf", "a-Q4_K_M.gguf", "b-Q4_K_M.gguf")[0] == [
        "b-Q4_K_M.gguf"
    ]


def test_a_repository_without_gguf_is_an_error() -> None:
    with pytest.raises(SourceError, match="no GGUF model"):
        chosen("hf://o/r", "model.safetensors", "mmproj-F16.gguf", "imatrix.gguf")


@pytest.mark.parametrize(
    ("present", "taken"),
    [
        ("BF16 F16 F32", "F16"),
        ("F32 BF16 Q8_0", "BF16"),
        ("F32 Q8_0", "Q8_0"),
        ("F32", "F32"),
    ],
)
def test_the_most_precise_projector_is_chosen(present, taken) -> None:
    projectors = [f"mmproj-{label}.gguf" for label in present.split()]
    assert chosen("hf://o/r", "m-Q4_K_M.gguf", *projectors) == (
        ["m-Q4_K_M.gguf"],
        f"mmproj-{taken}.gguf",
    )


def test_the_projector_with_the_models_name_is_chosen() -> None:
    repository = ["a-4b-Q4_K_M.gguf", "b-4b-Q8_0.gguf"]
    repository += ["mmproj-a-4b-f16.gguf", "mmproj-b-4b-Q8_0.gguf"]
    assert chosen("hf://o/r:Q8_0", *repository)[1] == "mmproj-b-4b-Q8_0.gguf"
    assert chosen("hf://o/r:Q4_K_M", *repository)[1] == "mmproj-a-4b-f16.gguf"


def test_a_projector_belongs_to_models_in_its_folder_and_below() -> None:
    assert chosen("hf://o/r", "Q4_K_M/m-Q4_K_M.gguf", "mmproj-F16.gguf")[1] == "mmproj-F16.gguf"
    assert chosen("hf://o/r", "Q4_K_M/m-Q4_K_M.gguf", "other/mmproj-F16.gguf")[1] is None


def test_a_projector_can_be_named() -> None:
    repository = ("m-Q4_K_M.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf")
    assert chosen("hf://o/r/mmproj-F32.gguf", *repository) == (["mmproj-F32.gguf"], None)


def test_an_absent_file_is_an_error_that_lists_the_others() -> None:
    with pytest.raises(SourceError, match=r"no such file; it has m-Q4_K_M\.gguf"):
        chosen("hf://o/r/x.gguf", "m-Q4_K_M.gguf")
