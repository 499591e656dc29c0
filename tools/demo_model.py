"""The demo model: sizes, tokens, training rows, file.

It is a small Gemma 3 with vision at 96 pixels, its own vocabulary and ChatML turns; images are
processed as `transformers` does for Gemma 3.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from model_zoo.convert.convert_folder import convert
from tools import demo_dialogues
from tools.demo_picture_dialogues import Message, training_dialogues
from tools.demo_pictures import Picture, draw

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, START, END)
VOCABULARY = 1024
CONTEXT_TOKENS = 1024
IMAGE_SIDE, PATCH_SIDE = 96, 8
ROWS_PER_IMAGE = 9  # one for each place, pooled from 4 x 4 of the 144 patches
START_OF_IMAGE, END_OF_IMAGE, PLACE = IMAGE_TOKENS = (
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
IMAGE = f"\n\n{START_OF_IMAGE}{PLACE * ROWS_PER_IMAGE}{END_OF_IMAGE}\n\n"
UNSCORED = -100
# The pre-tokenizer "qwen2"; its \p{N} makes every digit a separate token.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% elif content %}"
    "{% for part in content %}{% if part['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ text(messages[0]['content']) + '\\n\\n' }}"
    "{% endif %}{{ '# Tools' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + text(message['content']) }}"
    "{% for call in message['tool_calls'] or [] %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": ' }}{{ call['function']['name'] | tojson }}"
    "{{ ', \"arguments\": ' }}{{ call['function']['arguments'] | tojson }}"
    "{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def architecture(tokenizer: Tokenizer) -> Gemma3Config:
    """The model's configuration. Half of the file is the text model in blocks of 32 weights, half
    the vision model in F16."""
    text = Gemma3TextConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=CONTEXT_TOKENS,
        sliding_window=CONTEXT_TOKENS // 2,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    vision = SiglipVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        image_size=IMAGE_SIDE,
        patch_size=PATCH_SIDE,
        vision_use_head=False,
    )
    start, end, place = (tokenizer.token_to_id(token) for token in IMAGE_TOKENS)
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=ROWS_PER_IMAGE,
        boi_token_index=start,
        eoi_token_index=end,
        image_token_index=place,
    )


def new_model(tokenizer: Tokenizer) -> Gemma3ForConditionalGeneration:
    """A model with random weights, also where `transformers` has zeros, which would block gradients
    to the vision model."""
    model = Gemma3ForConditionalGeneration(architecture(tokenizer))
    projection = model.model.multi_modal_projector.mm_input_projection_weight
    torch.nn.init.normal_(projection, std=projection.shape[0] ** -0.5)
    return model


def train_tokenizer(seed: int) -> Tokenizer:
    """Trains byte-level BPE on both kinds of dialogue.

    Only ASCII characters are merged: others remain several tokens long, so that streams of this
    model contain characters that span tokens.
    """
    tokenizer = byte_level_tokenizer()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(IMAGE_TOKENS),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    pictures = islice(training_dialogues(seed), 6000)
    texts = islice(demo_dialogues.training_dialogues(seed), 8000)
    turns = (turn for dialogues in (pictures, texts) for dialogue in dialogues for turn in dialogue)
    shown = (f"{turn['role']}\n{turn['content']}".encode("ascii", "ignore") for turn in turns)
    tokenizer.train_from_iterator((text.decode() for text in shown), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in IMAGE_TOKENS])
    return tokenizer


def byte_level_tokenizer(
    tokens: Sequence[str] = (), merges: Sequence[tuple[str, str]] = ()
) -> Tokenizer:
    """The tokenizer with a vocabulary, whose token ids are indices of `tokens`; without one, for
    training."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, list(merges)) if tokens else BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    known = CONTROL_TOKENS + IMAGE_TOKENS if tokens else CONTROL_TOKENS
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in known])
    return tokenizer


def render(messages: Iterable[Mapping[str, str]], *, reply: bool) -> str:
    """The same text as the chat template renders, without the cost of Jinja; `reply` opens the
    answer."""
    turns = (f"{START}{turn['role']}\n{turn['content']}{END}\n" for turn in messages)
    return "".join(turns) + (f"{START}assistant\n" if reply else "")


def render_with_pictures(messages: Sequence[Message], *, reply: bool) -> str:
    """Like `render`, with the placeholder tokens of each image."""
    return render(
        [{"role": message["role"], "content": _with_images(message)} for message in messages],
        reply=reply,
    )


def _with_images(message: Message) -> str:
    images = IMAGE * len(message.get("pictures", ()))
    text = message["content"]
    return text + images if message.get("text_first") else images + text


def batch(dialogues: Sequence[Sequence[Message]], tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """The arguments of the model's `forward` for one dialogue per row.

    input_ids, labels, attention_mask, token_type_ids [rows, tokens], padded on the right; labels
    score only the replies. pixel_values [images, 3, side, side] in the order of the rows.
    """
    rows = [
        tokenizer.encode(render_with_pictures(messages, reply=False)).ids for messages in dialogues
    ]
    header = tokenizer.encode(f"{START}assistant\n").ids
    [end], [place], [padding] = (tokenizer.encode(text).ids for text in (END, PLACE, END_OF_TEXT))
    width = max(map(len, rows))
    ids = torch.tensor([row + [padding] * (width - len(row)) for row in rows])
    filled = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = [scored(row, header, end) + [UNSCORED] * (width - len(row)) for row in rows]
    shown = shown_in(dialogues)
    inputs = {"input_ids": ids, "labels": torch.tensor(labels), "attention_mask": filled}
    if shown:
        inputs["pixel_values"] = torch.stack([pixels(picture) for picture in shown])
    return inputs | {"token_type_ids": torch.eq(ids, place).long()}


def shown_in(dialogues: Iterable[Sequence[Message]]) -> list[Picture]:
    return [
        picture
        for messages in dialogues
        for message in messages
        for picture in message.get("pictures", ())
    ]


def pixels(picture: Picture) -> torch.Tensor:
    """[3, side, side] from -1 to 1, the same as from Gemma 3's processor."""
    values = np.asarray(draw(picture, IMAGE_SIDE), np.float32) / 127.5 - 1
    return torch.from_numpy(values).permute(2, 0, 1)


def scored(ids: list[int], opener: list[int], end: int) -> list[int]:
    """Labels that score the tokens after each opener, including the token that ends the reply."""
    labels = [UNSCORED] * len(ids)
    replying = False
    for position, token in enumerate(ids):
        if replying:
            labels[position] = token
            replying = token != end
        else:
            replying = ids[max(0, position + 1 - len(opener)) : position + 1] == opener
    return labels


def write_vision_model(
    path: Path, model: Gemma3ForConditionalGeneration, tokenizer: Tokenizer
) -> None:
    """Writes a GGUF file with text model and vision model, in Q8_0 where possible."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "caravan-demo"
        model.save_pretrained(folder)
        saved = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END, pad_token=END_OF_TEXT
        )
        saved.chat_template = CHAT_TEMPLATE
        saved.save_pretrained(folder)
        (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
        convert(folder, path, type="q8_0", flavour="ollama")
