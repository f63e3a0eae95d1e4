"""The doors of the daemon: REST for routers and people, gRPC for engines and peers."""
