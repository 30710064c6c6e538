#!/usr/bin/env bash
# Builds the images with whichever of docker, podman and buildah works here, checks them, and prints their sizes.
#
#   images/build.sh [--release] [light | train-ACCELERATOR | ray-ACCELERATOR]...
#
# ACCELERATOR: nvidia, cpu, amd, ascend or gaudi. Without names: light and train-nvidia. What the surroundings need is given in the environment, and none of it stays in an image:
#   BASE             base image, best with its digest; the vendor's image for amd, ascend and gaudi
#   TORCH            requirement that names the torch wheel, or `base`; light and the CPU images take the CPU wheel without it
#   TORCH_CPU_INDEX  mirror of PyTorch's index of CPU wheels
#   PIP_CONFIG_FILE  pip settings (index, certificates), mounted as a secret while packages are installed
#   BUILD_OPTIONS    more options of the builder, such as --volume /etc/ssl/certs:/etc/ssl/certs:ro
#   REGISTRY         prefix of the tags, such as registry.example/team/
#   BUILDER          docker, podman or buildah
# --release refuses a dirty checkout, a base without a digest, and a torch without a lock (images/torch.VARIANT.lock).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "images/build.sh: $*" >&2; exit 2; }

release=
names=()
for argument in "$@"; do
    case $argument in
    --release) release=yes ;;
    light | train-nvidia | train-cpu | train-amd | train-ascend | train-gaudi) names+=("$argument") ;;
    ray-nvidia | ray-cpu | ray-amd | ray-ascend | ray-gaudi) names+=("$argument") ;;
    *) fail "$argument: name light, or train-A or ray-A, with nvidia, cpu, amd, ascend or gaudi as A" ;;
    esac
done
((${#names[@]})) || names=(light train-nvidia)

builder=${BUILDER:-}
if [[ -z $builder ]]; then
    if docker info >/dev/null 2>&1; then
        builder=docker
    else
        builder=$(command -v podman || command -v buildah) || fail "install docker, podman or buildah"
        builder=${builder##*/}
    fi
fi

version=$(sed -nE 's/^version = "(.*)"$/\1/p' pyproject.toml | head -n 1)
revision=${HOLDFAST_GIT_COMMIT:-$(git describe --always --abbrev=40 --dirty --exclude='*' 2>/dev/null || :)}
source=$(git remote get-url origin 2>/dev/null | sed -nE 's#^(https?://)([^@/]*@)?(.*)$#\1\3#p' || :)
# The time of every file: that of the lock, so that the layer of the libraries is the same until the lock changes.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct -- pyproject.toml constraints.txt images 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH
if [[ -n $release ]]; then
    [[ $revision != *-dirty && -n $revision ]] || fail "--release: revision '$revision': commit every change first"
    [[ ${BASE:-} == *@sha256:* ]] || fail "--release: BASE=${BASE:-}: give the base image with its digest, name:tag@sha256:..."
fi

for name in "${names[@]}"; do
    kind=${name%%-*} variant=${name#*-}
    arguments=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision" --build-arg "SOURCE=$source")
    torch=${TORCH:-}
    case $variant in
    amd | ascend | gaudi)
        [[ -n ${BASE:-} ]] || fail "$name: set BASE to the vendor's image that carries Python 3.11 or 3.12 and torch"
        torch=${TORCH:-base}
        ;;
    esac
    if [[ -n $release && $torch != base ]]; then
        lock=images/torch.$variant.lock
        [[ $kind != light ]] || lock=images/torch.cpu.lock
        [[ -z $torch || ! -s $lock ]] || grep -q "^$torch " "$lock" || fail "--release: $name: TORCH=$torch is not in $lock"
        [[ -s $lock ]] || fail "--release: $name: there is no $lock: python .ci/lock.py torch 'torch==VERSION' >$lock, on the platform of the image"
    fi
    file=$kind
    [[ $kind == light ]] || arguments+=(--build-arg "VARIANT=$variant" --build-arg "KIND=$kind")
    if [[ $kind == ray ]]; then # every node of a Ray runs every step
        file=train
        arguments+=(--build-arg EXTRAS=preprocess,dvc,train,deepspeed,tracking,pipelines,tasks,metrics,nvml,otel,ray)
    fi
    [[ -z ${BASE:-} ]] || arguments+=(--build-arg "BASE=$BASE")
    arguments+=(--build-arg "TORCH=$torch" --build-arg "TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-}")
    [[ -z ${PIP_CONFIG_FILE:-} ]] || arguments+=(--secret "id=pip.conf,src=$PIP_CONFIG_FILE")
    if [[ $kind == light ]]; then tag=${REGISTRY:-}holdfast:$version; else tag=${REGISTRY:-}holdfast-$kind-$variant:$version; fi
    # shellcheck disable=SC2206 # several words
    more=(${BUILD_OPTIONS:-})
    case $builder in
    docker) command=(docker buildx build --load --provenance=false --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH") ;;
    podman) command=(podman build --layers --timestamp "$SOURCE_DATE_EPOCH" --format oci) ;;
    buildah) command=(buildah build --layers --timestamp "$SOURCE_DATE_EPOCH" --format oci) ;;
    *) fail "BUILDER=$builder: docker, podman or buildah" ;;
    esac
    "${command[@]}" "${arguments[@]}" "${more[@]}" --file "images/$file.Dockerfile" --tag "$tag" .
    case $builder in
    buildah) buildah images --format '{{.Name}}:{{.Tag}} {{.Digest}} {{.Size}}' "$tag" ;;
    *) "$builder" image inspect --format "$tag {{.Id}} {{.Size}} bytes" "$tag" ;;
    esac
done
