#!/usr/bin/env bash
# Builds the commit of this folder as a release again, in a clone in another folder with an empty build cache, and compares the checksums
# with those of dist/.
#
#   hack/release-compare.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-}
first=$PWD/dist/assets/$version/SHA256SUMS
if [[ -n $(git status --porcelain) ]]; then
	echo "release-compare.sh: the second build is that of the last commit, and there are other changes: commit them, and run make release again" >&2
	exit 2
fi
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
git clone -q . "$work/clone"
GOCACHE=$work/cache make -C "$work/clone" release "VERSION=$version"
if ! diff "$first" "$work/clone/dist/assets/$version/SHA256SUMS" >&2; then
	echo "release-compare.sh: expected the same bytes from both builds, found different files (< is $first)" >&2
	exit 1
fi
echo "Both builds of $version give the same $(wc -l <"$first") files."
