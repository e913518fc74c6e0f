"""Who may read, and what: hosts, the token, the headers of every answer, and the paths below the served folder."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coterie.storage.names import printable

DEPTH = 4  # folders at most between the served one and a run, the run's own included
SHORTEST = 12  # characters of a token
LOCAL = ("localhost", "127.0.0.1", "::1")

# Of answers that set no policy of their own, which are those without scripts and styles.
POLICY = "default-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host.

    Args:
        host: A name or an address.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
        (True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check(host: str, token: str | None) -> None:
    """Refuse to serve others than this machine without a token, or with one that is soon guessed.

    Args:
        host: What the server binds to.
        token: What requests must show.

    Raises:
        ValueError: It is refused.
    """
    if token is None and not is_loopback(host):
        raise ValueError(
            f"serve: others can reach {host}, so it needs a token that they must know: "
            f"--token {secrets.token_urlsafe(16)}, or the same in COTERIE_TOKEN"
        )
    if token is not None and len(token) < SHORTEST:
        raise ValueError(f"serve: a token has at least {SHORTEST} characters, as {secrets.token_urlsafe(16)}")


class Guard:
    """Answers what may not be asked, and sets the headers of all answers.

    On a loopback address the Host header must name it: a page of elsewhere whose name was made to point here (DNS
    rebinding) would otherwise read what is served. Elsewhere the token says who may read.
    """

    def __init__(self, app: ASGIApp, *, host: str, port: int, token: str | None) -> None:
        self.app, self.token = app, token
        self.names = {*LOCAL, host} if is_loopback(host) else None
        self.cookie = f"coterie-{port}"  # a browser sends the cookies of a host to all of its ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        shown = next((value for name, value in asked if name == "token"), None)
        headers = Headers(scope=scope)
        refused = self._refusal(scope["method"], headers, shown)
        welcome = refused is None and self.token is not None and shown is not None
        clean = _without_token(scope, asked) if welcome else None

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": list(message["headers"])}  # one that is kept goes to others too
                self._complete(MutableHeaders(scope=message), clean)
            await send(message)

        await (refused or self.app)(scope, receive, sent)

    def _refusal(self, method: str, headers: Headers, shown: str | None) -> PlainTextResponse | None:
        if self.names is not None and _host(headers.get("host", "")) not in self.names:
            return PlainTextResponse("400: this address is not served under that name\n", 400)
        if not self._knows(headers, shown):
            words = "401: this needs the token: open the address with ?token=… that `coterie serve` was started with\n"
            return PlainTextResponse(words, 401, {"WWW-Authenticate": "Bearer"})
        if method not in ("GET", "HEAD"):
            return PlainTextResponse("405: this can only be read\n", 405, {"Allow": "GET, HEAD"})
        return None

    def _knows(self, headers: Headers, shown: str | None) -> bool:
        """Whether a request has the token in its address or a header, or the cookie that such a request was given."""
        if self.token is None:
            return True
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        own = bearer.strip() if kind.lower() == "bearer" else ""
        cookie = _cookies(headers.get("cookie", "")).get(self.cookie, "")
        right = [_same(shown or "", self.token), _same(own, self.token), _same(cookie, _digest(self.token))]
        return any(right)

    def _complete(self, headers: MutableHeaders, clean: str | None) -> None:
        """Add headers to an answer; to that to an address with the token the cookie, and where to go on without it.

        The browser goes on by itself and is not redirected: after a click in somebody's mail, a redirection would count
        as a request of that other site, and have no strict cookie.
        """
        headers.setdefault("Content-Security-Policy", POLICY)
        for name, value in HEADERS.items():
            headers[name] = value
        if clean is not None and self.token is not None:
            headers.append("Set-Cookie", f"{self.cookie}={_digest(self.token)}; Path=/; HttpOnly; SameSite=Strict")
            if headers.get("content-type", "").startswith("text/html") and "content-disposition" not in headers:
                headers["Refresh"] = f"0; url={clean}"


def run_folder(root: Path, name: str) -> Path | None:
    """The folder of a name below the served one; None if there is none, or it is not a plain folder in there.

    Args:
        root: The served folder, resolved.
        name: Its parts with slashes between them. No part may be hidden, or a link.
    """
    parts = name.split("/")
    if len(parts) > DEPTH or any(not part or part.startswith(".") or "\0" in part or "\\" in part for part in parts):
        return None
    path = root.joinpath(*parts)
    try:
        return path if path.is_dir() and path.resolve() == path else None
    except OSError:  # a name that is too long, a folder that may not be read
        return None


def quoted(name: str) -> str:
    """A name as part of an address, whatever bytes it has.

    Args:
        name: The name of a run.

    Example:
        >>> quoted("sweep/a b")
        'sweep/a%20b'
    """
    return quote(os.fsencode(name))


def readable(text: str, most: int = 200) -> str:
    r"""Text that others wrote as it is shown: at most so long, with control characters spelled out.

    Args:
        text: The text.
        most: Characters.

    Example:
        >>> readable("a\x00b"), readable("abcdef", 3)
        ('a\\x00b', 'abc…')
    """
    cut = text if len(text) <= most else text[:most] + "…"
    return printable(cut).encode("utf-8", "backslashreplace").decode()


def _host(header: str) -> str:
    """The Host header without its port, and without the brackets of an IPv6 address."""
    name = header.rpartition("]")[0] if header.startswith("[") else header.partition(":")[0]
    return name.lstrip("[").lower()


def _cookies(header: str) -> dict[str, str]:
    try:
        return {name: part.value for name, part in SimpleCookie(header).items()}
    except CookieError:
        return {}


def _digest(token: str) -> str:
    """What the cookie holds: it lets its owner in, and does not tell the token."""
    return hashlib.sha256(f"coterie {token}".encode()).hexdigest()


def _same(given: str, right: str) -> bool:
    """Whether two strings are the same, in a time that does not tell how much of them is."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), right.encode("utf-8", "surrogatepass"))


def _without_token(scope: Scope, asked: list[tuple[str, str]]) -> str:
    rest = urlencode([(name, value) for name, value in asked if name != "token"])
    return quote(scope["path"]).replace("//", "/") + (f"?{rest}" if rest else "")
