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


class Hub(Server):
    """Serves the files under `folder` as the repository `name`. `asked` lists the files that were sent."""

    def __init__(self, name: str, folder: Path):
        hub = self
        self.asked = []
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
        listing = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        answers = {
            f"/api/models/{name}/revision/main": {
                "id": name,
                "sha": COMMIT,
                "siblings": [{"rfilename": path} for path in files],
            },
            f"/api/models/{name}/tree/{COMMIT}": listing,
        }

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                path = urlparse(self.path).path
                file = path.removeprefix(f"/{name}/resolve/{COMMIT}/")
                if path in answers:
                    self.answer(json.dumps(answers[path]).encode(), {"Content-Type": "application/json"})
                elif file in files:
                    if self.command == "GET":
                        hub.asked.append(file)
                    etag = hashlib.sha1(files[file]).hexdigest()
                    self.answer(files[file], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
                else:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            do_HEAD = do_GET

            def answer(self, body, headers):
                self.send_response(200)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *args):
                pass

        super().__init__(Handler)
