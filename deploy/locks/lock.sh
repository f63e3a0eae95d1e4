#!/bin/sh
# Writes the locks that the Dockerfile installs from: every package with its version and hashes, no registry's name.
# Needs uv (`pip install uv`). An argument such as `--upgrade` goes to uv.
set -eu
cd "$(dirname "$0")/../.."
lock() { # NAME SOURCE OPTIONS...
    name=$1 source=$2
    shift 2
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --custom-compile-command deploy/locks/lock.sh --output-file "deploy/locks/$name.txt" "$@" "$source"
}
lock cpu pyproject.toml --extra daemon --excludes deploy/locks/not-on-cpu.txt "$@" deploy/locks/cpu.in
lock cuda12 pyproject.toml --extra cuda12 "$@"
# The torch that the tests run with; that of CUDA 12 is the last one that PyPI has for it.
lock cuda13 pyproject.toml --extra cuda13 --constraints deploy/locks/tested.in "$@"
lock build deploy/locks/build.in "$@"
lock sbom deploy/locks/sbom.in "$@"
