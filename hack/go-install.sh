#!/usr/bin/env bash
# Builds packages of one module into a folder, one binary per package, named
# after the package's last element.
#
#   LDFLAGS=... hack/go-install.sh MODULE-FOLDER OUTPUT-FOLDER [go build flag...] PACKAGE...
#
# They are built beside and then moved, because a binary that runs cannot be
# written to, and whoever starts one meanwhile must not get half of it.
set -euo pipefail

module=$1 out=$(realpath -m "$2")
shift 2
mkdir -p "$out"
new=$(mktemp -d "$out/.new-XXXXXX")
trap 'rm -rf "$new"' EXIT
(cd "$module" && go build -ldflags "-s -w ${LDFLAGS:-}" -o "$new/" "$@")
mv -f "$new"/* "$out/"
