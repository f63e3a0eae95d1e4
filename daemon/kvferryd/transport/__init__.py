"""NIXL behind a small interface: an agent that registers memory, knows peers and reads from them."""

from kvferryd.transport.agent import Agent
from kvferryd.transport.metadata import Metadata
from kvferryd.transport.read import Descriptors, Read, Span, TransportError

__all__ = ["Agent", "Descriptors", "Metadata", "Read", "Span", "TransportError"]
