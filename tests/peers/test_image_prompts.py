"""Prompts with images in llama.cpp: placeholders, and positions behind images."""

from io import BytesIO

import pytest
from PIL import Image

from model_zoo.chat.messages import ImagePart, Message
from tests.families.vision_agreement import fed
from tests.families.vision_families import VISION_MODELS
from tests.peers.llama_cpp_vision import IMAGE, Picture, their_next_token
from tests.peers.test_towers import picture

# Its towers compute in half precision.
NEAR_NATS = 0.05
# It knows windows only in those of EXAONE's text models that have 64 layers.
CHANGES = {
    "exaone45": {"text": {"sliding_window": None, "layer_types": ["full_attention"] * 2}},
}
# Height and width in squares of merged patches; llama.cpp enlarges images of fewer than eight.
SHAPES = ((3, 5), (6, 2))


def part(image: Picture) -> ImagePart:
    file = BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return ImagePart(file.getvalue())


@pytest.mark.parametrize(
    ("family", "config", "unit"),
    [
        ("exaone45", "plain", 28),
        ("glm4v", "plain", 28),
        ("glm4v", "experts", 28),
        ("glm_ocr", "plain", 28),
        ("hunyuan_vl", "plain", 16),
        ("paddleocr", "plain", 28),
        ("qwen25vl", "plain", 28),
        ("qwen3vl", "plain", 32),
        ("qwen35", "plain", 32),
    ],
)
def test_llama_cpp_continues_prompts_with_images_alike(tmp_path, family, config, unit) -> None:
    pair = VISION_MODELS[family].write(tmp_path, config, **CHANGES.get(family, {}))
    wide, tall = (picture(rows * unit, columns * unit) for rows, columns in SHAPES)
    texts = "hello", "the quick brown fox", "says hello there"
    prompt = pair.model.prepare(
        [Message("user", (texts[0], part(wide), texts[1], part(tall), texts[2]))]
    )
    assert [image.grid for image in prompt.images] == list(SHAPES)
    [ours] = fed(pair, [prompt])
    written = f"<|im_start|>user\n{IMAGE.join(texts)}<|im_end|>\n<|im_start|>assistant\n"
    theirs = their_next_token(
        tmp_path / "tiny.gguf", tmp_path / "mmproj-tiny.gguf", written, [wide, tall]
    )
    last = ours[-1].log_softmax(-1)
    known = last.isfinite()
    assert (last - theirs)[known].abs().max() < NEAR_NATS
