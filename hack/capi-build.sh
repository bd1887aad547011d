#!/usr/bin/env bash
# Builds Cluster API's managers and clusterctl, and copies the manifests from the
# same version of its module.
#
#   hack/capi-build.sh core      bin/capi/capi-core-manager, bin/clusterctl, bin/capi/crds,
#                                bin/capi/repository (clusterctl's local repository)
#   hack/capi-build.sh kubeadm   bin/capi/capi-kubeadm-{bootstrap,control-plane}-manager,
#                                bin/capi/kubeadm-crds, and their part of the repository
#
# KUBECTL renders the components (the separate kustomize needs a newer Go).
set -euo pipefail
cd "$(dirname "$0")/.."

module=sigs.k8s.io/cluster-api
version=$(cd capi && go list -m -f '{{.Version}}' $module)
source=$(cd capi && go mod download -json $module@"$version" | sed -n 's/^\t"Dir": "\(.*\)",\{0,1\}$/\1/p')
time=$(cd capi && go list -m -f '{{.Time.UTC.Format "2006-01-02T15:04:05Z"}}' $module)
IFS=. read -r major minor _ <<<"${version#v}"
LDFLAGS=
for pair in "gitVersion=$version" "gitMajor=$major" "gitMinor=$minor" gitTreeState=clean "buildDate=$time"; do
	LDFLAGS+=" -X $module/version.$pair"
done
export LDFLAGS

mkdir -p bin
work=$(mktemp -d bin/.work-XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir -p bin/capi

# manager PACKAGE NAME
manager() {
	hack/go-install.sh capi "$work" "$module/$1"
	mv -f "$work/$(basename "$1")" "bin/capi/$2"
}

# manifests PACKAGE CRD-FOLDER PROVIDER-LABEL COMPONENTS-FILE
manifests() {
	local repository=bin/capi/repository/$3/$version
	rm -rf "bin/capi/$2" "bin/capi/repository/$3"
	mkdir -p "bin/capi/$2" "$repository"
	# Files in the module cache are read-only; the copies are not.
	cp --no-preserve=mode "$source/$1"/config/crd/bases/*.yaml "bin/capi/$2/"
	cp --no-preserve=mode "$source/metadata.yaml" "$repository/"
	"$KUBECTL" kustomize "$source/$1/config/default" >"$repository/$4"
}

case ${1:-} in
core)
	manager core capi-core-manager
	hack/go-install.sh capi bin $module/cmd/clusterctl
	manifests core crds cluster-api core-components.yaml
	;;
kubeadm)
	manager bootstrap/kubeadm capi-kubeadm-bootstrap-manager
	manager controlplane/kubeadm capi-kubeadm-control-plane-manager
	rm -rf bin/capi/kubeadm-crds
	manifests bootstrap/kubeadm kubeadm-crds bootstrap-kubeadm bootstrap-components.yaml
	mv bin/capi/kubeadm-crds "$work/bootstrap-crds"
	manifests controlplane/kubeadm kubeadm-crds control-plane-kubeadm control-plane-components.yaml
	mv "$work/bootstrap-crds"/* bin/capi/kubeadm-crds/
	;;
*)
	sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
	exit 2
	;;
esac
