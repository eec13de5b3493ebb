"""Who may use the page, and requests that only other programs than the page send.

Guard is middleware of the page's server, which is starlette's: gradio brings it.
"""

import hmac
import json
import re
import sys
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from accel.errors import shown

LARGEST = 2**20  # bytes of a request's body: a page sends a few hundred
# gradio asks its own server for the first, browsers ask for the second without cookies.
PUBLIC = "/startup-events", "/manifest.json"
LOOPBACK = "127.0.0.1", "localhost"
# gradio's routes that call a function of the page; a browser uses the first two alone.
CALLS = re.compile(r"/(queue/join|run/[^/]+|api/[^/]+|call/.+)/?$")


class Guard:
    """Answer this machine's own browser alone or, with a token, whoever has it.

    Without a token the Host of a request is a name of this machine's loopback address with
    the page's port, and its Origin, if it has one, is the same. This refuses other websites
    that the browser shows, also one whose name was changed to lead here (DNS rebinding).

    With a token the first request has it in its query (`?token=…`), and later ones in a
    cookie that other sites' requests do not carry.

    inputs_of: returns the number of inputs of each of the page's functions, by index.
    """

    def __init__(self, app: Callable, inputs_of: Callable[[], dict[int, int]], token: str = ""):
        self.app = app
        self.inputs_of = inputs_of
        self.token = token

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        request = Request(scope, receive)
        status, problem = self._stranger(request)
        is_call = request.method == "POST" and CALLS.search(request.scope["path"])
        if not problem and is_call:
            body = await _body(request)
            receive = _again(body, receive)
            status = 400
            problem = self._problem(body)
        if problem:
            return await _answer(request, send, status, problem)
        await self._run(request, receive, send)

    def _stranger(self, request):
        """Return (status, line) for a request that is not answered, or (200, "")."""
        if self.token:
            if request.scope["path"].endswith(PUBLIC) or self._has_token(request):
                return 200, ""
            return 401, "open the address with ?token=… that page.py has printed"
        port = _port(request)
        hosts = [f"{name}:{port}" for name in LOOPBACK]
        hosts += LOOPBACK * (port == 80)
        host = request.headers.get("host", "")
        if host not in hosts:
            line = f"{shown(host)} is not this page; open http://{hosts[0]}/ on its machine"
            return 403, f"{line}, or start it with --host"
        origin = request.headers.get("origin", f"http://{host}")
        if origin != f"http://{host}":
            return 403, f"{shown(origin)} is another site, and may not use this page"
        return 200, ""

    def _has_token(self, request):
        given = request.query_params.getlist("token")
        given.append(request.cookies.get(_cookie(request), ""))
        return any(hmac.compare_digest(text.encode(), self.token.encode()) for text in given)

    def _problem(self, body):
        """Return what is wrong with the body of a call of a function, or ""."""
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            call = None
        if not isinstance(call, dict):
            return f"a call is a JSON object of at most {LARGEST} bytes"
        index = call.get("fn_index")
        data = call.get("data")
        wanted = self.inputs_of()
        if type(index) is not int or index not in wanted:
            return (
                f"fn_index {shown(repr(index))}: this page has no such function; give a number "
                "from its /config"
            )
        if not isinstance(data, list) or len(data) != wanted[index]:
            return f"data: function {index} takes a list of {wanted[index]} values"
        return ""

    async def _run(self, request, receive, send):
        """Answer a request. An error is a line, here and for the client."""
        begun = False

        async def sends(message):
            nonlocal begun
            if message["type"] == "http.response.start" and self.token:
                cookie = f"{_cookie(request)}={self.token}; HttpOnly; SameSite=Strict"
                MutableHeaders(raw=message["headers"]).append("set-cookie", cookie)
            begun = True
            await send(message)

        try:
            await self.app(request.scope, receive, sends)
        except Exception as error:
            line = shown(f"{type(error).__name__}: {error}", 300)
            where = f"{request.method} {shown(request.scope['path'])}"
            print(f"page.py: {where}: {line}", file=sys.stderr)
            if not begun:
                await _answer(request, send, 400, line)


def _port(request):
    return request.scope["server"][1]


def _cookie(request):
    return f"page-{_port(request)}"  # cookies of a host are shared by all its ports


async def _body(request):
    """Return the body of a request; b"" for one that is too large."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST:
            return b""
    return body


def _again(body, receive):
    """Return a `receive` that has the whole body first."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again():
        return left.pop() if left else await receive()

    return again


async def _answer(request, send, status, line):
    response = PlainTextResponse(f"{line}\n", status)
    await response(request.scope, request.receive, send)
