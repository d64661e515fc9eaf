"""The report of one or several runs: `python -m exgrpo.tools.report RUN [RUN ...] [--output FILE | --follow]`.

A report that follows its runs has a server for this machine, whose page asks again and again whether a run has gone on.
A page of somebody else could reach the port by a name that it makes point here. So a request is answered only if its
`Host` is the address of this server. Nothing is changed by any request.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

from exgrpo.extras import needs

with needs(__name__, "exgrpo[train]"):
    import tyro
    from pydantic import BaseModel, ConfigDict, Field

    from exgrpo.train.common.errors import ConfigError, ExgrpoError, ReportError, print_error
    from exgrpo.train.config.command_line import options_of
    from exgrpo.train.metrics.log_files import METRICS, SAMPLES
    from exgrpo.train.metrics.report.page import named, page_about, write_report
    from exgrpo.train.metrics.report.runs import load_run

PROGRAM = "python -m exgrpo.tools.report"
ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
WATCHED = (METRICS, SAMPLES, "config.yaml")
SECURITY = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Options(BaseModel):
    """Write a report about runs as one HTML page, or follow them on one."""

    model_config = ConfigDict(frozen=True)

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = Field(description="Folders of runs.")
    output: Path | None = Field(
        None, description="The page; RUN/report.html where there is one run, else report.html in the current folder."
    )
    follow: bool = Field(
        False, description="Write no page: serve one to this machine, which takes new steps while the runs go on."
    )
    port: int | None = Field(
        None, ge=0, le=65535, description="Of the page with --follow; 0 or none: any that is free."
    )


def main(argv: list[str]) -> int:
    """Run the program; returns its exit status."""
    try:
        options = options_of(Options, PROGRAM, argv)
        if options.follow:
            return _follow(options)
        if options.port is not None:
            raise ConfigError("--port is that of a page which is followed: give --follow with it")
        single = options.runs[0] if len(options.runs) == 1 else Path()
        output = options.output or single / "report.html"
        write_report(options.runs, output)
    except ExgrpoError as error:
        return print_error(error)
    print(f"report in {output}")
    return 0


def _follow(options: Options) -> int:
    if options.output is not None:
        raise ConfigError("--output: with --follow, no page is written; leave one of the two out")
    try:
        with open_server(options.runs, options.port or 0) as server:
            print(f"the report is at http://{ADDRESS}:{server.server_port}/ until Ctrl-C", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        print("the report is not served any more")
    return 0


class FollowedRuns:
    """Runs as they are now.

    Args:
        runs: their folders; what is not there yet is waited for.

    Raises:
        ReportError: there are none.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        self._names = named(runs)

    def version(self) -> str:
        """What changes when a file of a run changes, comes or goes."""
        seen = [_state(folder / name) for folder in self._names for name in ("", *WATCHED)]
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def page(self) -> str:
        """The page about them, with a line for each run of which there is nothing to show."""
        version = self.version()  # before anything is read: what is written meanwhile makes a newer one
        data, waiting = [], []
        for folder, name in self._names.items():
            if not os.path.isdir(folder):
                waiting.append(f"{name}: there is no folder {folder}")
            elif _is_empty(folder / METRICS):
                waiting.append(f"{name}: waiting for the first step")
            else:
                try:
                    data.append(load_run(folder, name))
                except ReportError as error:
                    waiting.append(str(error))
        return page_about(data, version=version, waiting=waiting)


def _state(path: Path) -> tuple[int, int] | None:
    """Time and size of a file; of a folder, whether it is there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (0, 0) if path.is_dir() else (found.st_mtime_ns, found.st_size)


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except FileNotFoundError:
        return True
    except OSError:
        return False


def open_server(runs: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of the page about these runs, which `serve_forever` starts.

    Args:
        runs: their folders.
        port: to listen at; 0: any that is free.

    Raises:
        ReportError: there is no run, or the port is taken.
    """
    followed = FollowedRuns(runs)
    try:
        return _Server(followed, port)
    except OSError as error:
        raise ReportError(
            f"--port {port} cannot be used ({error.strerror}): choose another one, or 0 for any"
        ) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, followed: FollowedRuns, port: int) -> None:
        self.followed = followed
        super().__init__((ADDRESS, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what is broken; a reader who has closed the page meanwhile is nothing."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer with the page, or with its version."""
        hosts = {f"{name}:{self.server.server_port}" for name in NAMES}
        if self.headers.get_all("Host", []) not in [[host] for host in hosts]:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this server answers to its own address only\n")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.followed.page())
        elif self.path == "/version":
            self._answer(HTTPStatus.OK, "text/plain", self.server.followed.version())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing here\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in SECURITY.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Requests are not told."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
