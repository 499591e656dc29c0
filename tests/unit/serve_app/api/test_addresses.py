"""Addresses that images may be fetched from."""

import pytest

from serve_app.api.addresses import is_public

PUBLIC = "8.8.8.8 1.1.1.1 93.184.215.14 172.32.0.1 2001:4860:4860::8888 2606:4700::1111".split()
INSIDE = {
    "this machine": "127.0.0.1 127.255.0.9 ::1 0.0.0.0 ::",
    "private": "10.1.2.3 172.16.0.1 192.168.1.1 fc00::1 fd12:3456::1 fec0::1",
    "shared": "100.64.0.1 100.127.255.254",
    "link-local": "169.254.1.1 fe80::1 fe80::1%eth0",
    "metadata of clouds": "169.254.169.254 fd00:ec2::254 100.100.100.200 168.63.129.16",
    "IPv4 in IPv6": "::ffff:127.0.0.1 ::ffff:8.8.8.8 ::127.0.0.1 ::8.8.8.8 ::ffff:0:8.8.8.8",
    "NAT64": "64:ff9b::8.8.8.8 64:ff9b::a9fe:a9fe 64:ff9b:1::1",
    "6to4 and Teredo": "2002:7f00:1::1 2002:808:808::1 2001::1 192.88.99.1",
    "multicast": "224.0.0.1 239.1.2.3 ff02::1 ff0e::1",
    "reserved": "240.0.0.1 255.255.255.255 192.0.0.8 198.18.0.1",
    "documentation": "192.0.2.1 198.51.100.7 203.0.113.9 2001:db8::1 3fff::1",
    "no address": "localhost 0x7f.1 127.1 2130706433 1.2.3 example.org",
}


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address", [address for line in INSIDE.values() for address in [*line.split(), ""]]
)
def test_all_other_addresses_are_refused(address) -> None:
    assert not is_public(address)
