#!/usr/bin/env bash
# Creates a release in a folder from the files in bin/. It needs neither Docker nor a registry.
#
#   hack/release.sh programs VERSION             fails unless bin/ was built for VERSION
#   hack/release.sh manifests VERSION [FOLDER]   the files for clusterctl, Helm, Cluster API Operator and Prometheus
#   hack/release.sh images VERSION [FOLDER]      OCI archives of the managers
#   hack/release.sh host VERSION [FOLDER]        the programs of a host
#   hack/release.sh plane VERSION [FOLDER]       the same, with those of a management plane
#   hack/release.sh cli VERSION [FOLDER]         the command for workstations with Linux, macOS and Windows
#   hack/release.sh packages VERSION [FOLDER]    Debian packages
#   hack/release.sh sbom VERSION [FOLDER]        a software bill of materials (SPDX) of all programs
#   hack/release.sh checksums VERSION [FOLDER]   signed if SIGNING_KEY names a key of gpg
#
# FOLDER (dist) gets
#   assets/VERSION/            every file, flat: the assets of a GitHub release, or the files of a
#                              GitLab generic package
#   repository/LABEL/VERSION/  clusterctl's local repository, with Cluster API core of the pinned version
#   clusterctl.yaml            a configuration for clusterctl that names the local repository
#
# KUBECTL renders the components (the separate kustomize needs a newer Go).
set -euo pipefail
cd "$(dirname "$0")/.."

PROVIDERS='infrastructure control-plane bootstrap ipam'
REGISTRY=registry.capstan.dev
# The same content gives the same bytes, whatever the umask of the builder is: every user may read and execute the files.
TAR=(tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 --mode=u+rwX,go=rX -cf -)

what=${1:-} version=${2:-} out=${3:-dist}
if [[ ! $version =~ ^v(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?$ ]]; then
	echo "release.sh: VERSION must be a semantic version such as v0.1.0, found '$version'" >&2
	exit 2
fi
assets=$out/assets/$version

source hack/shipped.sh

core_version() { basename bin/capi/repository/cluster-api/v*; }

# programs checks the version of the programs, and that nothing limits the validity of certificates, as in make test-expiry. The embedded
# plane records the version for clusterctl, and hosts report it.
programs() {
	local package=capstan.dev/capstan/internal expected found
	expected="-X $package/version.Version=$version"
	found=$(cat bin/.stamp/linker-flags) || true
	if [[ $found != "$expected" ]]; then
		echo "release.sh: expected programs with the linker flags '$expected', found '$found': run make release VERSION=$version" >&2
		exit 1
	fi
	found=$(bin/capstan version | sed -n 's/^capstan //p')
	if [[ $found != "$version" ]]; then
		echo "release.sh: expected bin/capstan of version $version, found $found: run make release VERSION=$version" >&2
		exit 1
	fi
}

manifests() {
	local major=${BASH_REMATCH[1]} minor=${BASH_REMATCH[2]}
	if ! grep -A1 "^- major: $major\$" config/metadata.yaml | grep -q "^  minor: $minor\$"; then
		echo "release.sh: config/metadata.yaml has no release series $major.$minor: add it with its contract" >&2
		exit 2
	fi
	: "${KUBECTL:=$(echo bin/kubernetes/*/kubectl | cut -d ' ' -f 1)}"
	rm -rf "$assets"
	mkdir -p "$assets"
	cp config/metadata.yaml templates/cluster-template*.yaml templates/clusterclass-*.yaml "$assets/"
	local p
	for p in $PROVIDERS; do
		"$KUBECTL" kustomize "config/$p/default" |
			sed "s|image: $REGISTRY/manager:dev\$|image: $REGISTRY/manager:$version|" >"$assets/$p-components.yaml"
		repository "$p-capstan" "$version" "$assets/metadata.yaml" "$assets/$p-components.yaml"
	done
	cp config/infrastructure/runtime/extensionconfig.yaml "$assets/" # core accepts it only with a feature gate
	cp config/infrastructure/runtime/apiservice.yaml "$assets/"      # clusterctl cannot upgrade beside it
	cp "$assets"/cluster-template*.yaml "$assets"/clusterclass-*.yaml "$out/repository/infrastructure-capstan/$version/"
	chart
	operator >"$assets/operator-providers.yaml"
	"${TAR[@]}" --exclude=rules_test.yaml config/prometheus | gzip -1n >"$assets/capstan-prometheus.tar.gz"
	core
	configuration >"$out/clusterctl.yaml"
}

# repository LABEL VERSION FILE...
repository() {
	local folder=$out/repository/$1/$2
	shift 2
	rm -rf "$folder"
	mkdir -p "$folder"
	cp "$@" "$folder/"
}

# chart packs the components as a Helm chart. Each variable of clusterctl, ${CAPSTAN_LOG_LEVEL:=0}, becomes a value, .Values.logLevel.
# As clusterctl does, the chart labels all objects, so that clusterctl moves clusters. When a release is uninstalled, Helm keeps the
# definitions of the kinds, and with them all clusters, and the namespaces, which contain the credentials of the hosts.
chart() {
	local p value
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	cp -r config/helm "$work/capstan"
	sed -i "s/^version: .*/version: ${version#v}/; s/^appVersion: .*/appVersion: $version/" "$work/capstan/Chart.yaml"
	for p in $PROVIDERS; do
		value=${p/control-plane/controlPlane}
		{
			echo "{{- if .Values.providers.$value }}"
			sed -E -e 's/\{\{/{{ "{{" }}/g' \
				-e 's/\$\{CAPSTAN_([A-Z_]+):=""\}/{{ .Values.\L\1\E | quote }}/; s/\$\{CAPSTAN_([A-Z_]+):=[^}]*\}/{{ .Values.\L\1\E }}/' \
				-e ':a; s/(\{\{ \.Values\.[A-Za-z]*)_([a-z])/\1\u\2/; ta' \
				-e "s|image: $REGISTRY/manager:.*|image: {{ .Values.image.repository }}:$version|" \
				-e 's|^    cluster.x-k8s.io/provider: .*|    clusterctl.cluster.x-k8s.io: ""\n&|' \
				-e '/^kind: Namespace$/ { n; s|^metadata:$|&\n  annotations:\n    helm.sh/resource-policy: keep| }' \
				-e 's|^    controller-gen.kubebuilder.io/version: .*|&\n    helm.sh/resource-policy: keep|' "$assets/$p-components.yaml"
			echo '{{- end }}'
		} >"$work/capstan/templates/$p.yaml"
	done
	{
		echo '{{- if and .Values.providers.infrastructure .Values.updatesInPlace }}'
		cat config/infrastructure/runtime/extensionconfig.yaml
		echo '{{- end }}'
	} >"$work/capstan/templates/extensionconfig.yaml"
	"${TAR[@]}" -C "$work" capstan | gzip -1n >"$assets/capstan-${version#v}.tgz"
}

# operator prints the providers for Cluster API Operator. It reads the components from ConfigMaps, so it needs no repository.
operator() {
	local p kind
	for p in $PROVIDERS; do
		case $p in
		infrastructure) kind=InfrastructureProvider ;;
		control-plane) kind=ControlPlaneProvider ;;
		bootstrap) kind=BootstrapProvider ;;
		ipam) kind=IPAMProvider ;;
		esac
		sed "s/PROVIDER/$p/g; s/KIND/$kind/; s/VERSION/$version/g" config/operator/provider.yaml
		echo '  metadata: |'
		sed 's/^/    /' "$assets/metadata.yaml"
		echo '  components: |'
		sed 's/^./    &/' "$assets/$p-components.yaml"
	done
}

# core copies the manifests of Cluster API core, for boxes without access to its registry. The manifests in the module
# contain a staging image, which releases do not have.
core() {
	local core
	core=$(core_version)
	repository cluster-api "$core" bin/capi/repository/cluster-api/"$core"/*
	sed -i "s|image: gcr.io/k8s-staging-cluster-api/cluster-api-controller:.*|image: $REGISTRY/cluster-api-controller:$core|; s|imagePullPolicy: Always|imagePullPolicy: IfNotPresent|" \
		"$out/repository/cluster-api/$core/core-components.yaml"
}

configuration() {
	local p repository
	repository=$(realpath "$out/repository")
	echo 'providers:'
	printf -- '- name: cluster-api\n  type: CoreProvider\n  url: %s\n' "$repository/cluster-api/$(core_version)/core-components.yaml"
	for p in $PROVIDERS; do
		local type
		case $p in
		infrastructure) type=InfrastructureProvider ;;
		control-plane) type=ControlPlaneProvider ;;
		bootstrap) type=BootstrapProvider ;;
		ipam) type=IPAMProvider ;;
		esac
		printf -- '- name: capstan\n  type: %s\n  url: %s\n' "$type" "$repository/$p-capstan/latest/$p-components.yaml"
	done
}

images() {
	mkdir -p bin "$assets"
	work=$(mktemp -d bin/.work-XXXXXX)
	trap 'rm -rf "$work"' EXIT
	hack/go-install.sh node/images "$work" ./mkimage
	ln bin/manager "$work/manager"
	"$work/mkimage" -name "$REGISTRY/manager:$version" -out "$assets/manager-image.tar" "$work/manager"
	ln -f bin/capi/capi-core-manager "$work/manager"
	"$work/mkimage" -name "$REGISTRY/cluster-api-controller:$(core_version)" -out "$assets/cluster-api-controller-image.tar" "$work/manager"
}

# archive packs files for /usr/lib/capstan. It can be unpacked over an older release: tar replaces each file, and other Kubernetes
# versions stay.
#
# archive NAME 'UNIT...' PATH...
archive() {
	local name=$1 units=$2
	shift 2
	mkdir -p "$assets"
	# shellcheck disable=SC2086 # a list on purpose
	shipped_files "$@" | "${TAR[@]}" -C bin --no-recursion -T - -C ../config systemd systemd/capstand.default $units |
		gzip -1n >"$assets/$name-linux-$(go env GOARCH).tar.gz"
}

host() {
	archive capstan-host systemd/capstand.service "${SHIPPED_COMMAND[@]}" "${SHIPPED_KUBERNETES[@]}" "${SHIPPED_HOST[@]}"
}

plane() {
	archive capstan 'systemd/capstand.service systemd/capstan.service' \
		"${SHIPPED_COMMAND[@]}" "${SHIPPED_KUBERNETES[@]}" "${SHIPPED_HOST[@]}" "${SHIPPED_PLANE[@]}"
}

# cli builds the command for workstations.
cli() {
	local os arch
	mkdir -p "$assets"
	for os in linux darwin windows; do
		for arch in amd64 arm64; do
			GOOS=$os GOARCH=$arch go build -ldflags "-s -w -X capstan.dev/capstan/internal/version.Version=$version" \
				-o "$assets/capstan-cli-$os-$arch$([[ $os == windows ]] && echo .exe || true)" ./cmd/capstan
		done
	done
}

packages() {
	hack/packages.sh "$version" "$assets"
}

# sbom lists the modules of every Go program of the release, the commands for workstations included. Only runc contains C code, the
# libseccomp of Debian.
sbom() {
	mkdir -p "$assets"
	: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || echo 0)}"
	export SOURCE_DATE_EPOCH
	local files file programs=()
	files=$(shipped_files "${SHIPPED_COMMAND[@]}" "${SHIPPED_KUBERNETES[@]}" "${SHIPPED_HOST[@]}" "${SHIPPED_PLANE[@]}")
	while read -r file; do
		if [[ -f bin/$file && ! -L bin/$file && -x bin/$file ]]; then programs+=("$PWD/bin/$file"); fi
	done <<<"$files"
	for file in "$assets"/capstan-cli-*; do
		if [[ -f $file ]]; then programs+=("$(realpath "$file")"); fi
	done
	(cd tools/sbom && go run . -name "capstan-$version" -namespace "https://capstan.dev/sbom/$version/$(go env GOARCH)" "${programs[@]}") >"$assets/capstan-$version-linux-$(go env GOARCH).spdx.json"
}

checksums() {
	(cd "$assets" && find . -maxdepth 1 -type f ! -name 'SHA256SUMS*' -printf '%P\n' | LC_ALL=C sort | xargs sha256sum >SHA256SUMS)
	rm -f "$assets/SHA256SUMS.asc"
	if [[ -n ${SIGNING_KEY:-} ]]; then
		gpg --batch --yes --local-user "$SIGNING_KEY" --armor --detach-sign --output "$assets/SHA256SUMS.asc" "$assets/SHA256SUMS"
	fi
}

case $what in
programs | manifests | images | host | plane | cli | packages | sbom | checksums) "$what" ;;
*)
	sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
	exit 2
	;;
esac
