"""Templates that write images, rendered as by their processors in `transformers`."""

import importlib
import re
from dataclasses import replace

import numpy as np
import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.messages import Message
from tests.chat_templates import template_source
from tests.parity.vision.placeholder_families import BOS, CONVERSATIONS, FAMILIES, model_of, places
from tests.vision_prompts import as_transformers, library_tokenizer, pictures

MARKER = re.compile(r"<\|[^<>|\s]+\|>|\[/?[A-Z_]+\]|<end_of_utterance>")
# All images of a turn come before its texts; content must be a list.
IMAGES_FIRST = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}"
    "{% endfor %}{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# Content is a text or a list; each image is on a line of its own.
ON_LINES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def source_of(family: str) -> str:
    models = "transformers.models"
    match family:
        case "gemma4":
            return template_source("google-gemma-4-31B-it")
        case "llama4":
            return importlib.import_module(f"{models}.llama4.processing_llama4").chat_template
        case "idefics3":
            module = importlib.import_module(f"{models}.smolvlm.processing_smolvlm")
            return module.DEFAULT_CHAT_TEMPLATE
        case "llava":
            return IMAGES_FIRST
        case "internvl":
            return ON_LINES
    return template_source("Mistral-Small-3.2-24B-Instruct-2506")


@pytest.mark.parametrize("name", ["pixtral", "llama4", "gemma4", "llava", "idefics3", "internvl"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_templates_show_images_as_in_transformers(name: str, conversation: str) -> None:
    family, source = FAMILIES[name], source_of(name)
    written = set(MARKER.findall(source)) - {BOS, *family.reserved}
    special = tuple(sorted(written))
    processor = family.theirs(
        library_tokenizer((BOS, *family.reserved, *special), bos_token=BOS, **family.named)
    )
    processor.chat_template = source
    chat = as_transformers(CONVERSATIONS[conversation])
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    images = pictures(CONVERSATIONS[conversation]) or None
    made = processor(text=[text], images=images, add_special_tokens=False)
    model = model_of(family, source, special, bos_token=BOS, eos_token="<|im_end|>")
    messages = CONVERSATIONS[conversation]
    # These render a text and a list of one text differently.
    if name in ("pixtral", "llama4", "gemma4"):
        messages = [replace(m, content=m.content if m.images else (m.content,)) for m in messages]
    prompt = model.prepare(messages)
    ids = np.asarray(made["input_ids"][0]).tolist()
    assert list(prompt.tokens) == ids
    place = model.tokenizer.id_of(family.place)
    assert places(prompt) == [index for index, token in enumerate(ids) if token == place]


@pytest.mark.parametrize("name", ["llava", "idefics3", "internvl"])
def test_raw_prompts_have_the_placeholder_tokens_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    model = model_of(family)
    tokenizer = library_tokenizer((BOS, *family.reserved), bos_token=BOS, **family.named)
    image = CONVERSATIONS["an image alone"][0].images[0]
    marker = model.vision.placeholders.texts.marker
    made = family.theirs(tokenizer)(
        text=[f"USER: {marker}\nhello\n\n{marker}"],
        images=pictures(CONVERSATIONS["an image alone"]) * 2,
    )
    prompt = model.prepare_text("USER: [img-0]\nhello\n\n[img-1]", (image, image))
    assert list(prompt.tokens) == np.asarray(made["input_ids"][0]).tolist()


@pytest.mark.parametrize(
    ("name", "alone"), [("llava", True), ("idefics3", True), ("internvl", False)]
)
def test_texts_are_passed_as_lists_to_templates_that_need_lists(name: str, alone: bool) -> None:
    template = ChatTemplate(source_of(name))
    assert template.form.parts is alone
    messages = [Message("user", "hello"), Message("assistant", "there"), Message("user", "again")]
    rendered = template.render(messages)
    assert all(message.text in rendered for message in messages)
