"""The engines beside this daemon: their sessions, and what is registered in them."""

from kvferryd.engine.registration import Engine

__all__ = ["Engine"]
