"""The page itself: one component whose HTML, style and script lie in `assets`, and three functions that it calls.

Gradio serves it. Nothing is fetched from anywhere else, and nothing is reported to anyone.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from torchcaps.demo.request import model_of
from torchcaps.demo.shelf import Shelf

ASSETS = Path(__file__).parent / "assets"
HOST, PORT = "127.0.0.1", 7860
NEEDS = "the page needs Gradio 6.31 or newer: pip install 'torchcaps[demo]'"


def build(runs: Sequence[str | os.PathLike[str]] = ()) -> Any:
    """The page as a `gradio.Blocks`, of these runs and of the weights that come with the package."""
    shelf = Shelf(runs)
    gradio = _gradio()
    shelf[shelf.names[0]].warm_up()
    lock = Lock()  # couplings are read off through hooks, one picture at a time

    def about(request: Any) -> dict[str, Any]:
        with lock:
            return answered(lambda: shelf.about(model_of(request) or shelf.names[0]))

    def read(request: Any) -> dict[str, Any]:
        with lock:
            return answered(lambda: shelf[model_of(request) or shelf.names[0]].answer(request))

    def path(request: Any) -> dict[str, Any]:
        with lock:
            return answered(lambda: shelf[model_of(request) or shelf.names[0]].path(request))

    with gradio.Blocks(title="torchcaps", analytics_enabled=False, fill_width=True) as page:
        gradio.HTML(
            html_template=(ASSETS / "page.html").read_text(),
            js_on_load=(ASSETS / "page.js").read_text(),
            apply_default_css=False,
            server_functions=[about, read, path],
        )
    return page


def serve(
    runs: Sequence[str | os.PathLike[str]] = (),
    *,
    host: str = HOST,
    port: int = PORT,
    share: bool = False,
    block: bool = True,
) -> str:
    """Shows the page until Ctrl-C, or with block=False gives its address back at once.

    Args:
        host: 127.0.0.1 is for this computer only, 0.0.0.0 for all that can reach it.
        port: 0 takes one that is free.
        share: a public address through Gradio's servers, for a week.
    """
    port = free_port(host, port)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # a picture is small, and the browser wants to work too
    page = build(runs)
    gradio, fonts = _gradio(), ("system-ui", "sans-serif")
    _, url, public = page.launch(
        server_name=host,
        server_port=port,
        share=share,
        quiet=True,
        prevent_thread_lock=True,
        ssr_mode=False,
        footer_links=[],
        theme=gradio.themes.Base(font=fonts, font_mono=("ui-monospace", "monospace")),
        css=(ASSETS / "page.css").read_text(),
        head='<meta name="referrer" content="no-referrer">',
    )
    if block:
        print(f"torchcaps: the page is at {url} (Ctrl-C ends it)", flush=True)
        if public:
            print(f"torchcaps: and for everyone at {public}", flush=True)
        page.block_thread()
    return url


def answered(what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it gives and how long it took, or the sentence for what cannot be done."""
    start = time.perf_counter()
    try:
        return {**what(), "seconds": round(time.perf_counter() - start, 4)}
    except ValueError as error:
        return {"error": str(error)}


def free_port(host: str, port: int) -> int:
    """The port, once it is known to be free; for 0 one that is."""
    if not 0 <= port < 65536:
        raise ValueError(f"a port is a number from 0 to 65535, got {port}")
    try:
        where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise ValueError(f"{host!r} is no address of this computer; 127.0.0.1 and 0.0.0.0 are") from None
    with socket.socket(where[0], socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where[4])
        except OSError as error:
            raise ValueError(_why(error, host, port)) from None
        return int(probe.getsockname()[1])


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use; --port {port + 1 if port < 65535 else 0} takes another, --port 0 any that is free"
        )
    if error.errno == errno.EACCES:
        return f"port {port} may not be used without more rights; those from 1024 on may"
    return f"{host!r} is no address of this computer; 127.0.0.1 and 0.0.0.0 are"


def _gradio() -> Any:
    """Gradio, which reads at its import whether it may report home."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        import gradio
    except ImportError:
        raise ValueError(NEEDS) from None
    if tuple(int(number) for number in gradio.__version__.split(".")[:2]) < (6, 31):
        raise ValueError(f"{NEEDS}, as {gradio.__version__} is older")
    return gradio
