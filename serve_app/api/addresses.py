"""Distinguishes public internet addresses from those of this network or machine."""

from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address

# The only part of IPv6 assigned for global unicast; excludes mapped and translated IPv4.
_UNICAST = IPv6Network("2000::/3")
# Teredo and 6to4 embed IPv4 addresses; the third is the newer documentation range, which not all
# versions of `ipaddress` know.
_CARRIERS = (IPv6Network("2001::/32"), IPv6Network("2002::/16"), IPv6Network("3fff::/20"))
# Protocol assignments; 6to4 relays; the platform service of Azure's virtual machines.
_INTERNAL = (
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),
    IPv4Network("168.63.129.16/32"),
)


def is_public(text: str) -> bool:
    """Whether the text is a public unicast address.

    Not public: loopback, private, shared (RFC 6598), link-local including the metadata services of
    clouds, multicast, reserved, and IPv6 addresses that embed IPv4 ones. A text that is not an
    address is not public either.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _INTERNAL)
    return address in _UNICAST and not any(address in network for network in _CARRIERS)
