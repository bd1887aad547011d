# The content of a release, as paths in bin/. bin/ can contain more: programs for tests, other providers of Cluster API, and Kubernetes
# versions of earlier commits. Scripts source this file in the folder of the checkout.
# shellcheck shell=bash disable=SC2034 # the scripts use the variables

SHIPPED_COMMAND=(capstan)
SHIPPED_HOST=(capstand capstan-init node images)
SHIPPED_PLANE=(manager clusterctl capi/capi-core-manager capi/crds capi/repository/cluster-api)
# The versions of kube/ that are built, the newest one first. Without one, shipped_files fails.
mapfile -t SHIPPED_KUBERNETES < <(sed -n 's/^GIT_VERSION=//p' kube/v*/version.env | sort -rV | while read -r v; do
	if [[ -e bin/kubernetes/$v ]]; then echo "kubernetes/$v"; fi
done)
((${#SHIPPED_KUBERNETES[@]})) || SHIPPED_KUBERNETES=(kubernetes/vX.Y.Z)

# shipped_files PATH... prints each file and folder below these paths of bin/, and the folders above them.
shipped_files() {
	local path parent
	for path; do
		if [[ ! -e bin/$path ]]; then
			echo "shipped.sh: expected bin/$path, found no such file: run make build" >&2
			return 1
		fi
		find "bin/$path" -printf '%P\n' | sed "s|^|$path/|; s|/\$||"
		parent=$path
		while [[ $parent == */* ]]; do
			parent=${parent%/*}
			echo "$parent"
		done
	done | LC_ALL=C sort -u
}
