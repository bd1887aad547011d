#!/usr/bin/env bash
# Builds flannel and its CNI plugin from pinned Go modules, and an image of both with Debian's iptables as bin/flannel/flannel.tar,
# without Docker and without a registry. It does not install iptables on this box, because machines see the programs of their host.
#
# flanneld is built without two backends: that for the cloud of Tencent, because the Go module of its SDK is not always available,
# and udp, which needs a C compiler. The CNI plugin is from the last standard plugins that had it, because the module of flannel's
# own plugin is not available either.
set -euo pipefail
cd "$(dirname "$0")/.."

out=bin/flannel
mkdir -p bin
work=$(mktemp -d "$PWD/bin/.work-XXXXXX")
trap 'rm -rf "$work"' EXIT

hack/download.sh test/flannel/daemon mod download github.com/flannel-io/flannel
module=$(cd test/flannel/daemon && go list -m -f '{{.Dir}} {{.Version}}' github.com/flannel-io/flannel)
cp -r "${module% *}" "$work/flannel"
chmod -R u+w "$work/flannel"
sed -E -i '\,backend/(tencentvpc|udp)",d' "$work/flannel/main.go"
version="-X github.com/flannel-io/flannel/pkg/version.Version=${module#* }"
(cd "$work/flannel" && go build -o "$work/flanneld" -ldflags "-s -w $version" .)
mkdir "$work/cni"
hack/go-install.sh test/flannel/cni "$work/cni" github.com/containernetworking/plugins/plugins/meta/flannel
hack/go-install.sh node/images "$work" ./mkimage
(cd "$work" && apt-get -q download iptables && dpkg-deb -x iptables_*.deb iptables) >&2

# iptables prints the arguments that add it, its extensions and the libraries that it loads.
iptables() {
	local file name
	printf -- '-file %s:/usr/sbin/xtables-nft-multi\n' "$work/iptables/usr/sbin/xtables-nft-multi"
	for name in {iptables,ip6tables}{,-save,-restore}; do
		printf -- '-link xtables-nft-multi:/usr/sbin/%s\n' "$name"
	done
	for file in "$work"/iptables/usr/lib/*/xtables/*.so; do
		printf -- '-file %s:%s\n' "$file" "${file#"$work/iptables"}"
	done
	ldd "$work/iptables/usr/sbin/xtables-nft-multi" | grep -o '/[^ ]*' | sed 's/.*/-file &:&/'
}
mkdir -p $out
# shellcheck disable=SC2046 # a list on purpose
"$work/mkimage" -name registry.capstan.dev/test-flannel:v1 -user 0:0 -no-entrypoint -out "$work/flannel.tar" \
	-file /bin/busybox:/bin/busybox -link busybox:/bin/cp -file "$work/cni/flannel:/flannel" $(iptables) "$work/flanneld" /flanneld
mv -f "$work/flannel.tar" $out/flannel.tar
