"""A tiny random Gemma 3 with a vision model, image tokens and a template that shows images."""

import tempfile
from pathlib import Path

from tokenizers import AddedToken
from transformers import Gemma3Config, Gemma3TextConfig, PreTrainedTokenizerFast, SiglipVisionConfig

from model_zoo.convert.convert_folder import convert
from tests.tiny_models import write_tiny_folder

IMAGE_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
ROWS = 9  # of an image's features
# Two line breaks before and behind them, the token of the beginning, and that of the end.
PLACES = ROWS + 6
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_vision_model(path: Path, *, flavour: str = "ollama", seed: int = 0) -> Path | None:
    """Write the model to `path`; the projector beside it where the flavour has one."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tiny"
        write_tiny_folder(folder, _config(), seed=seed, padding_rows=len(IMAGE_TOKENS))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer.add_tokens([AddedToken(text, special=True) for text in IMAGE_TOKENS])
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        convert(folder, path, type="f32", flavour=flavour)
    projector = path.with_name(f"mmproj-{path.name}")
    return projector if projector.exists() else None


def _config() -> Gemma3Config:
    text = Gemma3TextConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, query_pre_attn_scalar=16, max_position_embeddings=512,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        image_size=84, patch_size=14,
    )  # fmt: skip
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=ROWS)
