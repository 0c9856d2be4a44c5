"""`python -m moe_jax.watch RUN...`: a page on localhost that follows runs, several laid over each other.

Input: run folders, finished ones or such as are still written. Output: a page with loss, tokens/s, load by layer, the
changes of the plan and when what runs in a modelled layer, until Ctrl-C. Only this machine can ask for it, and only
read. Nothing of jax is here.
"""

from __future__ import annotations

import json
import socketserver
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from absl import flags

from moe_jax.config.command_line import parse_flags, run_command
from moe_jax.errors import UserError
from moe_jax.observe.report import FollowedRun, page_of

_PORT = flags.DEFINE_integer("port", 8642, "Port of the page; 0 takes any free one.", lower_bound=0, upper_bound=65535)


def command(argv: list[str]) -> int:
    """Serve the runs that the command line names until Ctrl-C; errors are raised."""
    folders = parse_flags(argv, "moe_jax.watch", None)
    if not folders:
        raise UserError("name one or more run folders, as in python -m moe_jax.watch runs/demo")
    try:
        with WatchServer([FollowedRun(folder) for folder in folders], _PORT.value) as server:
            print(f"http://127.0.0.1:{server.server_port} shows {', '.join(folders)}; Ctrl-C ends", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        return 0


class WatchServer(ThreadingHTTPServer):
    """The page and the data of some runs, on 127.0.0.1."""

    def __init__(self, runs: list[FollowedRun], port: int):
        """Read what the runs hold and listen on `port`, 0 for any; a UserError where it cannot be had."""
        self.runs = runs
        try:
            super().__init__(("127.0.0.1", port), WatchHandler)
        except OSError as error:
            remedy = "give another --port, or --port=0 for any that is free"
            raise UserError(f"port {port} cannot be had ({error.strerror}); {remedy}") from error
        for run in runs:
            run.refresh()
        self.page, policy = page_of()
        self.policy = f"{policy}; frame-ancestors 'none'"  # which a page cannot state itself

    def server_bind(self) -> None:
        """Listen, without asking a name server for this machine's name, as the class above does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a browser that leaves before it has its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class WatchHandler(BaseHTTPRequestHandler):
    """Answers GET / with the page, /runs with their count, and /run?at=INDEX&seen=VERSION with what one has."""

    server: WatchServer
    timeout = 30  # seconds that a connection may stay silent

    def parse_request(self) -> bool:
        """Refuse what is no GET, and what is asked under another host's name: a foreign page in the same browser."""
        if not super().parse_request():
            return False
        hosts = [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]
        named = self.headers.get_all("Host", [])
        if len(named) != 1 or named[0] not in hosts:
            return self._answer(403, f"ask for http://{hosts[0]}")
        if self.command != "GET":
            return self._answer(405, "only GET is answered")
        return True

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        match url.path:
            case "/":
                self._answer(200, self.server.page, "text/html")
            case "/runs":
                self._answer(200, json.dumps(len(self.server.runs)), "application/json")
            case "/run":
                query = parse_qs(url.query)
                at = query.get("at", [""])[0]
                if not at.isascii() or not at.isdigit() or len(at) > 6 or int(at) >= len(self.server.runs):
                    self._answer(404, "there is no such run")
                    return
                try:
                    data = self.server.runs[int(at)].refresh(query.get("seen", [""])[0])
                except UserError as error:
                    self._answer(500, str(error))
                    return
                self._answer(204 if data is None else 200, "" if data is None else json.dumps(data), "application/json")
            case _:
                self._answer(404, "there is /, /runs and /run?at=0")

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> bool:
        """Send an answer and return False: `parse_request` is done with."""
        body = text.encode("utf-8")
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", self.server.policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
            *([("Allow", "GET")] if status == 405 else []),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        return False

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""


if __name__ == "__main__":
    run_command(command)
