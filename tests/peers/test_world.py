"""The vocabulary of RWKV in llama.cpp: the same tokens, ends and default for BOS."""

from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.reader import GGUFFile
from model_zoo.tokenizers.tokenizer import load_tokenizer
from tests.families.rwkv_twin import RWKV7Maker
from tests.families.text_families import TEXT_MODELS
from tests.gguf_files import rewrite
from tests.peers.llama_cpp_library import llama_cpp
from tests.tiny_models import write_tiny_folder
from tests.world_vocabulary import TEXTS, lines


def test_llama_cpp_has_the_same_tokens(tmp_path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "out.gguf"
    write_tiny_folder(folder, TEXT_MODELS["rwkv7"].config(), maker=RWKV7Maker)
    (folder / "rwkv_vocab_v20230424.txt").write_text(lines(), encoding="utf-8")
    convert(folder, path)
    for keys in ({}, {"tokenizer.ggml.add_bos_token": None}):
        changed = rewrite(path, tmp_path / "changed.gguf", keys=keys)
        ours = load_tokenizer(GGUFFile.open(changed).metadata, architecture="rwkv7")
        theirs = llama_cpp.Llama(str(changed), vocab_only=True, verbose=False)
        vocabulary = llama_cpp.llama_model_get_vocab(theirs.model)
        assert llama_cpp.llama_vocab_get_add_bos(vocabulary) == ours.add_bos
        ends = {id for id in range(ours.vocab_size) if llama_cpp.llama_vocab_is_eog(vocabulary, id)}
        assert ends == ours.end_tokens
        for text in filter(None, TEXTS):
            found = theirs.tokenize(text.encode(), add_bos=False, special=True)
            assert found == ours.encode(text)
        theirs.close()
