"""The vocabulary of PLaMo 2 in llama.cpp: the same tokens, and the same default for BOS."""

import json

from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.reader import GGUFFile
from model_zoo.tokenizers.tokenizer import load_tokenizer
from tests.families.plamo_twins import Plamo2Maker
from tests.families.text_families import TEXT_MODELS
from tests.gguf_files import rewrite
from tests.peers.llama_cpp_library import llama_cpp
from tests.plamo_vocabulary import ROWS, SETTINGS, TEXTS
from tests.tiny_models import write_tiny_folder


def test_llama_cpp_has_the_same_tokens(tmp_path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "out.gguf"
    write_tiny_folder(folder, TEXT_MODELS["plamo2"].config(), maker=Plamo2Maker)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    (folder / "tokenizer.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    convert(folder, path)
    lacking = {"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.add_eos_token": None}
    for keys in ({}, lacking):
        changed = rewrite(path, tmp_path / "changed.gguf", keys=keys)
        ours = load_tokenizer(GGUFFile.open(changed).metadata, architecture="plamo2")
        theirs = llama_cpp.Llama(str(changed), vocab_only=True, verbose=False)
        vocabulary = llama_cpp.llama_model_get_vocab(theirs.model)
        assert llama_cpp.llama_vocab_get_add_bos(vocabulary) == ours.add_bos
        for text in TEXTS:
            text = text.removeprefix("\ufeff")  # it drops the mark at the beginning of a text
            found = theirs.tokenize(text.encode(), add_bos=False, special=True)
            assert found == ours.encode(text)
        theirs.close()
