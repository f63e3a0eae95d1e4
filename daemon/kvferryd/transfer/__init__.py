"""Leases (source side) and transfers (destination side): two explicit state machines, and what moves between."""
