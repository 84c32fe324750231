"""An OpenAI-compatible endpoint on the loopback interface that answers by a rule."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


Answer = str | tuple[int, str]
"""Text of a completion, or status and body of any other response."""


class FakeJudge:
    """Context manager that answers `POST /v1/chat/completions` by a rule and records the requests.

    Args:
        rule: (body of a request, number of requests before it) -> answer.
    """

    def __init__(self, rule: Callable[[dict[str, Any], int], Answer]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                count = len(endpoint.bodies)
                endpoint.bodies.append(body)
                endpoint.keys.append(self.headers["Authorization"])
                answer = rule(body, count) if self.path == "/v1/chat/completions" else (404, "no such path")
                if isinstance(answer, str):
                    answer = 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]})
                status, text = answer
                self.send_response(status)
                self.send_header("Retry-After-Ms", "1")  # clients retry without a pause
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                with suppress(ConnectionError):  # the client timed out
                    self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self) -> "FakeJudge":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.server.shutdown()
        self.server.server_close()
