# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Serve the explorer's page, and nothing else of this machine."""

import os
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from pathlib import Path


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported

import gradio as gr
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse

from diffllama.evaluation.models import LoadedModel
from diffllama.explorer.app import CSS, PLOTLY, Explorer


LOOPBACK = ("127.0.0.1", "localhost", "::1")

ROUTES = re.compile(
    r"/|/config/?|/theme\.css|/favicon\.ico|/manifest\.json|/plotly\.min\.js|/(assets|static|svelte)/[\w./-]+"
    r"|/gradio_api/(queue/(join|data)|startup-events|heartbeat/\w+|cancel|reset|info|theme\.css)/?"
)
"""Paths that the page needs. Gradio has others: they read and take files, and pass requests on."""

POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; base-uri 'self'; form-action 'self'"
)
"""Content security policy: the page loads nothing from elsewhere, and sends nothing there."""


def application(models: Sequence[LoadedModel], hosts: Sequence[str] | None) -> FastAPI:
    """Return the web application.

    Args:
        models: one model, or a model and its baseline, whose names differ.
        hosts: names under which browsers may reach it; `None` for any. Restricting them keeps other pages, whose
            address was made to lead to this machine, from reading it.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if hosts is not None and request.url.hostname not in hosts:
            return PlainTextResponse("Unknown host.", 400)
        if not ROUTES.fullmatch(request.scope["path"]) or ".." in request.scope["path"]:
            return PlainTextResponse("Not found.", 404)
        response = await call_next(request)
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    @app.get(f"/{PLOTLY}")
    def plotly() -> FileResponse:
        return FileResponse(Path(str(files("plotly"))) / "package_data" / PLOTLY, media_type="text/javascript")

    page = Explorer(models).page()
    page.queue(default_concurrency_limit=4)
    return gr.mount_gradio_app(
        app,
        page,
        path="/",
        theme=gr.themes.Default(),
        css=CSS,
        show_error=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        pwa=False,
        run_history=False,
        footer_links=[],
    )


def serve(models: Sequence[LoadedModel], host: str, port: int, show: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        models: one model, or a model and its baseline, whose names differ.
        host: address to listen on.
        port: port to listen on; 0 for a free one.
        show: called with the page's address once it can be opened.

    Raises:
        OSError: the address is in use or not one of this machine.
    """
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(f"--host {host} --port {port}: {error.strerror or error}. Name another port.") from error
    app = application(models, LOOPBACK if host in LOOPBACK else None)
    name = f"[{host}]" if ":" in host else host

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            show(f"http://{name}:{listener.getsockname()[1]}")

    Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)).run([listener])
