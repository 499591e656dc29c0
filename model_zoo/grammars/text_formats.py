"""Regular expressions of the formats of strings that JSON Schema names."""

# Subsets of the formats of RFC 3339, 5321, 1123, 2673, 4291, 4122 and 3986 and ISO 8601.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_WORD = "[a-zA-Z0-9_+-]{1,20}"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
# By name. By the specification, other formats may be treated as annotations.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,9}W|[0-9]{1,9}D(T[0-9]{1,9}S)?|T[0-9]{1,9}[HMS])",
    "email": rf"{_WORD}(\.{_WORD}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){7}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}://[a-zA-Z0-9.-]{1,250}(:[0-9]{1,5})?(/[a-zA-Z0-9._~!$&'()*+,;=:@/?-]{0,2000})?",
}
