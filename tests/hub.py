"""A local web server, and one in the place of the model hub, for tests of what is fetched."""

import hashlib
import http.server
import json
import threading
from pathlib import Path
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server:
    """A local web server in a thread."""

    def __init__(self, handler: type):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    """A handler that answers one request and writes no log."""

    def answer(self, status: int, body: bytes = b"", headers: dict | None = None):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


class Hub(Server):
    """Serves the files under `folder` as the repository `name`. `asked` lists the files
    that were sent.
    """

    def __init__(self, name: str, folder: Path):
        asked = self.asked = []
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        etags = {path: hashlib.sha1(content).hexdigest() for path, content in files.items()}
        siblings = [{"rfilename": path} for path in files]
        listing = [
            {"type": "file", "path": path, "size": len(content), "oid": etags[path]}
            for path, content in files.items()
        ]
        answers = {
            f"/api/models/{name}/revision/main": {"id": name, "sha": COMMIT, "siblings": siblings},
            f"/api/models/{name}/tree/{COMMIT}": listing,
        }

        class Files(Handler):
            def do_GET(self):
                path = urlparse(self.path).path
                file = path.removeprefix(f"/{name}/resolve/{COMMIT}/")
                if path in answers:
                    self.answer(
                        200,
                        json.dumps(answers[path]).encode(),
                        {"Content-Type": "application/json"},
                    )
                elif file in files:
                    if self.command == "GET":
                        asked.append(file)
                    self.answer(
                        200, files[file], {"ETag": f'"{etags[file]}"', "X-Repo-Commit": COMMIT}
                    )
                else:
                    self.answer(404, headers={"X-Error-Code": "RepoNotFound"})

            do_HEAD = do_GET

        super().__init__(Files)
