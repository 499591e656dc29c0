"""What `make sanitize` does to files: many of them still open, so that there is much to compute."""

from random import Random

from model_zoo.gguf.reader import GGUFFile
from runtime.errors import ModelFileError
from tests.fuzz.damage import damaged
from tests.tiny_models import write_tiny_llama

FILES = 200


def opens(path) -> bool:
    try:
        GGUFFile.open(path)
    except ModelFileError:
        return False
    return True


def test_damaged_files_differ_and_many_still_open(tmp_path) -> None:
    sound, changed = tmp_path / "sound.gguf", tmp_path / "changed.gguf"
    write_tiny_llama(sound, config="rows_of_256", type="Q4_0")
    opened = differing = 0
    for number in range(FILES):
        data = damaged(sound.read_bytes(), Random(number))
        differing += data != sound.read_bytes()
        changed.write_bytes(data)
        opened += opens(changed)
    assert differing > FILES * 3 // 4
    assert FILES // 4 < opened < FILES


def test_the_same_number_makes_the_same_file(tmp_path) -> None:
    write_tiny_llama(tmp_path / "sound.gguf")
    sound = (tmp_path / "sound.gguf").read_bytes()
    assert damaged(sound, Random(7)) == damaged(sound, Random(7))
