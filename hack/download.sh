#!/usr/bin/env bash
# Runs a go command that downloads modules. A fresh clone sends some thousand requests,
# and one failed request ends a build: the command is tried again after a pause.
#
#   hack/download.sh MODULE-FOLDER COMMAND [ARGUMENT...]
set -euo pipefail

cd "$1"
module=$1 attempts=4
shift
for ((attempt = 1; attempt <= attempts; attempt++)); do
	go "$@" >/dev/null && exit 0
	echo "download.sh: attempt $attempt of $attempts failed for $module" >&2
	((attempt == attempts)) || sleep $((attempt * 10))
done
exit 1
