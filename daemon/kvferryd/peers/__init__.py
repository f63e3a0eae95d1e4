"""Other daemons: who may be spoken to, the handshake, and the roster of one engine's ranks."""
