"""Who may use the API: whoever holds the deployment's token."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Middleware

from coordinator.api.endpoints import is_open
from coordinator.api.failures import Handler
from mesh.errors import AuthenticationError
from mesh.reasons import Reason

WHERE_TOKENS_ARE = (
    "The token is in deployment.json in the deployment's state folder (~/.gangmesh unless it was started "
    "with --state); send it as `Authorization: Bearer TOKEN`, or put it into $GANGMESH_TOKEN for `mesh`."
)


OPEN_BODY_BYTES_MAX = 32 * 1024
"""Of a request that needs no token of the deployment: a certificate request and a few words."""


def bearer_of(request: web.Request) -> str:
    """The bearer token of a request. Raises AuthenticationError when it has none."""
    scheme, _, offered = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not offered.strip():
        raise AuthenticationError("This takes the machine's secret as a Bearer token.")
    return offered.strip()


def bearer_middleware(token: str) -> Middleware:
    """A middleware that lets only requests with this token pass, and those for what is open.

    Raises AuthenticationError for an empty token.
    """
    if not token:
        raise AuthenticationError("An API without a token would be open to everyone on this machine.")
    expected = token.encode()

    @web.middleware
    async def require_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_open(request):  # strangers too: what they send is held in memory
            return await handler(request.clone(client_max_size=OPEN_BODY_BYTES_MAX))
        header = request.headers.get("Authorization", "")
        scheme, _, offered = header.partition(" ")
        if not header:
            raise AuthenticationError("This API needs a token.", hint=WHERE_TOKENS_ARE)
        if scheme.lower() != "bearer":
            raise AuthenticationError(
                f"This API takes Bearer tokens, not {scheme[:20]!r}.", hint=WHERE_TOKENS_ARE
            )
        # compare_digest takes the same time wherever the first difference is
        if not hmac.compare_digest(offered.strip().encode("utf-8", "surrogateescape"), expected):
            raise AuthenticationError(
                "The token is not the one of this deployment.",
                hint=WHERE_TOKENS_ARE,
                reason=Reason.UNAUTHENTICATED,
            )
        return await handler(request)

    return require_token
