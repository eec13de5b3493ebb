"""Who may use the page, and requests that only other programs than the page send.

Guard is middleware of the page's server, which is starlette's: gradio brings it.
"""

import hmac
import json
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from accel.errors import shown

if TYPE_CHECKING:  # gradio is slow to import
    from gradio import Blocks

LARGEST = 2**20  # bytes of a request's body: a page sends a few hundred
# gradio asks its own server for the first, browsers ask for the second without cookies.
PUBLIC = "/startup-events", "/manifest.json"
LOOPBACK = "127.0.0.1", "localhost"
# gradio's routes that call a function of the page; a browser uses the first two alone.
CALLS = re.compile(r"/(queue/join|run/[^/]+|api/[^/]+|call/.+)/?$")


class Guard(BaseHTTPMiddleware):
    """Answer this machine's own browser alone or, with a token, whoever has it.

    Without a token the Host of a request is a name of this machine's loopback address with
    the page's port, and its Origin, if it has one, is the same. This refuses other websites
    that the browser shows, also one whose name was changed to lead here (DNS rebinding).

    With a token the first request has it in its query (`?token=…`), and later ones in a
    cookie that other sites' requests do not carry.
    """

    def __init__(self, app: Callable, page: "Blocks", token: str = ""):
        super().__init__(app)
        self.page = page
        self.token = token

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "websocket":  # the page has none
            return await send({"type": "websocket.close", "code": 1008})
        await super().__call__(scope, receive, send)

    async def dispatch(self, request: Request, call_next: Callable) -> Response:
        """Answer a request. An error is a line, here and for the client."""
        refusal = self._stranger(request) or await self._wrong_call(request)
        if refusal:
            return refusal
        try:
            response = await call_next(request)
        except Exception as error:
            line = shown(f"{type(error).__name__}: {error}", 300)
            where = f"{request.method} {shown(request.scope['path'])}"
            print(f"page.py: {where}: {line}", file=sys.stderr)
            return _line(400, line)
        if self.token:
            response.set_cookie(_cookie(request), self.token, httponly=True, samesite="strict")
        return response

    def _stranger(self, request):
        """Return the answer to a request that may not use the page, or None."""
        if self.token:
            if request.scope["path"].endswith(PUBLIC) or self._has_token(request):
                return None
            return _line(401, "open the address with ?token=… that page.py has printed")
        port = _port(request)
        hosts = [f"{name}:{port}" for name in LOOPBACK]
        hosts += LOOPBACK * (port == 80)
        host = request.headers.get("host", "")
        if host not in hosts:
            line = f"{shown(host)} is not this page; open http://{hosts[0]}/ on its machine"
            return _line(403, f"{line}, or start it with --host")
        origin = request.headers.get("origin", f"http://{host}")
        if origin != f"http://{host}":
            return _line(403, f"{shown(origin)} is another site, and may not use this page")
        return None

    def _has_token(self, request):
        given = request.query_params.getlist("token")
        given.append(request.cookies.get(_cookie(request), ""))
        return any(hmac.compare_digest(text.encode(), self.token.encode()) for text in given)

    async def _wrong_call(self, request):
        """Return the answer to a call that the page does not send, or None."""
        if request.method != "POST" or not CALLS.search(request.scope["path"]):
            return None
        right = False
        try:
            if int(request.headers["content-length"]) <= LARGEST:
                call = json.loads(await request.body())
                function = self.page.fns[call["fn_index"]]
                right = isinstance(call["data"], list) and len(call["data"]) == len(function.inputs)
        except (ValueError, TypeError, LookupError, RecursionError):
            pass
        if right:
            return None
        return _line(
            400,
            f"a call is a JSON object of at most {LARGEST} bytes with fn_index, the number of a "
            "function of this page, and data, a list of its inputs; see /config",
        )


def _port(request):
    return request.scope["server"][1]


def _cookie(request):
    return f"page-{_port(request)}"  # cookies of a host are shared by all its ports


def _line(status, text):
    return PlainTextResponse(f"{text}\n", status)
