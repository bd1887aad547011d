#!/usr/bin/env bash
# Builds the multi-call binary of one Kubernetes minor, that of etcd, and the links to them.
#
#   hack/kube-build.sh kube/v1.36 bin/kubernetes/v1.36.3
set -euo pipefail

module=${1:?usage: hack/kube-build.sh MODULE-FOLDER OUTPUT-FOLDER}
out=$(realpath -m "${2:?no output folder given}")
root=$(realpath "$(dirname "$0")/..")
for m in "$module" "$root/etcd"; do "$root/hack/download.sh" "$m" list -deps .; done
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
# multicall builds a binary in the current folder and links its commands. The binary is built under another name and then
# moved: a running binary cannot be overwritten.
multicall() {
	go build -ldflags "$2" -o "$out/.$1.new" .
	mv -f "$out/.$1.new" "$out/$1"
	for name in $("$out/$1" --list); do
		ln -sfn "$1" "$out/$name"
	done
}
multicall capstan-kube "$flags"
cd "$root/etcd"
multicall capstan-etcd "-s -w"
