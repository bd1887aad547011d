#!/usr/bin/env bash
# Builds packages of one module into a folder, one binary per package, named
# after the package's last element.
#
#   LDFLAGS=... hack/go-install.sh MODULE-FOLDER OUTPUT-FOLDER [go build flag...] PACKAGE...
#
# The binaries are built in a temporary folder and then moved: a running binary
# cannot be overwritten, and no process must start an incomplete file.
set -euo pipefail

module=$1 out=$(realpath -m "$2")
shift 2
mkdir -p "$out"
new=$(mktemp -d "$out/.new-XXXXXX")
trap 'rm -rf "$new"' EXIT
"$(dirname "$0")/download.sh" "$module" list -deps "$@"
(cd "$module" && go build -ldflags "-s -w ${LDFLAGS:-}" -o "$new/" "$@")
mv -f "$new"/* "$out/"
