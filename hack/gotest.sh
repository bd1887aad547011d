#!/bin/sh
# gotest.sh GOTESTSUM PACKAGES [go test flags]: runs the tests of packages, as many words. The events of the run stay in
# bin/test-events for "make test-times".
#
# One test that fails is run once more by itself, and the summary still names its first failure: on a slow box a
# hundred real processes meet timings that no developer has seen. More than a few are not chance, and are not run again.
#
# A package that fails outside of its tests, because what they all need did not start or something was left behind,
# fails for good: gotestsum would run it once more without any test, and call that a success.
set -eu
gotestsum=$1 packages=$2
shift 2
mkdir -p bin/test-events
events=bin/test-events/$(echo "$packages" | tr -c 'a-z0-9\n' '-').json
"$gotestsum" --format pkgname-and-test-fails --format-hide-empty-pkg --format-icons text --jsonfile "$events" \
	--rerun-fails=1 --rerun-fails-max-failures=10 --rerun-fails-run-root-test --packages "$packages" -- "$@"
awk -F'"Package":"' '/"Action":"fail"/ {
	split($2, rest, "\"")
	if (/"Test":"/) inTest[rest[1]] = 1
	else failed[rest[1]] = 1
}
END {
	for (p in failed) if (!(p in inTest)) {
		print p " failed outside of its tests: its output is above" > "/dev/stderr"
		bad = 1
	}
	exit bad
}' "$events"
