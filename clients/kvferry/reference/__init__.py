"""A small but real LLM engine: the example of how an engine uses kvferry.

A driver process (HTTP, scheduler, one EngineClient per rank) and one worker process per tensor-parallel rank, whose
paged KV cache lies in memory that the rank's daemon owns. Read in this order: cache.py (how a layout becomes strides
and a manifest), scheduler.py, engine.py (publish and receive), server.py (kv_transfer_params).
"""
