"""Data of the demo model that several test modules use."""

import pytest
from tokenizers import Tokenizer

from tools.demo_model import train_tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    return train_tokenizer(1)
