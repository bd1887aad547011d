#!/usr/bin/env bash
# Writes kube/vX.Y/go.mod for one Kubernetes patch release.
#
#   hack/kube-module.sh v1.36.3
#
# k8s.io/kubernetes requires its staging modules at v0.0.0 and replaces them by
# folders outside of the module. A module that imports it must replace each of
# them by the published v0.Y.Z. The list changes with each minor version, so it is
# read from the go.mod of the release. The etcd of all minors is pinned in etcd/go.mod.
set -euo pipefail

version=${1:?usage: hack/kube-module.sh vX.Y.Z}
[[ $version =~ ^v1\.([0-9]+)\.([0-9]+)$ ]] || { echo "kube-module.sh: expected a release version such as v1.36.3, found $version" >&2; exit 1; }
minor=${BASH_REMATCH[1]} staging=v0.${BASH_REMATCH[1]}.${BASH_REMATCH[2]}
dir=$(dirname "$0")/../kube/v1.$minor
mkdir -p "$dir"
cd "$dir"

# "/v1.36" cannot end a module path, hence the name without a dot.
[[ -f go.mod ]] || go mod init "capstan.dev/capstan/kube/v1-$minor"

json() { sed -n "s/.*\"$1\": \"\\([^\"]*\\)\".*/\\1/p" | head -n1; }
info=$(cd / && go mod download -json "k8s.io/kubernetes@$version")
mod=$(json GoMod <<<"$info")

# Start with an empty file: a requirement of the previous patch release could keep
# a newer dependency than the release was tested with. hack/libraries.sh raises those of the first minor on purpose.
cat >go.mod <<MOD
module capstan.dev/capstan/kube/v1-$minor

$(grep -E '^go ' "$mod")

$(grep -E '^godebug ' "$mod" || true)
MOD
args=(-require="k8s.io/kubernetes@$version"
	-require="capstan.dev/capstan/kube/multicall@v0.0.0"
	-replace="capstan.dev/capstan/kube/multicall=../multicall")
while read -r path; do
	args+=(-replace="$path=$path@$staging")
done < <(sed -n 's#^\t\(k8s.io/[^ ]*\) => ./staging/.*#\1#p' "$mod")
go mod edit "${args[@]}"
go mod tidy

# The version that the binaries report. A module contains no commit.
time=$(cd / && go list -m -json "k8s.io/kubernetes@$version" | json Time)
cat >version.env <<ENV
# Written by hack/kube-module.sh: what the binaries report as their version.
GIT_VERSION=$version
BUILD_DATE=$time
ENV
