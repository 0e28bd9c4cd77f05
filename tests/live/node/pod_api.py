"""The part of a Kubernetes API server that a node asks: its pods, listed and watched over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

NODE = "here"
ASKED = {"fieldSelector": f"spec.nodeName={NODE}", "labelSelector": "coretide.io/class"}


class PodApi(ThreadingHTTPServer):
    """The server; it serves until it is shut down."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.pods: dict[str, Any] = {}
        self.events: list[tuple[str, Any]] = []
        self.news = threading.Condition()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def tell(self, pods: Mapping[str, Any]) -> None:
        """Have these pods, and no others."""
        now = json.loads(json.dumps(pods))
        with self.news:
            for name, pod in self.pods.items():
                if name not in now:
                    self.events.append(("DELETED", pod))
            for name, pod in now.items():
                if pod != self.pods.get(name):
                    self.events.append(("MODIFIED" if name in self.pods else "ADDED", pod))
            self.pods = now
            self.news.notify_all()


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PodApi

    def log_message(self, *said: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        where = urlparse(self.path)
        asked = {key: value[0] for key, value in parse_qs(where.query).items()}
        if where.path != "/api/v1/pods" or any(asked.get(key) != ASKED[key] for key in ASKED):
            self._say({"message": f"not asked for here: {self.path}"}, 403)
        elif "watch" in asked:
            self._watch(int(asked["resourceVersion"]))
        else:
            with self.server.news:
                pods, version = list(self.server.pods.values()), len(self.server.events)
            self._say({"items": pods, "metadata": {"resourceVersion": str(version)}}, 200)

    def _say(self, content: Any, status: int) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _watch(self, version: int) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            with self.server.news:
                while len(self.server.events) == version:
                    self.server.news.wait()
                new = self.server.events[version:]
            version += len(new)
            for kind, pod in new:
                line = json.dumps({"type": kind, "object": pod}).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
