# An image with the packages of your own code: those of requirements.lock, with hashes, as `uv pip compile --generate-hashes`
# writes it. The folder of the code is the context:
#   docker build -f images/extend.Dockerfile --build-arg IMAGE=REGISTRY/holdfast-train-cpu@sha256:... FOLDER
# Give the result as cluster.image. Jobs compare the lock again, and install nothing.
ARG BASE=python:3.11-slim-bookworm
ARG IMAGE

FROM ${BASE} AS dependencies
COPY requirements.lock /build/requirements.lock
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --no-cache-dir --no-compile --no-deps --require-hashes --target /build/packages -r /build/requirements.lock \
    && echo "import sys; sys.path.insert(0, '/opt/holdfast/packages')" > /build/packages.pth

FROM ${IMAGE}
# In a folder before that of the image's own packages: a package that both have is that of the lock, as a whole.
COPY --from=dependencies /build/packages /opt/holdfast/packages
COPY --from=dependencies /build/packages.pth /opt/holdfast/venv/lib/python3.11/site-packages/
USER 1000:1000
RUN holdfast-selfcheck
