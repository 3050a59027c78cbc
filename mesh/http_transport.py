"""HTTP to a deployment's API: the one module of this layer that imports aiohttp and maps what it raises.

Rules of this file:
1. Every call has a time limit, and the error says which call it was.
2. A connection that cannot be made or breaks is a `TransportError`; an answer with an error in it raises that
   error, rebuilt. What is neither is a `RemoteProtocolError`: something else answered at this address.
3. `call` repeats while the server is out of reach or says 503, for a bounded time; so it is only for requests
   that may take effect twice. A local deployment whose process is gone is not waited for.
4. Who answers may be anybody: no answer is read beyond its limit, and none sends this client elsewhere.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mesh.errors import (
    LocalProtocolError,
    MeshError,
    MeshTimeoutError,
    RemoteProtocolError,
    SpecError,
    TransportError,
)
from mesh.reasons import Reason

if TYPE_CHECKING:
    import ssl

    import aiohttp

CALL_LIMIT_S = 30.0
CONNECT_LIMIT_S = 5.0
REPEAT_LIMIT_S = 12.0
"""Longer than the API itself waits for a coordinator that is being restarted."""
FIRST_REPEAT_LIMIT_S = 2.0
"""For a server that has never answered this client: the address may simply be wrong."""
SILENCE_LIMIT_S = 35.0
"""A stream's heartbeat comes every 10 s; after three lost ones the connection is taken for dead."""
ITEM_BYTES_MAX = 16 * 1024 * 1024
ANSWER_BYTES_MAX = 256 * 1024 * 1024
"""Far above what an API says in one answer: what never ends shall not fill this machine's memory."""
BACKOFF_FIRST_S = 0.1
BACKOFF_LONGEST_S = 3.0


class Backoff:
    """Pauses between tries, longer and longer, until `patience_s` have passed since the last success."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._pause_s = BACKOFF_FIRST_S
        self._since: float | None = None

    def succeeded(self) -> None:
        """Something worked: patience and pauses start afresh."""
        self._since = None
        self._pause_s = BACKOFF_FIRST_S

    async def pause(self, error: MeshError) -> None:
        """Waits before the next try; raises `error` when patience is over."""
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        if now + self._pause_s > self._since + self._patience_s:
            raise error
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, BACKOFF_LONGEST_S)


class HttpStream:
    """A long answer: its headers, and its lines as they come (without their newline)."""

    def __init__(self, response: aiohttp.ClientResponse, describe: Callable[[Exception], MeshError]) -> None:
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._describe = describe

    async def lines(self) -> AsyncIterator[bytes]:
        """Raises TransportError when the connection is cut before the answer's end."""
        rest = bytearray()
        async for chunk in self.chunks():
            rest += chunk
            if b"\n" in chunk:
                *complete, last = bytes(rest).split(b"\n")
                rest = bytearray(last)
                for line in complete:
                    yield line
            if len(rest) > ITEM_BYTES_MAX:
                raise RemoteProtocolError(f"The server sent an item of more than {ITEM_BYTES_MAX} bytes.")
        if rest:
            yield bytes(rest)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The bytes as they come."""
        import aiohttp

        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._describe(error) from error


class HttpTransport:
    """A connection pool to one API.

    Args:
        url: `http://host:port`, or `https://host:port`.
        tls: how an https server is checked; by the system's authorities when it is None.
        tls_name: the name that it has to prove; the url's host when it is None.
        token: the deployment's token.
        fate: the error to raise when the deployment is known to be gone for good, else None; asked when a
            connection fails.
        unreachable: the error to raise when there is no connection, for who knows what its user can do about it; gets
            what happened, an OSError where it was one.
    """

    def __init__(
        self,
        *,
        url: str,
        token: str,
        fate: Callable[[], MeshError | None],
        tls: ssl.SSLContext | None = None,
        tls_name: str | None = None,
        unreachable: Callable[[Exception], TransportError] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": tls_name}
        self._token = token
        self._fate = fate
        self._unreachable = unreachable
        self._session: aiohttp.ClientSession | None = None
        self._has_answered = False

    async def open(self) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S),
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        limit_s: float = CALL_LIMIT_S,
        repeat_s: float = REPEAT_LIMIT_S,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> Any:
        """The JSON that comes back. `limit_s` bounds one try, `repeat_s` all repeats after the first failure.

        Raises:
            MeshError: what the API answered.
            TransportError: no connection, for as long as was tried.
            MeshTimeoutError: no answer within `limit_s`.
            RemoteProtocolError: what answers is no API, or says more than `bytes_max`.
        """
        patience_s = repeat_s if self._has_answered else min(repeat_s, FIRST_REPEAT_LIMIT_S)
        backoff = Backoff(patience_s=patience_s)
        sent = dict(headers or {})
        if body is not None:
            sent["Content-Type"] = "application/json"
        while True:
            try:
                return await self._call_once(method, path, query, body, sent, limit_s, bytes_max)
            except TransportError as error:
                gone = self._fate()
                if gone is not None:
                    raise gone from error
                await backoff.pause(error)

    async def _call_once(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Any,
        headers: Mapping[str, str],
        limit_s: float,
        bytes_max: int,
    ) -> Any:
        import aiohttp

        try:
            async with (
                asyncio.timeout(limit_s),
                self._opened().request(
                    method,
                    self.url + path,
                    params=_query(query),
                    data=_payload(body),
                    headers=headers,
                    allow_redirects=False,
                    **self._tls,
                ) as response,
            ):
                return self._answer(response.status, await self._read(response, bytes_max))
        except aiohttp.ConnectionTimeoutError as error:  # nothing was asked yet
            raise self._describe(error) from error
        except TimeoutError as error:
            raise MeshTimeoutError(
                f"{method} {path} was not answered by {self.url} within {limit_s:g} s.",
                hint="It may still have taken effect: look before you repeat it.",
                timeout_s=limit_s,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._describe(error) from error

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[HttpStream]:
        """One long answer, which is closed with the block. One try; raises as `call` does."""
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S, sock_read=SILENCE_LIMIT_S)
        try:
            response = await self._opened().get(
                self.url + path,
                params=_query(query),
                headers=headers or {},
                timeout=limits,
                allow_redirects=False,
                **self._tls,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.gone_or(self._describe(error)) from error
        try:
            if response.status >= 300:
                self._answer(response.status, await self._read(response, ANSWER_BYTES_MAX))
            yield HttpStream(response, self._describe)
        finally:
            response.close()

    def gone_or(self, error: MeshError) -> MeshError:
        """This error, or the deployment's fate when it is gone."""
        return self._fate() or error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise LocalProtocolError(
                "This client is not open.", hint="Use it as `async with mesh.connect() as client:`."
            )
        return self._session

    def _describe(self, error: Exception) -> MeshError:
        if isinstance(error, MeshError):
            return error
        # aiohttp's own words for it name an object of ours
        cause = getattr(error, "os_error", None) or error
        if self._unreachable is not None:
            return self._unreachable(cause)
        detail = getattr(cause, "strerror", None) or str(cause) or type(error).__name__
        return TransportError(
            f"The deployment at {self.url} cannot be reached ({detail}).",
            hint="`mesh status` says whether it runs.",
            url=self.url,
        )

    async def _read(self, response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > bytes_max:
                raise RemoteProtocolError(f"What answers at {self.url} says more than {bytes_max} bytes.")
        return bytes(body)

    def _answer(self, status: int, body: bytes) -> Any:
        self._has_answered = True
        try:
            data = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise self._stranger(status) from error
        if status < 300:
            return data
        described = data.get("error") if isinstance(data, dict) else None
        if not isinstance(described, dict):
            raise self._stranger(status)
        raise MeshError.from_wire(described)

    def _stranger(self, status: int) -> MeshError:
        if status in (502, 503, 504):
            return TransportError(f"Something between here and {self.url} answered with status {status}.")
        return RemoteProtocolError(
            f"What answers at {self.url} is no gangmesh API (status {status}, and nothing that an API says).",
            hint="Check the address.",
            reason=Reason.PROTOCOL,
        )


def checked_url(url: str) -> str:
    """The address of an API as `http://host:port`. Raises SpecError for what cannot be one."""
    from urllib.parse import urlsplit

    if url.startswith("ray:"):
        raise SpecError(
            "Deployments inside a Ray cluster are not available yet.",
            hint="Give the address of an API: http://HOST:PORT.",
            reason=Reason.NOT_AVAILABLE_YET,
        )
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise SpecError(f"{url!r} is no address of an API.", hint="Write http://HOST:PORT.", got=url)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _payload(body: Any) -> io.BytesIO | None:
    """The body as a file: aiohttp sends large ones in pieces then, without holding up the loop."""
    return None if body is None else io.BytesIO(json.dumps(body).encode())


def _query(query: Mapping[str, Any] | None) -> dict[str, str]:
    """Query parameters as text; those that are None are left out."""
    given = {key: value for key, value in (query or {}).items() if value is not None and value != ""}
    return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in given.items()}
