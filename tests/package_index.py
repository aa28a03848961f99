"""Wheels made by tests, in a folder or behind a server that can stop in the middle: no network is touched."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import attrs


def write_wheel(
    folder: Path, distribution: str, version: str, files: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED
) -> Path:
    """A wheel that pip takes, with ``files`` in it."""
    stem = f"{distribution.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nRequires-Dist: not-wanted\n"
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def pip_settings(**settings: str) -> dict[str, str]:
    """Environment variables that make pip forget this machine's settings and take these.

    pip splits lists at spaces.  A folder is given as a URL, which has none.
    """
    return {"PIP_CONFIG_FILE": "/dev/null", **{f"PIP_{name.upper()}": value for name, value in settings.items()}}


@attrs.define
class Server:
    """A package index over HTTP.  ``manner``: how it hands out wheels from now on."""

    url: str
    manner: Literal["whole", "stall", "cut"] = "whole"
    """``stall``: half, then nothing until ``let_go``; ``cut``: half, then the connection ends."""
    stalled: threading.Event = attrs.field(factory=threading.Event)
    let_go: threading.Event = attrs.field(factory=threading.Event)
    downloads: list[str] = attrs.field(factory=list)


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """Serve the wheels of a folder."""
    server = Server(url="")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wheel = folder / self.path.rpartition("/")[2]
            if wheel.suffix == ".whl" and wheel.is_file():
                self.give(wheel)
            else:
                links = "".join(f'<a href="/{path.name}">{path.name}</a>' for path in sorted(folder.glob("*.whl")))
                self.answer("text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode())

        def answer(self, kind: str, content: bytes, size: int | None = None) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content) if size is None else size))
            self.end_headers()
            self.wfile.write(content)

        def give(self, wheel: Path) -> None:
            content = wheel.read_bytes()
            server.downloads.append(wheel.name)
            whole = server.manner == "whole"
            self.answer("application/octet-stream", content if whole else content[: len(content) // 2], len(content))
            if server.manner == "stall":
                self.wfile.flush()
                server.stalled.set()
                server.let_go.wait()
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    server.url = f"http://127.0.0.1:{httpd.server_port}/simple"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.let_go.set()
        httpd.shutdown()
        thread.join()
        httpd.server_close()
