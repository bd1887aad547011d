#!/usr/bin/env bash
# Builds our own images as OCI archives in bin/images, with neither Docker nor a
# registry.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p bin
work=$(mktemp -d bin/.work-XXXXXX)
trap 'rm -rf "$work"' EXIT
hack/go-install.sh node/images "$work" ./pause ./echo ./mkimage
mkdir -p bin/images
# Nobody but the pod's own sandbox user ever needs to write in these.
"$work/mkimage" -name registry.capstan.dev/pause:v1 -user 65535:65535 -out bin/images/pause.tar "$work/pause"
"$work/mkimage" -name registry.capstan.dev/echo:v1 -out bin/images/echo.tar "$work/echo" serve
