#!/usr/bin/env bash
# Installs missing Debian packages for the build and for machines, and those that
# the arguments name. If all are installed, it prints nothing and needs neither
# root nor network.
set -euo pipefail

packages=(
	# build
	gcc libc6-dev pkg-config libseccomp-dev protobuf-compiler libprotobuf-dev gnupg
	# machines
	nftables conntrack iproute2 procps util-linux mount e2fsprogs kmod ca-certificates
	"$@"
)

if ! command -v dpkg-query >/dev/null; then
	echo "setup.sh: expected a Debian system, found no dpkg-query: install the equivalents of these packages: ${packages[*]}" >&2
	exit 0
fi
missing=()
for p in "${packages[@]}"; do
	[[ $(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null) == installed* ]] || missing+=("$p")
done
((${#missing[@]})) || exit 0

if ((EUID)); then
	echo "setup.sh: packages are missing: run as root: apt-get install ${missing[*]}" >&2
	exit 1
fi
echo "==> apt-get install ${missing[*]}" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
apt_get() { apt-get -q -o DPkg::Lock::Timeout=120 -o Acquire::Retries=5 "$@" >>"$log" 2>&1; }
apt_get update && apt_get install -y --no-install-recommends "${missing[@]}" || {
	cat "$log" >&2
	exit 1
}
