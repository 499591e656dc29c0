"""Chooses the chat template of a model file: its own, one of its named ones, or its family's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.formats.reply_format import has_answers
from model_zoo.chat.sandbox.frames import RenderLimits
from model_zoo.chat.sandbox.renderer import start_server
from model_zoo.tokenizers.pairs import PAIR_TEMPLATE
from model_zoo.tokenizers.prefix_space import LARGEST_BAICHUAN_1
from model_zoo.tokenizers.tokenizer import Tokenizer
from model_zoo.tokenizers.vocabulary import optional_text, required_array
from runtime.errors import ModelFileError

MAX_NAMED = 8  # each named template needs a process
TOOL_USE = "tool_use"  # the name of a template for conversations with tools
_KEY, _NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"
_CONTENT = "{{ message['content'] | trim }}"
_SYSTEM_IN_FIRST_TURN = (
    "{% set first = '' %}{% if messages and messages[0]['role'] == 'system' %}"
    "{% set first = (messages[0]['content'] | trim) ~ '\\n\\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
)
_OCR = ("deepseek2-ocr", "deepseekocr")
# Turns of Baichuan, which begin with a token that names the role.
_BAICHUAN = (
    "{% for message in messages %}{{ 'QUESTION' if message['role'] == 'user' else "
    "'ANSWER' if message['role'] == 'assistant' else '' }}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}ANSWER{% endif %}"
)
# Names of llama.cpp's own templates that files state instead of one: those of Moondream and RWKV.
_BARE_NAMES = ("vicuna", "rwkv-world")
_FALLBACKS: Mapping[str, str] = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        + _CONTENT
        + "<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}" + _SYSTEM_IN_FIRST_TURN + "{% for message in messages %}<start_of_turn>"
        "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
        "{{ first if loop.first else '' }}" + _CONTENT + "<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "baichuan": _BAICHUAN.replace("QUESTION", "<reserved_102>").replace("ANSWER", "<reserved_103>"),
    "baichuan2": _BAICHUAN.replace("QUESTION", "<reserved_106>").replace(
        "ANSWER", "<reserved_107>"
    ),
    "xverse": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ message['content'] ~ eos_token }}{% else %}Human: {{ message['content'] }}\n"
        "{{ '\n' ~ 'Assistant: ' if message['role'] == 'user' }}{% endif %}{% endfor %}"
    ),
    "phi3": (
        "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "minicpm": (
        "{% for message in messages %}{{ '<用户>' if message['role'] == 'user' else '' }}"
        + _CONTENT
        + "{{ '<AI>' if message['role'] == 'user' else '' }}{% endfor %}"
    ),
    # DeepSeek V3.2, whose checkpoint has a program instead of a template. Tools are described in
    # general terms, because the description for which it was trained is part of that program.
    "deepseek32": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "<｜User｜>{{ message['content'] }}<｜Assistant｜>"
        "{% if loop.last and (enable_thinking is not defined or enable_thinking) %}<think>"
        "{% else %}</think>{% endif %}{% else %}{{ message['content'] }}"
        "{{ eos_token if message['role'] == 'assistant' }}{% endif %}{% endfor %}"
    ),
    # DeepSeek-OCR, whose prompts have no roles.
    "deepseekocr": ("{{ bos_token }}{% for message in messages %}" + _CONTENT + "{% endfor %}"),
    "moondream": (
        "{{ bos_token }}" + _SYSTEM_IN_FIRST_TURN + "{% for message in messages %}"
        "{% set content = message['content'] %}"
        "{% if message['role'] == 'assistant' %} " + _CONTENT + "\n\n"
        "{% else %}{% if content is not string %}"
        "{% for part in content if part['type'] == 'image' %}{{ '<image>\n\n' }}{% endfor %}"
        "{% set content = content | selectattr('type', 'equalto', 'text') | map(attribute='text')"
        " | join %}{% endif %}"
        "Question: {{ first if loop.first else '' }}{{ content | trim }}\n\nAnswer:{% endif %}"
        "{% endfor %}"
    ),
    "rwkv": (
        "{% for message in messages %}"
        "{{ {'user': 'User', 'assistant': 'Assistant'}.get(message['role'], 'System') }}: "
        + _CONTENT
        + "\n\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}" + _SYSTEM_IN_FIRST_TURN + "{% for message in messages %}"
        "{% if message['role'] == 'assistant' %} " + _CONTENT + "{{ eos_token }}"
        "{% else %}[INST] {{ first if loop.first else '' }}" + _CONTENT + " [/INST]{% endif %}"
        "{% endfor %}"
    ),
    "llama2": (
        "{% set first = '' %}{% if messages and messages[0]['role'] == 'system' %}"
        "{% set first = '<<SYS>>\\n' ~ (messages[0]['content'] | trim) ~ '\\n<</SYS>>\\n\\n' %}"
        "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}"
        "{% if message['role'] == 'assistant' %} " + _CONTENT + " {{ eos_token }}"
        "{% else %}{{ bos_token }}[INST] {{ first if loop.first else '' }}"
        + _CONTENT
        + " [/INST]{% endif %}{% endfor %}"
    ),
}
# Control tokens that identify a family; the first family that matches is used.
_BY_TOKENS: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "mistral": ("[INST]", "[/INST]"),
}


@dataclass(frozen=True, slots=True)
class ChosenTemplate:
    """`origin`: where the template comes from; `alternatives`: the file's named templates, except
    those with which the model never answers in text; `for_tools`: whether the file has a template
    for tools, even one that is not an alternative."""

    template: ChatTemplate
    origin: str
    alternatives: Mapping[str, ChatTemplate]
    for_tools: bool


def expect_template(metadata: Mapping[str, Any]) -> None:
    """Start the process that compiles templates, if the file has one, without waiting. To be called
    some time before `choose_template`."""
    if _KEY in metadata:
        start_server()


def choose_template(
    metadata: Mapping[str, Any], tokenizer: Tokenizer, *, architecture: str
) -> ChosenTemplate | None:
    """The file's template, else its named template `default`, else that of its family, else None.

    A base model, whose vocabulary has no tokens for turns, has none: it only completes text.
    """
    named = _named_sources(metadata)
    source, origin = optional_text(metadata, _KEY), "file"
    if not source and "default" in named:
        source, origin = named["default"], f"file ({_KEY}.default)"
    if not source or source in _BARE_NAMES:
        family = _family(tokenizer, metadata, architecture)
        if family is None:
            return None
        source, origin = _FALLBACKS[family], f"fallback ({family})"
    alternatives = {
        name: template_of(text, tokenizer) for name, text in named.items() if has_answers(text)
    }
    return ChosenTemplate(
        template_of(source, tokenizer), origin, alternatives, for_tools=TOOL_USE in named
    )


def _named_sources(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, for the names that the file lists, except that for pairs, which is not
    written in Jinja."""
    if _NAMES not in metadata:
        return {}
    names = required_array(metadata, _NAMES)
    if len(names) > MAX_NAMED or not all(isinstance(name, str) for name in names):
        raise ModelFileError(f"`{_NAMES}` must list at most {MAX_NAMED} names.")
    sources = {name: optional_text(metadata, f"{_KEY}.{name}") for name in names}
    sources.pop(PAIR_TEMPLATE, None)
    return {name: source for name, source in sources.items() if source}


def _family(tokenizer: Tokenizer, metadata: Mapping[str, Any], architecture: str) -> str | None:
    control = {**tokenizer.vocabulary.control, **tokenizer.vocabulary.user_defined}
    for family, texts in _BY_TOKENS.items():
        if all(text in control for text in texts):
            return family
    name = str(metadata.get("general.name", "")).lower()
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    if metadata.get("tokenizer.ggml.model") == "rwkv":
        return "rwkv"
    if architecture == "deepseek32" and "<｜User｜>" in control:
        return "deepseek32"
    if architecture in _OCR:
        return "deepseekocr"
    if architecture == "minicpm" and sentencepiece:
        return "minicpm"  # MiniCPM 1 and 2, of which only chat models were published as files
    if architecture == "phi2" and "moondream" in name:
        return "moondream"
    chats = sentencepiece and "chat" in name
    if architecture == "baichuan" and chats and "<reserved_102>" in control:
        small = len(tokenizer.vocabulary.tokens) <= LARGEST_BAICHUAN_1
        return "baichuan" if small else "baichuan2"
    if architecture == "xverse" and chats:
        return "xverse"
    if architecture == "llama" and sentencepiece and ("chat" in name or "instruct" in name):
        return "mistral" if "mistral" in name or "mixtral" in name else "llama2"
    return None


def template_of(
    source: str, tokenizer: Tokenizer, *, most: RenderLimits | None = None
) -> ChatTemplate:
    """The template with the model's BOS and EOS texts; ModelFileError if it does not compile.
    `most`: upper limits of each rendering."""
    texts = tokenizer.vocabulary.tokens
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return ChatTemplate(
        source,
        bos_token="" if bos is None else texts[bos],
        eos_token="" if eos is None else texts[eos],
        most=most,
    )
