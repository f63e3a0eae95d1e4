"""REST: the routes, the gate before them, one form of error.

`create_app(ferry)` is the application, `rest_server(app, config)` what serves it.
"""

from kvferryd.api.rest.app import create_app
from kvferryd.api.rest.server import rest_server

__all__ = ["create_app", "rest_server"]
