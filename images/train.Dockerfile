# The image of the training ranks: torch, its collectives, DeepSpeed; and of evaluate where `cluster.slice` gives it a
# share of an accelerator, with what that needs: MLflow, and KFP's executor. With KIND=ray and EXTRAS as images/build.sh
# has them, that of the nodes of a Ray cluster, each of which runs every step. One file for every kind of accelerator:
#   VARIANT=nvidia  the plain base; the CUDA wheels of torch bring CUDA and NCCL
#   VARIANT=cpu     the plain base; the CPU wheel of torch
#   VARIANT=amd|ascend|gaudi  BASE is the vendor's image, TORCH=base uses the torch that it brings
# BASE should carry a digest (name:tag@sha256:...); images/build.sh --release insists on it.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS dependencies
USER 0:0
ARG TORCH=
ARG TORCH_CPU_INDEX=
ARG VARIANT=nvidia
ARG EXTRAS=train,deepspeed,tracking,pipelines,tasks,metrics,nvml,otel
WORKDIR /build
COPY images/install.sh images/lock.txt images/torch.* pyproject.toml constraints.txt ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    sh install.sh dependencies "${EXTRAS}" "${VARIANT}" "${TORCH}"

FROM dependencies AS code
COPY . .
RUN sh install.sh code

FROM ${BASE}
USER 0:0
# torch.compile builds its kernels when it starts, and DeepSpeed what writes to a disk (parallel.offload_path).
RUN command -v g++ >/dev/null || { \
    apt-get update -qq && apt-get install -qq --yes --no-install-recommends g++ libaio-dev >/dev/null && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/log/alternatives.log \
        /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old /var/lib/dpkg/*-old; }
COPY --from=dependencies /opt/holdfast/venv /opt/holdfast/venv
COPY --from=code /opt/holdfast/code /opt/holdfast/code
ARG VERSION=
ARG REVISION=
ARG SOURCE=
ARG VARIANT=nvidia
ARG KIND=train
LABEL org.opencontainers.image.title="holdfast-${KIND}" \
    org.opencontainers.image.description="Holdfast: the ranks of a training job, or the nodes of a Ray" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.source="${SOURCE}" \
    org.opencontainers.image.licenses="Apache-2.0" \
    dev.holdfast.image="${KIND}-${VARIANT}" \
    dev.holdfast.selfcheck="holdfast-selfcheck"
# Everything that is written goes under /tmp: with an emptyDir there, the root file system may be read-only.
# A vendor's own PATH stays behind ours.
ENV PATH=/opt/holdfast/code/bin:/opt/holdfast/venv/bin:${PATH} \
    HOME=/tmp USER=holdfast HOLDFAST_HOME=/tmp/holdfast \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 \
    PYTORCH_ALLOC_CONF=expandable_segments:True \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HOLDFAST_IMAGE=${KIND}-${VARIANT} HOLDFAST_GIT_COMMIT="${REVISION}"
USER 1000:1000
WORKDIR /tmp
RUN holdfast-selfcheck
CMD ["holdfast-selfcheck"]
