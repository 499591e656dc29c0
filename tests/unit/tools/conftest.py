"""What several modules make of the demo model's data."""

import pytest
from tokenizers import Tokenizer

from tools.demo_model import train_tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    return train_tokenizer(1)
