"""Which internet addresses belong to the public, and not to this network or this machine."""

from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address

# Only this part of IPv6 is given out for unicast; mapped and translated IPv4 lies outside of it.
_UNICAST = IPv6Network("2000::/3")
# Teredo and 6to4 carry IPv4 addresses inside; documentation has a range that is not yet in all
# versions of `ipaddress`.
_CARRIERS = (IPv6Network("2001::/32"), IPv6Network("2002::/16"), IPv6Network("3fff::/20"))
# Protocol assignments; relays of 6to4; the host that serves virtual machines on Azure.
_INTERNAL = (
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),
    IPv4Network("168.63.129.16/32"),
)


def is_public(text: str) -> bool:
    """Whether anybody on the internet may be meant by it.

    Not so: loopback, private, shared (RFC 6598), link-local and with it the metadata services of
    clouds, multicast, reserved, and IPv6 addresses that stand for IPv4 ones. What is no address
    is not public either.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _INTERNAL)
    return address in _UNICAST and not any(address in network for network in _CARRIERS)
