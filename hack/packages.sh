#!/usr/bin/env bash
# Builds Debian packages from the files in bin/.
#
#   hack/packages.sh VERSION [FOLDER]
#
# FOLDER (dist/assets/VERSION) gets
#   capstan-cli                 the command, its man pages and its completions: for workstations
#   capstan                     the programs, units and settings of hosts and management planes
#   capstan-kubernetes-X.Y.Z    one Kubernetes version. Several versions can be installed together, so an upgrade of the
#                               other packages does not remove the version of running machines
#
# The same files in bin/ give the same bytes: times are those of the last commit, or SOURCE_DATE_EPOCH.
# COMPRESSION is zstd, or none for tests.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-} out=${2:-dist/assets/${1:-}}
if [[ ! $version =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$ ]]; then
	echo "packages.sh: VERSION must be a semantic version such as v0.1.0, found '$version'" >&2
	exit 2
fi
# Debian sorts 0.1.0~rc.1 before 0.1.0.
debian=${version#v} debian=${debian/-/\~} debian=${debian//-/.}
arch=$(go env GOARCH) # Debian uses the same names for amd64 and arm64
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || echo 0)}"
export SOURCE_DATE_EPOCH LC_ALL=C.UTF-8
umask 022

mkdir -p "$out"
work=$(mktemp -d "$out/.packages-XXXXXX")
trap 'rm -rf "$work"' EXIT
lib=usr/lib/capstan

source hack/shipped.sh

# stage PACKAGE PATH... copies files of bin/ into /usr/lib/capstan of a package. They are no hard links, because pack sets their times.
stage() {
	local package=$1
	shift
	mkdir -p "$work/$package/$lib"
	shipped_files "$@" | tar -C bin --no-recursion -T - -cf - | tar -C "$work/$package/$lib" -xpf -
}

# settings fills in the control files of a package from config/packages/TEMPLATE.
settings() {
	local package=$1 template=$2 file
	mkdir -p "$work/$package/DEBIAN" "$work/$package/usr/share/doc/$package"
	cp LICENSE "$work/$package/usr/share/doc/$package/copyright"
	for file in config/packages/"$template"/*; do
		sed "s/@VERSION@/$debian/g; s/@ARCHITECTURE@/$arch/g; s/@KUBERNETES@/${kubernetes:-}/g; s/@VERSIONS@/${versions:-}/g" "$file" >"$work/$package/DEBIAN/$(basename "$file")"
	done
	find "$work/$package/DEBIAN" -type f ! -name control -exec chmod 0755 {} +
}

# pack writes the package. Its modes do not depend on the umask with which bin/ was built. Size and checksums are computed here,
# because dpkg-deb does neither. As Debian's policy says, the size is that of the files in KiB, and 1 for anything else: the size of a
# folder depends on the file system.
pack() {
	local package=$1
	(cd "$work/$package" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
	echo "Installed-Size: $(find "$work/$package" -path '*/DEBIAN' -prune -o -printf '%y %s\n' |
		awk '{ kib += $1 == "f" ? int(($2 + 1023) / 1024) : 1 } END { print kib }')" >>"$work/$package/DEBIAN/control"
	chmod -R u+rwX,go=rX "$work/$package"
	find "$work/$package" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
	dpkg-deb --root-owner-group "-Z${COMPRESSION:-zstd}" -z9 --build "$work/$package" "$out/${package}_${debian}_$arch.deb" >&2
}

cli() {
	local share=$work/capstan-cli/usr/share
	stage capstan-cli "${SHIPPED_COMMAND[@]}"
	mkdir -p "$work/capstan-cli/usr/bin"
	local name
	for name in capstan kubectl-capstan kubectl_complete-capstan; do
		ln -s ../lib/capstan/capstan "$work/capstan-cli/usr/bin/$name"
	done
	mkdir -p "$share/man/man1" "$share/bash-completion/completions" "$share/zsh/vendor-completions" "$share/fish/vendor_completions.d"
	bin/capstan man-pages "$share/man/man1"
	gzip -9n "$share"/man/man1/*
	bin/capstan completion bash >"$share/bash-completion/completions/capstan"
	bin/capstan completion zsh >"$share/zsh/vendor-completions/_capstan"
	bin/capstan completion fish >"$share/fish/vendor_completions.d/capstan.fish"
	# The command names sections of the documents. The other files are those to which the documents lead.
	mkdir -p "$share/doc/capstan-cli"
	cp -a --parents ./*.md LICENSE docs config/prometheus internal/node/provision/audit-policy.yaml "$share/doc/capstan-cli/"
	find "$share/doc/capstan-cli" \( -name '*.go' -o -name rules_test.yaml \) -delete
	settings capstan-cli capstan-cli
	pack capstan-cli
}

host() {
	local root=$work/capstan
	stage capstan "${SHIPPED_HOST[@]}" "${SHIPPED_PLANE[@]}"
	mkdir -p "$root/usr/lib/systemd/system" "$root/$lib/systemd" "$root/usr/share/man/man8"
	cp config/systemd/*.service "$root/usr/lib/systemd/system/"
	cp config/systemd/capstand.default "$root/$lib/systemd/" # for postinst
	bin/capstand man-pages "$root/usr/share/man/man8"
	gzip -9n "$root"/usr/share/man/man8/*
	settings capstan capstan
	pack capstan
}

versions=
for folder in "${SHIPPED_KUBERNETES[@]}"; do
	kubernetes=${folder##*/v}
	versions+=${versions:+ | }capstan-kubernetes-$kubernetes
	stage "capstan-kubernetes-$kubernetes" "$folder"
	settings "capstan-kubernetes-$kubernetes" capstan-kubernetes
	pack "capstan-kubernetes-$kubernetes"
done
cli
host
