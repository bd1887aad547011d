#!/bin/sh
# gotest.sh GOTESTSUM NAME PACKAGES [go test flags]: runs the tests of packages. PACKAGES is one argument, separated by spaces. The
# events of the run are stored in bin/test-events/NAME.json for "make test-times".
#
# A failed test is repeated once by itself, because timings on a slow box with many real processes differ. The summary still
# contains the first failure, and the last lines name the tests that needed their second try. If more than ten tests fail, none
# is repeated. With RERUNS=0 in the environment, each failure counts.
#
# Tests have more memory than processor time, so the garbage collectors of their processes run less often than usual. The compiler
# and the components of planes and machines do not inherit GOGC.
#
# The tests are not vetted: make lint does that for all of them, and vet would analyse all their imports once more.
#
# A package that fails outside of its tests is a failure, for example if its setup fails or its tests leave processes behind:
# gotestsum would repeat it without any test and report a success.
set -eu
gotestsum=$1 events=bin/test-events/$2.json packages=$3
shift 3
mkdir -p bin/test-events
"$gotestsum" --format pkgname-and-test-fails --format-hide-empty-pkg --format-icons text --jsonfile "$events" \
	--rerun-fails="${RERUNS:-1}" --rerun-fails-max-failures=10 --rerun-fails-run-root-test --packages "$packages" -- -vet=off -exec "env GOGC=300" "$@"
awk -F'"Package":"' '/"Action":"fail"/ {
	split($2, rest, "\"")
	if (/"Test":"/) { inTest[rest[1]] = 1; tries[rest[1] " " rest[5]]++ }
	else failed[rest[1]] = 1
}
/"Action":"pass"/ && /"Test":"/ {
	split($2, rest, "\"")
	if (tries[rest[1] " " rest[5]]) print "SECOND TRY: " rest[1] " " rest[5] " failed, and then passed: its output is above"
}
END {
	for (p in failed) if (!(p in inTest)) {
		print p " failed outside of its tests: its output is above" > "/dev/stderr"
		bad = 1
	}
	exit bad
}' "$events"
