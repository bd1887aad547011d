#!/usr/bin/env bash
# Builds the multi-call binary of one Kubernetes minor and its symlinks.
#
#   hack/kube-build.sh kube/v1.36 bin/kubernetes/v1.36.3
set -euo pipefail

module=${1:?usage: hack/kube-build.sh MODULE-FOLDER OUTPUT-FOLDER}
out=$(realpath -m "${2:?no output folder given}")
"$(dirname "$0")/download.sh" "$module" list -deps .
cd "$module"
# shellcheck source=/dev/null
. ./version.env

IFS=. read -r major minor _ <<<"${GIT_VERSION#v}"
flags="-s -w"
# client-go has its own copy, which it uses for the User-Agent of clients.
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
	for pair in "gitVersion=$GIT_VERSION" "gitMajor=$major" "gitMinor=$minor" \
		gitCommit= gitTreeState=clean "buildDate=$BUILD_DATE"; do
		flags+=" -X $package.$pair"
	done
done

mkdir -p "$out"
# The binary is built under another name and then moved: a running binary cannot
# be overwritten.
go build -ldflags "$flags" -o "$out/.capstan-kube.new" .
mv -f "$out/.capstan-kube.new" "$out/capstan-kube"
for name in $("$out/capstan-kube" --list); do
	ln -sfn capstan-kube "$out/$name"
done
