"""python -m keras_tx.serving.serve saved_models/reviews: answers as TensorFlow Serving's REST interface does.

The server is for trying an exported model and for tests. It is not for production: it puts no requests together into
batches, does not look for new versions, and has neither TLS nor limits on clients. For that, use TensorFlow Serving.

It serves the newest version. http://127.0.0.1:8501 shows a page on which one types a text and sees the answer.
"""

import argparse
import html
import json
import os
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from keras_tx.serving.rest import ServedModel, latest_version
from keras_tx.serving.rest_json import RestError

LARGEST_BODY = 16 * 1024 * 1024  # bytes of a request
PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Server(ThreadingHTTPServer):
    """An HTTP server for one model. It takes the port at once, and answers after `load`.

    Args:
        folder: the model's folder, such as "saved_models/reviews".
        host: the address to listen at.
        port: the port; 0 for a free one, which `server_port` then names.
        model_name: the model's name in requests; None: that of the folder.
        largest_body: the largest number of bytes of a request.

    Raises:
        FileNotFoundError: there is no version in the folder.
        ValueError: the folder is a URL, or TensorFlow cannot load from a folder of its name.
        OSError: the port is taken, or the address is not of this machine.
    """

    daemon_threads = True
    request_queue_size = 128  # connections that may wait: of 24 at once some failed with Python's 5

    def __init__(
        self,
        folder: str | Path,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str | None = None,
        largest_body: int = LARGEST_BODY,
    ):
        latest_version(folder)
        self.folder, self.model_name, self.largest_body = folder, model_name, largest_body
        self.model: ServedModel | None = None
        super().__init__((host, port), Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise

    def load(self) -> ServedModel:
        """Loads the model and begins to listen."""
        self.model = ServedModel(self.folder, self.model_name)
        self.server_activate()
        return self.model


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of a connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds in which a client must send something

    def do_GET(self) -> None:
        if self.headers.get("Content-Length", "0").strip("0") or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body stays unread
        if self.path.partition("?")[0] == "/":
            model = self._model()
            page = PAGE.read_text(encoding="utf-8")
            values = {"{{name}}": model.name, "{{version}}": str(model.version)}
            values["{{generation}}"] = json.dumps(model.generation)
            for mark, value in values.items():
                page = page.replace(mark, html.escape(value))
            self._send(200, page.encode(), "text/html; charset=utf-8")
        elif self.path == "/favicon.ico":
            self._send(204, b"", "image/x-icon")
        else:
            self._answer("GET", b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        length = length.lstrip("0") or length[:1]
        if not length.isdecimal():
            self.close_connection = True
            self.send_error(411, "The request must have a Content-Length")
        elif len(length) > 18 or int(length) > self.server.largest_body:  # int() refuses more than 4,300 digits
            self.close_connection = True  # the body stays unread
            largest = self.server.largest_body
            received = f"{length} bytes" if len(length) <= 18 else f"a Content-Length of {len(length)} digits"
            self.send_error(413, f"The request must have at most {largest} bytes. Received: {received}")
        else:
            self._answer("POST", self.rfile.read(int(length)))

    def _model(self) -> ServedModel:
        if self.server.model is None:
            raise RuntimeError("`Server.load` must be called before requests are answered.")
        return self.server.model

    def _answer(self, method: str, body: bytes) -> None:
        try:
            self._send_json(200, self._model().answer(method, self.path, body))
        except RestError as error:
            self._send_json(error.status, {"error": str(error)})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors of HTTP itself are JSON, too. The connection ends: the body of the request may be unread."""
        self.close_connection = True
        self._send_json(code, {"error": message or self.responses[code][0]})

    def _send_json(self, status: int, value: object) -> None:
        text = json.dumps(value, indent=4 if status == 200 else None, ensure_ascii=False)
        self._send(status, text.encode("utf-8", "replace"), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m keras_tx.serving.serve",
        description="A local server with TensorFlow Serving's REST routes, for trying an exported model and for tests, "
        "not for production. It serves the newest version, and shows a page at /.",
    )
    parser.add_argument("folder", help="the model's folder, such as saved_models/reviews")
    parser.add_argument("--port", type=int, default=8501, help="the port (default: 8501); 0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: this machine only)")
    parser.add_argument("--model-name", help="the model's name in requests (default: that of the folder)")
    given = parser.parse_args(arguments)
    if not 0 <= given.port < 65536:
        parser.error(f"--port must be a number from 0 to 65535. Received: {given.port}")
    try:
        server = Server(given.folder, given.host, given.port, given.model_name)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(
            f"--host and --port must be a free port of this machine. Received: {given.host}, {given.port}: "
            f"{error.strerror}"
        )
    with server:
        try:
            model = server.load()
        except ImportError as error:  # the extra for tokenizers is missing
            parser.error(str(error))
        address = f"http://{given.host}:{server.server_port}"
        print(f"{model.name}, version {model.version}: {address}/v1/models/{model.name}:predict")
        print(f"A page to try it: {address}/", "For tests, not for production. Ctrl+C stops it.", sep="\n", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    # This process only answers, so TensorFlow need not arrange the weights for the processor in each call. In `main` it
    # would hold for a caller who trains later in the same process, and would then compute with the first weights.
    os.environ.setdefault("TF_ONEDNN_ASSUME_FROZEN_WEIGHTS", "1")
    sys.exit(main())
