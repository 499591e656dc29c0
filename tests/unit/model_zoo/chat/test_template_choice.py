"""The choice of a file's chat template: its own, a named one, or that of its family."""

from typing import Any

import pytest

from model_zoo.chat import template_choice
from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat.template_choice import ChosenTemplate, choose_template
from model_zoo.tokenizers.tokenizer import load_tokenizer
from runtime.errors import ModelFileError
from tests.chat_templates import encode_chat
from tests.reference_data import reference_data
from tests.reply_transcripts import COMMAND_R
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import (
    CONTROL,
    NORMAL,
    byte_level_metadata,
    sentencepiece_metadata,
)

TURNS = [
    Message("user", "Who are you?"),
    Message("assistant", "A caravan."),
    Message("user", "Of what?"),
]
SYSTEM = Message("system", "Be brief.")
CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA = ("<start_of_turn>", "<end_of_turn>")
PHI3 = ("<|user|>", "<|assistant|>", "<|end|>", "<|system|>")


def choose(
    special: tuple[str, ...] = (), architecture: str = "qwen2", **keys: Any
) -> ChosenTemplate | None:
    metadata = byte_level_metadata(dict.fromkeys(special, CONTROL))
    named = {f"tokenizer.{name}": value for name, value in keys.items()}
    tokenizer = load_tokenizer(metadata, architecture=architecture)
    return choose_template({**metadata, **named}, tokenizer, architecture=architecture)


def test_the_files_own_template_comes_first() -> None:
    chosen = choose(CHATML, chat_template="own", chat_templates=["default"])
    assert chosen is not None and (chosen.template.source, chosen.origin) == ("own", "file")


def test_named_templates_are_available_and_default_is_used() -> None:
    keys = {
        "chat_templates": ["default", "tool_use", "absent"],
        "chat_template.default": "plain",
        "chat_template.tool_use": "with tools",
        "chat_template.unlisted": "never read",
    }
    chosen = choose(CHATML, **keys)
    assert chosen is not None
    assert (chosen.template.source, chosen.origin) == (
        "plain",
        "file (tokenizer.chat_template.default)",
    )
    sources = {name: template.source for name, template in chosen.alternatives.items()}
    assert sources == {"default": "plain", "tool_use": "with tools"}


def test_a_template_with_which_the_model_never_answers_is_not_used() -> None:
    keys = {
        "chat_template": "plain",
        "chat_templates": ["tool_use", "rag"],
        "chat_template.tool_use": COMMAND_R,
        "chat_template.rag": "with documents",
    }
    chosen = choose(CHATML, **keys)
    assert chosen is not None and set(chosen.alternatives) == {"rag"}


@pytest.mark.parametrize(
    "keys",
    [
        {"chat_templates": ["a"] * 65},
        {"chat_templates": [7]},
        {"chat_templates": "default"},
        {"chat_templates": ["default"], "chat_template.default": 7},
        {"chat_templates": ["default"], "chat_template.default": "{% if %}"},
        {"chat_template": 7},
    ],
)
def test_damaged_template_keys_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="template"):
        choose(CHATML, **keys)


def reference(name: str) -> ChatTemplate:
    source = reference_data(f"templates/{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def fallback(special: tuple[str, ...], family: str) -> ChatTemplate:
    chosen = choose(special)
    assert chosen is not None and chosen.origin == f"fallback ({family})"
    return ChatTemplate(chosen.template.source, bos_token="<s>", eos_token="</s>")


def test_the_chatml_fallback_matches_a_published_template() -> None:
    published = reference("Qwen-Qwen2.5-7B-Instruct")
    subject = fallback(CHATML, "chatml")
    messages = [SYSTEM, *TURNS]
    assert subject.render(messages) == published.render(messages)


def test_the_gemma_fallback_matches_the_published_template() -> None:
    subject = fallback(GEMMA, "gemma")
    assert subject.render(TURNS) == reference("google-gemma-2-2b-it").render(TURNS)
    assert "<start_of_turn>user\nBe brief.\n\nWho are you?<end_of_turn>" in subject.render(
        [SYSTEM, *TURNS]
    )


def test_the_llama3_fallback_matches_the_published_template_without_dates() -> None:
    subject = fallback(LLAMA3, "llama3")
    published = reference("meta-llama-Llama-3.1-8B-Instruct").render(TURNS)
    after_system = published.partition("<|eot_id|>")[2]
    assert subject.render(TURNS) == "<s>" + after_system


def test_the_mistral_fallback_matches_the_published_template() -> None:
    subject = fallback(("[INST]", "[/INST]"), "mistral")
    published = reference("mistralai-Mistral-Nemo-Instruct-2407").render(TURNS)
    assert subject.render(TURNS).replace(" ", "") == published.replace(" ", "")


def test_phi3_marks_turns_by_role() -> None:
    assert fallback(PHI3, "phi3").render([SYSTEM, TURNS[0]]) == (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nWho are you?<|end|>\n<|assistant|>\n"
    )


def without_tokens(
    name: str, architecture: str = "llama", *, special: tuple[str, ...] = ()
) -> ChosenTemplate | None:
    metadata = sentencepiece_metadata(dict.fromkeys(special, NORMAL))
    metadata |= {"general.name": name}
    tokenizer = load_tokenizer(metadata, architecture=architecture)
    return choose_template(metadata, tokenizer, architecture=architecture)


def test_llama2_is_recognised_by_its_name_and_matches_the_published_template() -> None:
    chosen = without_tokens("Llama-2-7b-Chat-hf")
    assert chosen is not None and chosen.origin == "fallback (llama2)"
    assert chosen.template.render([SYSTEM, *TURNS]) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWho are you? [/INST] A caravan. </s>"
        "<s>[INST] Of what? [/INST]"
    )


def test_old_mistral_is_recognised_by_its_name() -> None:
    chosen = without_tokens("Mistral-7B-Instruct-v0.1")
    assert chosen is not None and chosen.origin == "fallback (mistral)"
    assert chosen.template.render([TURNS[0]]) == "<s>[INST] Who are you? [/INST]"


def test_minicpm_is_recognised_by_its_architecture() -> None:
    """Its first files have no template; the texts around turns are no tokens of its vocabulary."""
    chosen = without_tokens("MiniCPM", "minicpm")
    assert chosen is not None and chosen.origin == "fallback (minicpm)"
    assert chosen.template.render([SYSTEM, *TURNS]) == (
        "Be brief.<用户>Who are you?<AI>A caravan.<用户>Of what?<AI>"
    )


@pytest.mark.parametrize(
    ("largest", "family", "question", "answer"),
    [
        (400, "baichuan", "<reserved_102>", "<reserved_103>"),
        (200, "baichuan2", "<reserved_106>", "<reserved_107>"),
    ],
)
def test_baichuan_is_recognised_by_its_name(
    monkeypatch: pytest.MonkeyPatch, largest: int, family: str, question: str, answer: str
) -> None:
    """The tokens of roles are those of the authors' `generation_config.json`; llama.cpp's converter
    gives them the type of ordinary ones."""
    monkeypatch.setattr(template_choice, "LARGEST_BAICHUAN_1", largest)
    special = tuple(f"<reserved_{number}>" for number in range(102, 108))
    chosen = without_tokens("Baichuan 13B Chat", "baichuan", special=special)
    assert chosen is not None and chosen.origin == f"fallback ({family})"
    assert chosen.template.render([SYSTEM, *TURNS]) == (
        f"Be brief.{question}Who are you?{answer}A caravan.{question}Of what?{answer}"
    )
    assert without_tokens("Baichuan 13B", "baichuan", special=special) is None


def test_xverse_is_recognised_by_its_name() -> None:
    chosen = without_tokens("XVERSE 13B Chat", "xverse")
    assert chosen is not None and chosen.origin == "fallback (xverse)"
    assert chosen.template.render([SYSTEM, *TURNS]) == (
        "Human: Be brief.\nHuman: Who are you?\n\nAssistant: A caravan.</s>"
        "Human: Of what?\n\nAssistant: "
    )
    assert without_tokens("XVERSE 13B", "xverse") is None


def test_deepseek_v32_thinks_about_the_last_question_unless_told_not_to() -> None:
    """As its authors' program writes turns."""
    chosen = choose(("<｜User｜>", "<｜Assistant｜>"), "deepseek32")
    assert chosen is not None and chosen.origin == "fallback (deepseek32)"
    template = ChatTemplate(chosen.template.source, bos_token="<s>", eos_token="</s>")
    turns = (
        "<s>Be brief.<｜User｜>Who are you?<｜Assistant｜></think>A caravan.</s>"
        "<｜User｜>Of what?<｜Assistant｜>"
    )
    assert template.render([SYSTEM, *TURNS]) == f"{turns}<think>"
    assert template.render([SYSTEM, *TURNS], enable_thinking=False) == f"{turns}</think>"
    assert choose((), "deepseek32") is None


@pytest.mark.parametrize("stated", [None, "vicuna"])
def test_moondream_is_recognised_by_its_name(stated: str | None) -> None:
    """Its files have no template, or only the name of one; the format is that of the authors."""
    metadata = byte_level_metadata({"<|endoftext|>": CONTROL}) | {"general.name": "moondream2"}
    metadata["tokenizer.ggml.bos_token_id"] = len(metadata["tokenizer.ggml.tokens"]) - 1
    if stated is not None:
        metadata["tokenizer.chat_template"] = stated
    tokenizer = load_tokenizer(metadata, architecture="phi2")
    chosen = choose_template(metadata, tokenizer, architecture="phi2")
    assert chosen is not None and chosen.origin == "fallback (moondream)"
    assert chosen.template.render([SYSTEM, *TURNS]) == (
        "<|endoftext|>Question: Be brief.\n\nWho are you?\n\nAnswer: A caravan.\n\n"
        "Question: Of what?\n\nAnswer:"
    )
    shown = Message("user", (ImagePart(b""), "What?"))
    assert chosen.template.render([shown]) == ("<|endoftext|><image>\n\nQuestion: What?\n\nAnswer:")
    phi = choose_template(metadata | {"general.name": "phi-2"}, tokenizer, architecture="phi2")
    assert phi is None
    if stated is None:
        assert choose_template(metadata, tokenizer, architecture="llama") is None


@pytest.mark.parametrize("architecture", ["deepseek2-ocr", "deepseekocr"])
def test_deepseek_ocr_gets_prompts_without_roles(architecture: str) -> None:
    """As the authors' code makes them; the checkpoint has no template."""
    metadata = byte_level_metadata({"<|endoftext|>": CONTROL})
    metadata["tokenizer.ggml.bos_token_id"] = len(metadata["tokenizer.ggml.tokens"]) - 1
    tokenizer = load_tokenizer(metadata, architecture=architecture)
    chosen = choose_template(metadata, tokenizer, architecture=architecture)
    assert chosen is not None and chosen.origin == "fallback (deepseekocr)"
    asked = [Message("user", " <image>\nFree OCR. ")]
    assert chosen.template.render(asked) == "<|endoftext|><image>\nFree OCR."


def test_base_models_get_no_template() -> None:
    assert choose(()) is None and choose(("<|endoftext|>",)) is None
    assert without_tokens("Llama-2-7b-hf") is None


@pytest.mark.parametrize("special", [CHATML, LLAMA3, GEMMA, PHI3])
def test_typed_control_tokens_stay_text_in_fallbacks(special: tuple[str, ...]) -> None:
    metadata = byte_level_metadata(dict.fromkeys(special, CONTROL))
    tokenizer = load_tokenizer(metadata, architecture="qwen2")
    chosen = choose(special)
    assert chosen is not None

    def specials(text: str) -> list[int]:
        tokens = encode_chat(chosen.template, tokenizer, [SYSTEM, Message("user", text)])
        return [token for token in tokens if token in tokenizer.vocabulary.control.values()]

    assert specials("".join(special)) == specials("hello")
