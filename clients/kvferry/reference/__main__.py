"""python -m kvferry.reference serve: a model over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from kvferry.errors import KvferryError
from kvferry.flags import add_flags, checked
from kvferry.reference.config import PRESETS, EngineConfig, ModelSource, read_model_config
from kvferry.reference.engine import Engine
from kvferry.reference.server import build_app
from kvferry.reference.tokenizer import tokenizer_of

EPILOG = """\
A single engine, then a request:
  python -m kvferry.reference serve --preset demo --port 8100
  curl localhost:8100/v1/completions -H 'content-type: application/json' -d '{"prompt": "Ferry me", "max_tokens": 8}'

A prefill engine of two ranks, one kvferry daemon beside each, and a decode engine of another shape:
  python -m kvferry.reference serve --preset demo --engine-id prefill --port 8100 --tp 2 \\
      --daemon /run/kvferry/p0.sock --daemon /run/kvferry/p1.sock
  python -m kvferry.reference serve --preset demo --engine-id decode --port 8200 --layout cross_layer --block-size 8 \\
      --daemon /run/kvferry/d0.sock

Both must serve the same model: the same --checkpoint, or the same shape and --seed. Everything else may differ.
A router sends {"kv_transfer_params": {"do_remote_decode": true}} to prefill and what comes back to decode.
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m kvferry.reference", description=__doc__)
    serve = top.add_subparsers(dest="command", required=True).add_parser(
        "serve", help="serve a model over HTTP", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="A small Llama engine with a paged KV cache, which kvferry daemons may own.",
    )  # fmt: skip
    add = serve.add_argument
    model = serve.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=sorted(PRESETS), default="demo", help="a built-in shape (default: demo)")
    model.add_argument("--config", type=Path, help="a config.json; the weights come from --seed")
    model.add_argument("--checkpoint", type=Path, help="folder with config.json, safetensors and maybe tokenizer.json")
    add("--seed", type=int, default=0, help="of the random weights")
    add("--model-name", help="the name in /v1/models")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8100, help="0 takes a free one; the ready line names it")
    add_flags(serve, EngineConfig)
    return top


def model_source(args: argparse.Namespace) -> ModelSource:
    name = args.model_name or "reference"
    if args.checkpoint is not None:
        name = args.model_name or args.checkpoint.name or name
        return ModelSource(read_model_config(args.checkpoint / "config.json"), args.checkpoint.resolve(), name=name)
    config = read_model_config(args.config) if args.config is not None else PRESETS[args.preset]
    return ModelSource(config, seed=args.seed, name=name)


async def serve(args: argparse.Namespace, how: EngineConfig) -> int:
    """Until a signal or until the engine fails. Returns the exit status."""
    source = model_source(args)
    engine = Engine(source, how)
    listener = socket.create_server((args.host, args.port), backlog=256)
    try:
        await engine.start()
        app = build_app(engine, tokenizer_of(source))
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, timeout_keep_alive=60)
        server = uvicorn.Server(config)
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again once it has served
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        engine.failed.add_done_callback(lambda _: setattr(server, "should_exit", True))
        host, port = listener.getsockname()[:2]
        print(f"ready on http://{host}:{port}", flush=True)
        await server.serve(sockets=[listener])
    finally:
        failure = engine.failed.result() if engine.failed.done() else None
        await engine.stop()
        listener.close()
    if failure is not None:
        print(f"kvferry.reference: {failure}", file=sys.stderr, flush=True)
    return 0 if failure is None else 1


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    config = checked(parser(), EngineConfig, args)
    try:
        return asyncio.run(serve(args, config))
    except (KvferryError, OSError) as error:
        print(f"kvferry.reference: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
