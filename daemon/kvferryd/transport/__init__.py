"""NIXL behind a small interface: an agent that registers memory, knows peers and reads from them; and UCX below it."""
