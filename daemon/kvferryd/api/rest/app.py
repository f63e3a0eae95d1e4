"""The application: the routes, and around them the gate that every request passes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvferry import __version__
from kvferry.asgi import client_gone
from kvferry.errors import KvferryError
from kvferry.page import routes as routes_of
from kvferryd.api.rest import explain, page, routes
from kvferryd.api.rest.gate import Gate, TokenFile
from kvferryd.api.rest.openapi import TAGS, document
from kvferryd.api.rest.problems import http_problem, kvferry_problem, validation_problem
from kvferryd.ferry import Ferry


class RestApp(FastAPI):
    """FastAPI whose OpenAPI document describes errors as the problem+json that they are."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = document(super().openapi(), **self.state.asks)
        return self.openapi_schema


def create_app(ferry: Ferry) -> FastAPI:
    """The REST service of one daemon. It holds no state of its own: `ferry` answers."""
    token_file = ferry.config.token_file
    app = RestApp(
        title="kvferry",
        version=__version__,
        summary="Moves finished KV cache between LLM engines",
        openapi_tags=TAGS,
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.asks = {"token": token_file is not None, "certificate": ferry.config.rest_tls}
    routers = [routes.transfers(ferry), routes.held(ferry), explain.routes(ferry), routes.daemon(ferry)]
    routers.append(routes_of(page.FILES))
    for router in routers:
        app.include_router(router)
    app.state.routes = [route for router in routers for route in router.routes]
    app.add_exception_handler(KvferryError, kvferry_problem)
    app.add_exception_handler(RequestValidationError, validation_problem)
    app.add_exception_handler(HTTPException, http_problem)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_middleware(Gate, tokens=TokenFile(token_file) if token_file else None, metrics=ferry.metrics)
    return app
