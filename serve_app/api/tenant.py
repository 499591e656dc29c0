"""The tenant of a request. Limits, queues and caches are separate for each tenant."""

from hashlib import blake2b
from ipaddress import IPv6Address, ip_address

from starlette.requests import Request
from starlette.types import Scope

ID_BYTES = 16
# Requests without a client address, such as those over a Unix socket, share one tenant.
UNKNOWN = "unknown"
_HOST_BITS = 64


def tenant_by_address(scope: Scope) -> None:
    """Check for servers without API keys: the client address is the tenant. Refuses nothing."""
    set_tenant(scope, client_address(scope))


def client_address(scope: Scope) -> str:
    """The client address of an HTTP scope; for IPv6 its /64 network, since one host has many
    addresses.

    `ThroughProxy` has set the client where HAProxy reports it; otherwise it is the peer.
    """
    client = scope.get("client")
    if not client:
        return UNKNOWN
    try:
        address = ip_address(client[0])
    except ValueError:
        return str(client[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        network = int(address) >> _HOST_BITS << _HOST_BITS
        return f"{IPv6Address(network)}/{128 - _HOST_BITS}"
    return str(address)


def set_tenant(scope: Scope, tenant: str) -> None:
    scope.setdefault("state", {})["tenant"] = tenant


def tenant_of(request: Request) -> str:
    """The tenant that a check has set: the name of an API key, or a client address."""
    return request.state.tenant


def tenant_id(request: Request) -> str:
    """A digest of the tenant's name, equal in all processes.

    Tasks carry the digest because a client address is personal data.
    """
    return blake2b(tenant_of(request).encode(), digest_size=ID_BYTES).hexdigest()
