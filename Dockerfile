# The program on one node, with its compiler: docs/how-to/deploy.md#docker. A change of our code rebuilds the last layers only.

# Renew version and digest together, or check them: docker buildx imagetools inspect python:3.12.14-slim-bookworm
ARG PYTHON=python:3.12.14-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579
FROM ${PYTHON}

# The compiler of the layers' kernels: they are compiled for the processor on which they run. Without
# versions, since Debian removes earlier ones.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --uid 1000 --user-group --no-create-home --home-dir /cache metalearn \
    && install --directory --owner=1000 --group=1000 /cache /data /work /work/outputs

# What the program depends on, at the versions of the lock. For CPU wheels name PyTorch's index of them.
ARG TORCH_INDEX=
WORKDIR /app
COPY pyproject.toml requirements.lock deploy/docker/dependencies.py ./
COPY hydra_async_sweeper/pyproject.toml hydra_async_sweeper/
RUN python dependencies.py sweep > dependencies.txt \
    && pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --requirement dependencies.txt --constraint requirements.lock

COPY benchmarks benchmarks
COPY conf conf
COPY distributed distributed
COPY hydra_async_sweeper hydra_async_sweeper
COPY metalearn metalearn
COPY scripts scripts
COPY train.py ./

# Hydra finds a plugin only on the path.
RUN pip install --no-cache-dir --no-deps --constraint requirements.lock --editable ./hydra_async_sweeper

ENV HOME=/cache METALEARN_CACHE=/cache METALEARN_DATA=/data MPLCONFIGDIR=/cache/matplotlib \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["python", "/app/train.py"]
