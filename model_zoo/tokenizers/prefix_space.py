"""Where a family's tokenizer inserts a space before text, for files that do not state it."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from model_zoo.families import family_or_defaults
from model_zoo.tokenizers.marked_space import SPACE
from model_zoo.tokenizers.vocabulary import flag, required_array


class PrefixSpace(Enum):
    """Which pieces of a text get SentencePiece's dummy prefix, a space.

    A piece is ordinary text at the beginning of the text or after a special token. WORDS excludes
    pieces after a special token that already begin with a space.
    """

    NEVER = "never"
    EVERY_PIECE = "every piece"
    WORDS = "words"

    def applies(self, piece: str, *, first: bool) -> bool:
        """Whether `piece` gets the prefix; `first`: it begins the text, with no token before it."""
        if self is PrefixSpace.WORDS and not first:
            return not piece.startswith((" ", SPACE))
        return self is not PrefixSpace.NEVER


# The rules in `families.py`, where `tokenizer.ggml.add_space_prefix` is absent. Ollama's converter
# never writes the key, llama.cpp's did not at first.
#
# | family              | rule        | source                                                    |
# |---------------------|-------------|-----------------------------------------------------------|
# | Gemma 1 to 4        | never       | `add_dummy_prefix` is false in tokenizer.model;           |
# |                     |             | GemmaTokenizer; llama.cpp's conversion/gemma.py           |
# | Baichuan 2          | never       | technical report of Baichuan 2: no dummy prefix, unlike   |
# |                     |             | Baichuan 1                                                |
# | Phi 3, Phi 3.5 MoE  | every piece | Prepend in tokenizer.json; `phi3_tokenizer` in            |
# |                     |             | integrations/gguf of transformers                         |
# | Llama 1 and 2,      | words       | `add_dummy_prefix` is true in tokenizer.model;            |
# | Mistral 7B, Mixtral |             | LlamaTokenizer with `legacy`. Behind `[INST]` Mistral's   |
# | and all others      |             | own library has one space, whether a template writes it   |
# |                     |             | or relies on the tokenizer                                |
_BAICHUAN = "baichuan"
# More tokens than the 64,000 of Baichuan 1, fewer than the 125,696 of Baichuan 2.
LARGEST_BAICHUAN_1 = 100_000


def prefix_space(metadata: Mapping[str, Any], architecture: str) -> PrefixSpace:
    """The rule of the file and the family.

    The file may state whether there is a prefix. The family decides where it is inserted, and
    whether there is one if the file does not say. ModelFileError if the key is not a boolean, or
    tokens that tell families apart are missing.
    """
    stated = flag(metadata, "add_space_prefix")
    if stated is False:
        return PrefixSpace.NEVER
    rule = PrefixSpace(family_or_defaults(architecture).space_prefix)
    if architecture == _BAICHUAN:
        tokens = required_array(metadata, "tokenizer.ggml.tokens")
        rule = PrefixSpace.NEVER if len(tokens) > LARGEST_BAICHUAN_1 else rule
    return PrefixSpace.WORDS if stated and rule is PrefixSpace.NEVER else rule
