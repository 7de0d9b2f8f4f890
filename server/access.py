"""Who may ask what: API keys, and the Host and Sec-Fetch-Site of browsers that a web page turned against this server.

Denied by default: a route that says nothing of itself needs a key, and so does a path that is no route.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from aiohttp import web

from headrace.server.errors import forbidden, unauthorized


class Access(enum.Enum):
    """What a route asks of its caller."""

    OPEN = "open"
    """Probes: they tell nothing but whether the server is there."""
    USER = "user"
    ADMIN = "admin"
    """The admin key if there is one, else as USER."""


class Keys:
    """The keys of this server, kept as hashes: comparing takes the same time for every guess, of any length."""

    def __init__(self, api_keys: Sequence[str], admin_key: str | None) -> None:
        self._api = [_digest(key) for key in api_keys]
        self._admin = None if admin_key is None else _digest(admin_key)

    def check(self, request: web.BaseRequest, access: Access) -> None:
        """Raises ApiError 401."""
        if not self.allows(request, access):
            raise unauthorized()

    def allows(self, request: web.BaseRequest, access: Access) -> bool:
        if access is Access.OPEN:
            return True
        if access is Access.ADMIN and self._admin is not None:
            accepted = [self._admin]
        elif self._api:
            accepted = self._api if self._admin is None else [*self._api, self._admin]
        else:
            return True
        given = _digest(bearer(request))
        # Every key is compared, so that the time says nothing about which one was nearly right.
        return sum([hmac.compare_digest(given, key) for key in accepted]) > 0

    def salt(self, request: web.BaseRequest) -> str:
        """With several keys, tenants must not see by the time to first token what others have sent: each has its own
        cache. With one key everybody shares."""
        if len(self._api) < 2:
            return ""
        return _digest(bearer(request)).hex()[:32]


def bearer(request: web.BaseRequest) -> str:
    """The key that was sent; empty if there is none, or only the word Bearer (as some clients do without a key)."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def is_loopback(host: str) -> bool:
    """Whether a server bound to this host can be reached from this machine only."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_host(request: web.BaseRequest) -> None:
    """For a server bound to loopback: raises ApiError 403 when the Host is another machine's name.

    A web page may rebind its own name to 127.0.0.1 and then read this server's answers, with the browser's blessing;
    the Host header still tells (RFC 9110, 7.2). Browsers also say when a request comes from another site's page, which
    may be unable to read the answer but has its effect.
    """
    host = request.headers.get("Host", "")
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    if name and not is_loopback(name):
        raise forbidden(
            f"The Host `{name[:100]}` is not this server's: it listens on this machine only. Use http://127.0.0.1, or "
            "start it with --host to serve others.",
            "host_not_allowed",
        )
    if request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise forbidden("A web page of another site may not use this server.", "cross_site_request")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
