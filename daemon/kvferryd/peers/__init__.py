"""Other daemons: which may be dialled, the handshake, and the roster of one engine's ranks."""
