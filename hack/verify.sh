#!/usr/bin/env bash
# Fails if "make generate" or "go mod tidy" would change a file. It works on a copy
# of the current files (committed or not), so it changes none of them.
set -euo pipefail
cd "$(dirname "$0")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard |
	while IFS= read -r -d '' f; do [[ -e $f ]] && printf '%s\0' "$f"; done |
	tar --null -T - -cf - | tar -xf - -C "$copy"
cp -r "$copy" "$copy.before"
trap 'rm -rf "$copy" "$copy.before"' EXIT
ln -s "$PWD/bin" "$copy/bin" # the tools

failed=0
# The job server of the caller would let parts of generate run at once, of which one reads what another writes.
env -u MAKEFLAGS -u MFLAGS make -s -C "$copy" generate
if ! diff -rq -x bin "$copy.before" "$copy" | sed "s#$copy[^/ :]*/\\{0,1\\}##g" >&2; then
	echo 'verify.sh: the files above are outdated: run make generate' >&2
	failed=1
fi
# The modules of GitOps tools are many, and make test does not need them. The targets of these tools check their files.
while IFS= read -r -d '' mod; do
	dir=$(dirname "$mod")
	(cd "$copy/$dir" && go mod tidy -diff) || { echo "verify.sh: go.mod or go.sum in $dir is outdated: run go mod tidy there" >&2; failed=1; }
done < <(git ls-files -z -- go.mod '*/go.mod' ':!tools/flux' ':!tools/argo-cd')
exit $failed
