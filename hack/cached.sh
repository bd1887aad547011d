#!/usr/bin/env bash
# Runs a command if its inputs have changed since its last success.
#
#   hack/cached.sh NAME 'OUTPUT...' 'INPUT...' COMMAND [ARGUMENT...]
#
# Go caches packages, but the link of Kubernetes alone takes ten seconds. The
# stamp is a hash of the content of the inputs (files or folders), the command, the
# Go version, the platform and the C compiler. A checkout or a touch does not invalidate it. Concurrent calls
# in one checkout wait for each other.
set -euo pipefail

name=$1 outputs=$2 inputs=$3
shift 3
stamp=bin/.stamp/$name
mkdir -p bin/.stamp

# The command does not inherit the lock: a daemon that it starts must not keep it.
exec 9>"$stamp.lock"
flock 9

# A build does not depend on tests. The linter reads them, so the Makefile sets TESTS=read for it.
tests=(! -name '*_test.go')
[[ ${TESTS:-} == read ]] && tests=()

hash=$({
	echo "$*" "${GOFLAGS:-}"
	go version
	go env GOOS GOARCH CC
	# shellcheck disable=SC2086 # a list on purpose
	find $inputs -type f "${tests[@]}" -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
} | sha256sum)

fresh=false
if [[ -f $stamp && $(<"$stamp") == "$hash" ]]; then
	fresh=true
	for output in $outputs; do
		[[ -e $output ]] || fresh=false
	done
fi
$fresh && exit 0

# seconds NAME prints the entry of hack/build-times, or 0.
seconds() { awk -v part="$1" '$1 == part { s = $2 } END { print s + 0 }' hack/build-times; }

# estimate NAME... prints how long the parts take that were not built yet, at the pace of the last one that was built here.
pace=bin/.stamp/pace # in percent of hack/build-times
estimate() {
	local sum=0 part
	for part in "$@"; do
		[[ -e bin/.stamp/$part ]] || sum=$((sum + $(seconds "$part")))
	done
	sum=$((sum * $(cat "$pace" 2>/dev/null || echo 100) / 100))
	if ((sum < 90)); then echo "about $sum s"; else echo "about $(((sum + 30) / 60)) min"; fi
}

# PARTS is what the caller of make builds, in order.
rm -f "$stamp"
expected=$(seconds "$name") progress=
((expected == 0)) || progress=": $(estimate "$name")"
# shellcheck disable=SC2086 # a list on purpose
[[ " ${PARTS:-} " != *" $name "* ]] || progress+=", $(estimate $PARTS) for all missing parts"
echo "==> $name$progress" >&2
start=$SECONDS
"$@" 9>&-
for output in $outputs; do
	[[ -e $output ]] || { echo "cached.sh: expected $output from $name, found no such file" >&2; exit 1; }
done
took=$((SECONDS - start))
((expected < 30)) || echo "$((took * 100 / expected))" >"$pace"
echo "$hash" >"$stamp"
echo "<== $name ($took s)" >&2
