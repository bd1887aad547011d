#!/usr/bin/env bash
# Builds Capstan's images as OCI archives in bin/images. It needs neither Docker
# nor a registry.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p bin
work=$(mktemp -d bin/.work-XXXXXX)
trap 'rm -rf "$work"' EXIT
hack/go-install.sh node/images "$work" ./pause ./echo ./mkimage
mkdir -p bin/images
# Only the user of the pod sandbox writes in these images.
"$work/mkimage" -name registry.capstan.dev/pause:v1 -user 65535:65535 -out bin/images/pause.tar "$work/pause"
"$work/mkimage" -name registry.capstan.dev/echo:v1 -out bin/images/echo.tar "$work/echo" serve
