"""Parts of conversion tables for rerankers that answer yes or no, such as Qwen's.

Their checkpoints have the settings of chat models. Only the names of the folder and of the model
card tell that they are rerankers; llama.cpp's converter goes by these, too.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from model_zoo.convert import decoders
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.mapping import Key, Rule
from model_zoo.convert.sentence_transformer import POOLING, pooling_type
from model_zoo.convert.vocabularies.byte_level import vocabulary
from model_zoo.convert.vocabularies.files import TokenizerFiles
from model_zoo.gguf.pooling_types import RANK
from model_zoo.layers.ranking_head import ANSWERS, LABELS
from model_zoo.tokenizers.pairs import TEMPLATE_KEY

# The beginning of every prompt of Qwen's rerankers.
TASK = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)


def reranker_keys(name: str, template: str, usual: tuple[Key, ...]) -> tuple[Key, ...]:
    """The keys `usual` of the family's chat models, and those of its rerankers.

    name: what the names of rerankers contain, in lower case. template: of their prompts, with
    {query} and {document}.
    """
    ranks = _named(name)
    return (
        *(key for key in usual if key is not POOLING),
        Key("pooling_type", lambda c: RANK if ranks(c) else pooling_type(c)),
        Key(LABELS, lambda c: list(ANSWERS) if ranks(c) else None),
        Key(TEMPLATE_KEY, lambda c: template if ranks(c) else None),
    )


def reranker_rules(name: str) -> tuple[Rule, ...]:
    """Rules for the tensors outside layers. Rerankers keep two rows of the head."""
    ranks = _named(name)
    *others, head = decoders.EMBEDDINGS
    return (
        *others,
        replace(head, only=lambda c, _: not ranks(c)),
        Rule(
            "embed_tokens.weight",
            "cls.output.weight",
            _answers,
            only=lambda c, _: c.tied and ranks(c),
        ),
        Rule(
            "lm_head.weight",
            "cls.output.weight",
            _answers,
            only=lambda c, _: not c.tied and ranks(c),
        ),
    )


def _named(name: str) -> Callable[[Configuration], bool]:
    def ranks(config: Configuration) -> bool:
        folder = config.path.resolve().parent
        readme = folder / "README.md"
        text = readme.read_text(errors="replace").lower() if readme.is_file() else ""
        return name in folder.name.lower() or f"# {name}" in text

    return ranks


def _answers(config: Configuration, head: Tensor) -> Tensor:
    """The rows of the head for the answers yes and no."""
    files = TokenizerFiles(config.path.parent, config)
    ids = vocabulary(files)
    if not ids.keys() >= set(ANSWERS):
        raise files.error("tokenizer.json", f"lacks a token of {' and '.join(ANSWERS)}")
    return head[[ids[answer] for answer in ANSWERS]]
