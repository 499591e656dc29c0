"""Special tokens that strip adjacent white space: a flag that GGUF files lack."""

from dataclasses import dataclass

from model_zoo.tokenizers.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Stripping:
    """Ids of tokens that strip white space before them (`lstrip`) or after them (`rstrip`), as
    AddedToken of the `tokenizers` library."""

    left: frozenset[int] = frozenset()
    right: frozenset[int] = frozenset()


NO_STRIPPING = Stripping()
# The special tokens of Phi 3 that do not have the flag.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
# Tokens that identify Phi 3's vocabulary in files of other architectures, such as fine-tunes.
_PHI3_MARKS = {"<|user|>", "<|assistant|>", "<|end|>", "<|placeholder1|>"}
_PHI4_MARKS = {"<|im_sep|>", "<|dummy_0|>"}
_PHI4_MINI = ("<|assistant|>", "<|end|>", "<|system|>", "<|user|>")
# Pre-tokenizers of families whose `<mask>` strips the space before it.
_ROBERTA = ("roberta-bpe", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es")


def stripping(vocabulary: Vocabulary, *, architecture: str, kind: str, pre: str) -> Stripping:
    """The flags in `added_tokens` of the family's tokenizer.json.

    kind, pre: `tokenizer.ggml.model` and `tokenizer.ggml.pre`. Other supported families have no
    such tokens.

    | family             | identified by           | flags                                      |
    |--------------------|-------------------------|--------------------------------------------|
    | Phi 3 and 3.5      | SentencePiece and phi3, | rstrip on all but three; llama-vocab.cpp,  |
    |                    | or its tokens           | which goes by `general.name`               |
    | Phi 4              | its tokens              | lstrip and rstrip on all                   |
    | Phi 4 mini         | byte-level and phi3     | rstrip on those of turns                   |
    | RoBERTa, Jina,     | `pre`, or Unigram       | lstrip on `<mask>`; llama-vocab.cpp        |
    | XLM-RoBERTa        |                         |                                            |
    | ModernBERT         | `pre`                   | lstrip on `[MASK]`; llama-vocab.cpp        |
    """
    every = frozenset(vocabulary.control.values()) | frozenset(vocabulary.user_defined.values())
    if kind == "llama":
        if architecture == "phi3" or vocabulary.has(_PHI3_MARKS):
            return Stripping(right=every - vocabulary.ids_of(_PHI3_PLAIN))
        return NO_STRIPPING
    if vocabulary.has(_PHI4_MARKS):
        return Stripping(left=every, right=every)
    if architecture == "phi3":
        return Stripping(right=vocabulary.ids_of(_PHI4_MINI))
    if kind == "t5" or pre in _ROBERTA:
        return Stripping(left=vocabulary.ids_of(("<mask>",)))
    return Stripping(left=vocabulary.ids_of(("[MASK]",) if pre == "modern-bert" else ()))
