"""REST: the routes, the gate before them, one form of error. `app` makes the application, `server` serves it."""
