#!/usr/bin/env bash
# Runs a command only if its inputs have changed since it last succeeded.
#
#   hack/cached.sh NAME 'OUTPUT...' 'INPUT...' COMMAND [ARGUMENT...]
#
# Go caches packages, but even a fully cached link of Kubernetes takes ten
# seconds. The stamp is a hash over the content of the inputs (files or folders),
# the command and the Go version, so neither a checkout nor a touch invalidates
# it. Two makes at once in one checkout wait for each other.
set -euo pipefail

name=$1 outputs=$2 inputs=$3
shift 3
stamp=bin/.stamp/$name
mkdir -p bin/.stamp

# The lock is not inherited by the command: a daemon started by it must not hold it.
exec 9>"$stamp.lock"
flock 9

hash=$({
	echo "$*" "${GOFLAGS:-}"
	go version
	# shellcheck disable=SC2086 # a list on purpose
	find $inputs -type f ! -name '*_test.go' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
} | sha256sum)

fresh=false
if [[ -f $stamp && $(<"$stamp") == "$hash" ]]; then
	fresh=true
	for output in $outputs; do
		[[ -e $output ]] || fresh=false
	done
fi
$fresh && exit 0

echo "==> $name" >&2
start=$SECONDS
rm -f "$stamp"
"$@" 9>&-
for output in $outputs; do
	[[ -e $output ]] || { echo "$name did not make $output" >&2; exit 1; }
done
echo "$hash" >"$stamp"
echo "<== $name ($((SECONDS - start)) s)" >&2
