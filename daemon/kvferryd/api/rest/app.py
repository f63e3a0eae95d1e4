"""The application: the routers, and around them the gate that every request passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvferry import __version__
from kvferry.errors import KvferryError
from kvferryd.api.rest import drain, engines, explain, health, leases, page, peers, requests, transfers
from kvferryd.api.rest.gate import Authenticated, BoundedBody, Observed
from kvferryd.api.rest.openapi import TAGS, document
from kvferryd.api.rest.problems import http_problem, kvferry_problem, validation_problem
from kvferryd.api.rest.tokens import TokenFile
from kvferryd.api.rest.waiting import ClientGone, nobody_listens
from kvferryd.metrics import Metrics

if TYPE_CHECKING:
    from kvferryd.ferry import Ferry


class RestApp(FastAPI):
    """FastAPI whose OpenAPI document describes errors as the problem+json that they are."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = document(super().openapi(), authenticated=self.state.authenticated)
        return self.openapi_schema


def create_app(ferry: Ferry, metrics: Metrics) -> FastAPI:
    """The REST service of one daemon. It holds no state of its own: `ferry` answers, `metrics` counts."""
    config = ferry.config
    app = RestApp(
        title="kvferry",
        version=__version__,
        summary="Moves finished KV cache between LLM engines",
        openapi_tags=TAGS,
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.authenticated = config.token_file is not None
    routers = [
        transfers.routes(ferry),
        requests.routes(ferry),
        leases.routes(ferry),
        peers.routes(ferry),
        engines.routes(ferry),
        explain.routes(),
        drain.routes(ferry),
        health.routes(ferry, metrics),
        page.routes(),
    ]
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(KvferryError, kvferry_problem)
    app.add_exception_handler(RequestValidationError, validation_problem)
    app.add_exception_handler(HTTPException, http_problem(routers))
    app.add_exception_handler(ClientGone, nobody_listens)
    # The last one added meets a request first.
    app.add_middleware(BoundedBody)
    if config.token_file is not None:
        app.add_middleware(Authenticated, tokens=TokenFile(config.token_file))
    app.add_middleware(Observed)
    return app
