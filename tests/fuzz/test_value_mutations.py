"""The mutations of `make sanitize` leave many files valid, so that kernels compute with them."""

from random import Random

from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError
from tests.fuzz.value_mutations import with_changed_values
from tests.tiny_models import write_tiny_llama

FILES = 200


def opens(path) -> bool:
    try:
        GGUFFile.open(path)
    except ModelFileError:
        return False
    return True


def test_mutated_files_differ_and_many_still_open(tmp_path) -> None:
    sound, changed = tmp_path / "sound.gguf", tmp_path / "changed.gguf"
    write_tiny_llama(sound, config="rows_of_256", type="Q4_0")
    opened = differing = 0
    for number in range(FILES):
        data = with_changed_values(sound.read_bytes(), Random(number))
        differing += data != sound.read_bytes()
        changed.write_bytes(data)
        opened += opens(changed)
    assert differing > FILES * 3 // 4
    assert FILES // 4 < opened < FILES


def test_the_same_number_makes_the_same_file(tmp_path) -> None:
    write_tiny_llama(tmp_path / "sound.gguf")
    sound = (tmp_path / "sound.gguf").read_bytes()
    assert with_changed_values(sound, Random(7)) == with_changed_values(sound, Random(7))
