#!/usr/bin/env bash
# Fails if "make generate" or "go mod tidy" would change anything. It works on a
# copy of the files as they are (committed or not), so it changes nothing itself.
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
make -s -C "$copy" generate
if ! diff -rq -x bin "$copy.before" "$copy" | sed "s#$copy[^/ :]*/\\{0,1\\}##g" >&2; then
	echo 'make generate would change the files above' >&2
	failed=1
fi
while IFS= read -r -d '' mod; do
	dir=$(dirname "$mod")
	(cd "$copy/$dir" && go mod tidy -diff) || { echo "go mod tidy is needed in $dir" >&2; failed=1; }
done < <(git ls-files -z -- go.mod '*/go.mod')
exit $failed
