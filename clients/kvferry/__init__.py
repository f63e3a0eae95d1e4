"""kvferry: the light client of the KV-cache transfer daemon.

`kvferry.manifest` describes a cache, `kvferry.engine` is how an engine speaks to its daemon,
`kvferry.router` is how a router does, `kvferry.memory` maps shared regions.
"""

__version__ = "0.1.0"
