import gc

import pytest

from runtime.garbage_collection import collector_paused, lasting_imports


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_paused_and_then_as_it_was(enabled: bool) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), collector_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_objects_of_imports_are_exempt_from_collections() -> None:
    before = gc.get_freeze_count()
    try:
        with lasting_imports():
            assert not gc.isenabled()
            objects = [[] for _ in range(1000)]
        assert gc.get_freeze_count() >= before + len(objects)
    finally:
        if not before:
            gc.unfreeze()
