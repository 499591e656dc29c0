"""Families with SentencePiece vocabularies against their own tokenizers, for all files."""

from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import phi3_tokenizer
from transformers.tokenization_utils_base import generate_merges

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.messages import Message
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.chat_templates import encode_chat
from tests.parity.chat.random_texts import random_texts
from tests.reference_data import vocabulary_metadata
from tests.sentencepiece_models import (
    BYTE,
    CONTROL,
    USER_DEFINED,
    gemma,
    llama,
    metadata,
    processor,
)

FLAVOURS = ("ollama", "llama.cpp", "old llama.cpp")
GEMMAS = ("gemma", "gemma-embedding", "gemma2", "gemma3", "gemma3n")
MODELS = [*((gemma, name) for name in GEMMAS), (llama, "llama")]
every_flavour = pytest.mark.parametrize("flavour", FLAVOURS)
# Behind the first 32,000, which are Llama 2's, in the order of the family's tokenizer.json.
PHI3_ADDED = (
    *("<|endoftext|>", "<|assistant|>", "<|placeholder1|>", "<|placeholder2|>"),
    *("<|placeholder3|>", "<|placeholder4|>", "<|system|>", "<|end|>", "<|placeholder5|>"),
    *("<|placeholder6|>", "<|user|>"),
)
PHI3_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' }}"
)
TEXTS = [
    *(
        "user",
        " user",
        "  user",
        "user\n\nmodel",
        "a   b      c",
        "\n\n\n\n\n\nx",
        "def f():\n    x",
    ),
    *("<table><tr>one</tr></table>", "<s>no</s>", "<unused0>", "é 東京 👍", "", "▁", " \n "),
]


@every_flavour
@pytest.mark.parametrize(("model", "architecture"), MODELS, ids=[name for _, name in MODELS])
def test_texts_have_the_ids_of_sentencepiece(model, architecture: str, flavour: str) -> None:
    """In Gemma's, no space is put before them, and white space and tags are tokens of their own."""
    subject = load_tokenizer(metadata(model(), flavour=flavour), architecture=architecture)
    reference = processor(model())
    for text in [*TEXTS, *random_texts(21, 150)]:
        assert subject.encode(text) == reference.encode(text), text


@every_flavour
def test_gemma_conversations_are_joined_from_pieces_without_a_space(flavour: str) -> None:
    subject = load_tokenizer(metadata(gemma(), flavour=flavour), architecture="gemma3")
    turns = ["<bos>", "<start_of_turn>", "user\nhello</s>  there", "<end_of_turn>", "\n"]
    turns += ["<start_of_turn>", "model\n"]
    reference = processor(gemma())
    special = {"<bos>", "<start_of_turn>", "<end_of_turn>"}
    expected = [
        token
        for turn in turns
        for token in ([reference.piece_to_id(turn)] if turn in special else reference.encode(turn))
    ]
    assert subject.encode("".join(turns), parse_special=True) == expected
    ends = {reference.piece_to_id(text) for text in ("<eos>", "<end_of_turn>")}
    assert subject.end_tokens == ends  # and not the tag </s>


def test_gemma_of_a_checkpoint_without_tokenizer_model_is_merged_by_rank() -> None:
    """Ollama's converter then calls a vocabulary with marked spaces a byte-level one."""
    keys = metadata(gemma(), flavour="ollama")
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    types = keys["tokenizer.ggml.token_type"]
    ids = {text: id for id, text in enumerate(tokens)}
    first_byte = types.index(BYTE)
    merges = generate_merges(ids, dict(zip(tokens, scores, strict=True)), tokens[:first_byte])
    own = {
        "model": "gpt2",
        "merges": [" ".join(pair) for pair in merges],
        "token_type": [USER_DEFINED if id < first_byte else 1 for id in range(len(tokens))],
        "scores": [float(id) for id in range(len(tokens))],
    }
    keys |= {f"tokenizer.ggml.{key}": value for key, value in own.items()}
    subject = load_tokenizer(keys, architecture="gemma3n")
    reference = processor(gemma())
    for text in [*TEXTS, "the quick brown fox"]:
        assert subject.encode(text) == reference.encode(text), text
        assert subject.decode(subject.encode(text)) == text.replace("▁", " ")


@every_flavour
def test_llama_conversations_have_the_ids_of_the_llama_tokenizer_class(flavour: str) -> None:
    """Each piece behind a special token gets a space, be it a line break, unless it has one."""
    special = ("<|im_start|>", "<|im_end|>", "<tool>")
    kinds = (CONTROL, CONTROL, USER_DEFINED)
    keys = metadata(llama(), flavour=flavour, added=dict(zip(special, kinds, strict=True)))
    subject = load_tokenizer(keys, architecture="llama")
    reference = _llama_tokenizer(keys, special)
    for text in (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
        "<s>[INST] hello [/INST] there</s><s>[INST] what [/INST]",
        "<s> [INST] hello [/INST] there</s> [INST] what [/INST]",
        "hello</s>\n<|im_start|>\n\nuser  <tool>{}<tool> x",
    ):
        expected = reference.encode(text, add_special_tokens=False)
        assert subject.encode(text, parse_special=True) == expected, text


def test_text_behind_an_image_has_the_ids_that_it_has_behind_its_token() -> None:
    """As LLaVA's authors encode it: the texts before and behind an image by themselves."""
    keys = metadata(llama(), flavour="llama.cpp")
    subject = load_tokenizer(keys, architecture="llama")
    reference = _llama_tokenizer(keys, ("<image>",))
    image = reference.convert_tokens_to_ids("<image>")
    for before, behind in (("USER: ", "\nhello there"), ("", "hello"), ("what is it", " hello")):
        expected = reference.encode(f"{before}<image>{behind}", add_special_tokens=False)
        ours = subject.encode_parts([before, -1, behind])
        assert [image if token < 0 else token for token in ours] == expected


def test_the_tokens_of_real_llama_conversations_are_those_of_the_llama_tokenizer_class() -> None:
    keys = vocabulary_metadata("llama-spm")
    subject = load_tokenizer(keys, architecture="llama")
    reference = _llama_tokenizer(keys, ())
    for text in random_texts(23, 100):
        turns = f"[INST] {text} [/INST] {text}</s><s>[INST]{text}</s>\n{text}"
        expected = reference.encode(turns, add_special_tokens=False)
        assert subject.encode(turns, parse_special=True) == expected, turns


def _llama_tokenizer(keys: dict[str, Any], special: tuple[str, ...]) -> LlamaTokenizer:
    """As older software has it, with which the family's conversations were made."""
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    types = keys["tokenizer.ggml.token_type"]
    ids = {text: id for id, text in enumerate(tokens)}
    skipped = [text for text, kind in zip(tokens, types, strict=True) if kind != 1]
    merges = generate_merges(ids, dict(zip(tokens, scores, strict=True)), skipped)
    made = LlamaTokenizer(vocab=ids, merges=merges, legacy=True)
    made.add_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return made


@cache
def phi3_keys() -> dict[str, Any]:
    keys = dict(vocabulary_metadata("llama-spm"))
    count = len(PHI3_ADDED)
    for key, more in (
        ("tokens", PHI3_ADDED),
        ("scores", (-1000.0,) * count),
        ("token_type", (CONTROL,) * count),
    ):
        keys[f"tokenizer.ggml.{key}"] = [*keys[f"tokenizer.ggml.{key}"], *more]
    keys["tokenizer.ggml.eos_token_id"] = keys["tokenizer.ggml.tokens"].index("<|endoftext|>")
    return keys


@cache
def phi3() -> Tokenizer:
    return load_tokenizer(phi3_keys(), architecture="phi3")


@cache
def phi3_reference() -> PreTrainedTokenizerFast:
    """As `transformers` reads it from GGUF, with the flags of the family's tokenizer.json."""
    named = {
        key: phi3_keys()[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")
    }
    made = phi3_tokenizer(named)
    assert isinstance(made.backend_tokenizer.normalizer, normalizers.Sequence)
    plain = ("<unk>", "<s>", "<|endoftext|>")
    texts = (*plain, "</s>", *PHI3_ADDED[1:])
    made.backend_tokenizer.add_special_tokens(
        [AddedToken(t, rstrip=t not in plain, normalized=False, special=True) for t in texts]
    )
    return made


def test_phi3_chats_lose_the_white_space_behind_special_tokens() -> None:
    text = "<|user|>\nSYS\nHI<|end|>\n<|assistant|>\n"
    expected = [1, 32010, 317, 21554, 13, 17628, 32007, 32001]
    assert phi3().encode_document(text) == expected
    assert (
        phi3_reference().backend_tokenizer.encode(text, add_special_tokens=False).ids
        == expected[1:]
    )
    messages = [Message("user", "SYS\nHI")]
    assert encode_chat(ChatTemplate(PHI3_TEMPLATE), phi3(), messages) == expected


def test_phi3_texts_have_the_ids_of_its_own_tokenizer() -> None:
    reference = phi3_reference().backend_tokenizer
    spaces = (
        " ",
        "  ",
        "\n",
        " \n\t",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x85",
        "\x1c",
        "\u200b",
        "▁",
        "",
    )
    tokens = ("<s>", "</s>", "<unk>", *PHI3_ADDED)
    texts = random_texts(24, 200)
    for number, text in enumerate(texts):
        token, space = tokens[number % len(tokens)], spaces[number % len(spaces)]
        mixed = f"{text}{space}{token}{space}{text}{token}{space}<|end|>{space}"
        expected = reference.encode(mixed, add_special_tokens=False).ids
        assert phi3().encode(mixed, parse_special=True) == expected, mixed


def test_phi3_answers_come_back_as_the_tokens_that_they_were() -> None:
    """So that the next turn finds them in the prefix cache, whatever a client does to spaces."""
    template = ChatTemplate(PHI3_TEMPLATE)
    talk = [Message("user", "What is it?")]
    prompt = encode_chat(template, phi3(), talk)
    answer = phi3().encode("It is a fox,\n\nnot a dog.")
    text = phi3().decode(answer)
    for returned in (text, text.strip()):
        again = [*talk, Message("assistant", returned), Message("user", "Why?")]
        following = encode_chat(template, phi3(), again)
        assert following[: len(prompt) + len(answer)] == prompt + answer


def test_text_that_a_user_types_is_not_stripped_behind_what_only_looks_special() -> None:
    template = ChatTemplate(PHI3_TEMPLATE)
    content = "say <|end|>\n\n  twice"
    tokens = encode_chat(template, phi3(), [Message("user", content)])
    assert phi3().decode(tokens).strip() == content
