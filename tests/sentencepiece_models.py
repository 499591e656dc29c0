"""Small SentencePiece models as families train theirs, and as converters write them to files."""

from functools import cache
from io import BytesIO
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto

TEXTS = (
    "the quick brown fox jumps over the lazy dog and says hello to the user and the model",
    "user model system assistant hello there, what is it? friend of mine!",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1,  2))",
    "<table><tr><td>one</td></tr></table> <s>struck out</s>   three   spaces",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# As in Gemma's vocabularies: turns, runs of line breaks and of spaces, tags of HTML.
GEMMA_USER_DEFINED = (
    *("<mask>", "<unused0>", "<start_of_turn>", "<end_of_turn>"),
    *("\n" * count for count in range(1, 5)),
    *("▁" * count for count in range(2, 6)),
    *("<table>", "</table>", "<tr>", "</tr>", "<s>", "</s>"),
)


@cache
def gemma() -> bytes:
    """The serialised model of Gemma 1 to 3n: no prefix, user-defined tokens before the bytes."""
    return _trained(
        add_dummy_prefix=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        bos_piece="<bos>",
        eos_piece="<eos>",
        user_defined_symbols=list(GEMMA_USER_DEFINED),
    )


@cache
def llama() -> bytes:
    """The serialised model of Llama 2 and Mistral 7B: a prefix, and no user-defined tokens."""
    return _trained(add_dummy_prefix=True, unk_id=0, bos_id=1, eos_id=2, pad_id=-1)


def processor(model: bytes) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_proto=model)


def metadata(model: bytes, *, flavour: str, added: dict[str, int] | None = None) -> dict[str, Any]:
    """The keys that a converter writes for `model` and the `added` tokens behind it, by type.

    `flavour`: "ollama", "llama.cpp", or "old llama.cpp", which knew neither the prefix's key nor
    user-defined tokens; the first two differ in that as well.
    """
    proto = ModelProto()
    proto.ParseFromString(model)
    knows = flavour == "llama.cpp"
    added = added or {}
    types = [p.type if knows or p.type != USER_DEFINED else NORMAL for p in proto.pieces]
    keys: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": [*(piece.piece for piece in proto.pieces), *added],
        "scores": [*(piece.score for piece in proto.pieces), *[-1000.0] * len(added)],
        "token_type": [*types, *added.values()],
        "bos_token_id": proto.trainer_spec.bos_id,
        "eos_token_id": proto.trainer_spec.eos_id,
        "unknown_token_id": proto.trainer_spec.unk_id,
        "add_bos_token": True,
    }
    if knows:
        keys["add_space_prefix"] = proto.normalizer_spec.add_dummy_prefix
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _trained(**settings: Any) -> bytes:
    file = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 30),
        model_writer=file,
        model_type="bpe",
        vocab_size=420,
        hard_vocab_limit=False,
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
        **settings,
    )
    return file.getvalue()
