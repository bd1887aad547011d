#!/usr/bin/env bash
# Builds everything for arm64 with its Debian packages, and runs it on this box under emulation (qemu-user): the tests of all packages that
# start no API server, then one package with a real API server and etcd. The build is in bin/arm64, a copy of this checkout, because a checkout holds the programs
# of one architecture.
#
#   hack/arm64.sh [build|packages|unit|smoke]...      all of them without an argument
set -euo pipefail
cd "$(dirname "$0")/.."

copy=bin/arm64
(($#)) || set -- build packages unit smoke

# The kernel starts programs of other architectures with the emulators that the package qemu-user-static registers.
emulator() {
	[[ -e /proc/sys/fs/binfmt_misc/status ]] || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
	dpkg --print-foreign-architectures | grep -qx arm64 || { echo "==> dpkg --add-architecture arm64" >&2; dpkg --add-architecture arm64; }
	hack/setup.sh qemu-user-static binfmt-support gcc-aarch64-linux-gnu libc6-dev-arm64-cross libseccomp-dev:arm64
	[[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]] || update-binfmts --enable qemu-aarch64
}

sources() {
	mkdir -p $copy
	git ls-files -z | xargs -0 cp --parents --update --preserve=mode,timestamps -t $copy
}

build() {
	make -C $copy GOARCH=arm64 CC=aarch64-linux-gnu-gcc PKG_CONFIG_PATH=/usr/lib/aarch64-linux-gnu/pkgconfig build
	local program
	for program in $copy/bin/{capstan,manager,capstand,capstan-init,clusterctl} $copy/bin/node/bin/{containerd,runc,capstan-runc} $copy/bin/kubernetes/*/capstan-{kube,etcd}; do
		readelf -h "$program" | grep -q AArch64 || { echo "arm64.sh: expected a program for arm64, found another one: $program" >&2; exit 1; }
	done
}

packages() {
	local out=$PWD/bin/arm64-packages package
	rm -rf "$out"
	GOARCH=arm64 COMPRESSION=none $copy/hack/packages.sh v0.1.0 "$out"
	for package in "$out"/*.deb; do
		[[ $(dpkg-deb --field "$package" Architecture) == arm64 ]] || { echo "arm64.sh: expected a package for arm64, found another one: $package" >&2; exit 1; }
	done
}

# emulated [go test argument...]
emulated() { (cd $copy && GOARCH=arm64 go test -count=1 -timeout 60m "$@"); }

# qemu-user 7.2 implements neither openat2 nor namespaces, which the tests of these packages need.
not_emulated='/internal/(changes|host/machineimage|host/hostmount|node/process)$'

unit() {
	local packages
	mapfile -t packages < <(go list -f '{{.ImportPath}} {{.TestImports}} {{.XTestImports}}' ./... | grep -v ' \[\] \[\]$' | grep -v internal/testenv |
		cut -d' ' -f1 | grep -vE "$not_emulated")
	emulated "${packages[@]}"
}

smoke() {
	export KUBEBUILDER_CONTROLPLANE_START_TIMEOUT=10m KUBEBUILDER_ASSETS
	KUBEBUILDER_ASSETS=$(realpath $copy/bin/kubernetes/v1.36*)
	emulated ./internal/testenv
}

emulator
sources
for step in "$@"; do "$step"; done
