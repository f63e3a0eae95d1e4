# The daemon under its keeper, `kvferry keep`, for one kind of machine:
#
#     docker build --target cpu -t kvferry:cpu .                    host memory, no torch
#     docker build --build-arg CUDA=13 -t kvferry:cuda13 .          GPUs with a driver for CUDA 13 (580 and later)
#     docker build --build-arg CUDA=12 -t kvferry:cuda12 .          GPUs with an older driver
#     docker build --target engine --build-arg ENGINE=vllm/vllm-openai:v0.32.0 -t vllm-kvferry .
#     docker build --target run --build-arg ENGINE=vllm/vllm-openai:v0.32.0 -t vllm-kvferry:run .     for kvferry run
#
# What is installed is fixed by deploy/locks. BASE may be any Debian with Python 3.11 or later in its packages; name it
# by digest to make the build repeatable. No CUDA image is needed: the wheels bring CUDA's libraries, and the container
# runtime brings the driver's. A mirror for pip goes in as a secret: --secret id=pip.conf,src=$HOME/.config/pip/pip.conf

ARG BASE=debian:bookworm-slim
ARG ENGINE=vllm/vllm-openai:v0.32.0

FROM ${BASE} AS python
# The base has one version of a package; which one is chosen with the base.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin

FROM python AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3-venv \
    && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
    && python3 -m venv /opt/build \
    && python3 -m venv --without-pip /opt/kvferry
WORKDIR /src
COPY deploy/locks/build.txt deploy/locks/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/build/bin/pip install --no-cache-dir --require-hashes --requirement deploy/locks/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY clients clients
COPY daemon daemon
COPY proto proto
# The tag's, as there is no git here: --build-arg VERSION=0.1.0. Without it the image says 0.0.
ARG VERSION=
RUN SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} \
    /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM build AS build-cpu
COPY deploy/locks/cpu.txt deploy/locks/
# nixl_ep, for expert parallelism, is 90 MB that kvferry does not use.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/build/bin/pip --python /opt/kvferry/bin/python install --no-cache-dir --no-deps --require-hashes \
        --requirement deploy/locks/cpu.txt \
    && /opt/build/bin/pip --python /opt/kvferry/bin/python install --no-cache-dir --no-deps /wheels/*.whl \
    && rm -rf /opt/kvferry/lib/python3*/site-packages/nixl_ep*

FROM build AS build-cuda
ARG CUDA=13
COPY deploy/locks/cuda${CUDA}.txt deploy/locks/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    /opt/build/bin/pip --python /opt/kvferry/bin/python install --no-cache-dir --no-deps --require-hashes \
        --requirement "deploy/locks/cuda${CUDA}.txt" \
    && /opt/build/bin/pip --python /opt/kvferry/bin/python install --no-cache-dir --no-deps /wheels/*.whl \
    && rm -rf /opt/kvferry/lib/python3*/site-packages/nixl_ep*

# An engine's image with the client in it: the plug-ins kvferry.vllm and kvferry.sglang, and what they need beside the engine's
# own packages. Its own versions stay (no lock): the client's lower bounds are older than what an engine of today has.
# hadolint ignore=DL3006
FROM ${ENGINE} AS engine
COPY --from=build /wheels /wheels
# hadolint ignore=DL3013
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m pip install --no-cache-dir /wheels/*.whl \
    && rm -rf /wheels

# An engine's image with a daemon in it as well, for `kvferry run` (docs/one-host.md): its own torch is the daemon's.
# hadolint ignore=DL3006
FROM ${ENGINE} AS run
COPY --from=build /wheels /wheels
# hadolint ignore=DL3013
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m pip install --no-cache-dir "$(echo /wheels/*.whl)[daemon]" \
    && python3 -m pip install --no-cache-dir --no-deps nixl-cu13 \
    && rm -rf /wheels
ENTRYPOINT ["kvferry"]
CMD ["run", "--help"]

# What is in the image, as CycloneDX: docker build --target sbom --output type=local,dest=. .
FROM build AS sbom-made
COPY deploy/locks/sbom.txt deploy/locks/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install --no-cache-dir --require-hashes --requirement deploy/locks/sbom.txt
COPY --from=build-cpu /opt/kvferry /opt/kvferry
RUN /opt/sbom/bin/cyclonedx-py environment --output-format JSON --output-file /sbom.json /opt/kvferry/bin/python

FROM scratch AS sbom
COPY --from=sbom-made /sbom.json /sbom.json

FROM python AS runtime
# The user of the engine's container must be the same: the engine's socket is open to its owner only.
RUN useradd --uid 10001 --user-group --create-home --home-dir /home/kvferry --shell /usr/sbin/nologin kvferry \
    && install --directory --owner kvferry --group kvferry --mode 0700 /run/kvferry
COPY deploy/healthz.py /usr/local/bin/kvferry-healthz
ENV PATH=/opt/kvferry/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NIXL_LOG_LEVEL=WARN \
    KVFERRY_LOG_FORMAT=json
USER 10001:10001
WORKDIR /home/kvferry
EXPOSE 7410 7411
# Alive, not ready: a daemon whose engine has not come yet is healthy.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 CMD ["kvferry-healthz"]
ENTRYPOINT ["kvferry"]
CMD ["keep"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/kvferry /opt/kvferry

FROM runtime AS cuda
# The container runtime puts the GPUs named in NVIDIA_VISIBLE_DEVICES into the container; a DRA claim needs no name here.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    KVFERRY_DEVICE=cuda:0
COPY --from=build-cuda /opt/kvferry /opt/kvferry
