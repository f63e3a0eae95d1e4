"""Generated from proto/kvferry/v1 by `make proto`."""
