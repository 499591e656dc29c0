import gc

import pytest

from runtime.collector import collector_paused


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
