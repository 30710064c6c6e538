# The image of the light steps: preprocess, evaluate, register, notify, triggers, and the launcher of train. CPU only.
# Three layers that change apart: the base, the libraries of the lock, Holdfast itself (a megabyte, on every commit).
# BASE should carry a digest (name:tag@sha256:...); images/build.sh --release insists on it.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS dependencies
ARG TORCH=
ARG TORCH_CPU_INDEX=
WORKDIR /build
COPY images/install.sh images/lock.txt images/torch.* pyproject.toml constraints.txt ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    sh install.sh dependencies preprocess,dvc,train,tracking,pipelines,tasks,metrics,otel cpu "${TORCH}"

FROM dependencies AS code
COPY . .
RUN sh install.sh code

FROM ${BASE}
COPY --from=dependencies /opt/holdfast/venv /opt/holdfast/venv
COPY --from=code /opt/holdfast/code /opt/holdfast/code
ARG VERSION=
ARG REVISION=
ARG SOURCE=
LABEL org.opencontainers.image.title="holdfast" \
    org.opencontainers.image.description="Holdfast: preprocess, evaluate, register, notify, and the launcher of train" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.source="${SOURCE}" \
    org.opencontainers.image.licenses="Apache-2.0" \
    dev.holdfast.image="light" \
    dev.holdfast.selfcheck="holdfast-selfcheck"
# Everything that is written goes under /tmp: with an emptyDir there, the root file system may be read-only.
ENV PATH=/opt/holdfast/code/bin:/opt/holdfast/venv/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp USER=holdfast HOLDFAST_HOME=/tmp/holdfast \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 \
    HOLDFAST_IMAGE=light HOLDFAST_GIT_COMMIT="${REVISION}"
USER 1000:1000
WORKDIR /tmp
RUN holdfast-selfcheck
CMD ["holdfast", "--help"]
