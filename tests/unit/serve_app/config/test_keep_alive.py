"""`keep_alive`: how long a model stays loaded, in all forms that clients send."""

import math

import pytest

from runtime.errors import RequestError
from serve_app.config.keep_alive import FOREVER, keep_alive_s


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (300, 300.0),
        (1.5, 1.5),
        ("0", 0.0),
        ("0s", 0.0),
        ("-0", 0.0),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("300ms", 0.3),
        ("1.5h", 5400.0),
        ("+2s", 2.0),
        (-1, FOREVER),
        ("-1s", FOREVER),
        (-0.5, FOREVER),
        (10**400, FOREVER),
        (-(10**400), FOREVER),
        ("99999999999h", FOREVER),
        (math.inf, FOREVER),
        (math.nan, FOREVER),
    ],
)
def test_numbers_are_seconds_and_strings_are_go_durations(value, seconds):
    assert keep_alive_s(value) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("value", ["10", "", "m", "5 m", "1d", "five minutes", "1m-2s", "9" * 9999])
def test_an_invalid_duration_is_refused(value):
    with pytest.raises(RequestError, match="invalid keep_alive") as caught:
        keep_alive_s(value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [True, [], {"seconds": 3}])
def test_the_error_for_another_type_names_it(value):
    with pytest.raises(RequestError, match=f"Unsupported type: '{type(value).__name__}'"):
        keep_alive_s(value)
