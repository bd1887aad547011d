#!/usr/bin/env bash
# Builds the programs of a machine, except for Kubernetes, into bin/node:
# containerd, runc and the CNI plugins.
set -euo pipefail
cd "$(dirname "$0")/.."

version() { (cd "$1" && go list -m -f '{{.Version}}' "$2"); }

# libseccomp of Debian is linked statically: runc also runs inside machines, which
# may lack the library. osusergo and netgo exclude the name service of glibc, which
# cannot be linked statically.
CGO_ENABLED=1 LDFLAGS='-linkmode external -extldflags "-static"' \
	hack/go-install.sh node/runc bin/node/bin \
	-tags seccomp,osusergo,netgo,urfave_cli_no_docs github.com/opencontainers/runc

containerd=github.com/containerd/containerd/v2
CGO_ENABLED=0 LDFLAGS="-X $containerd/version.Version=$(version node $containerd)" \
	hack/go-install.sh node bin/node/bin -tags no_btrfs,no_devmapper,no_zfs \
	$containerd/cmd/containerd $containerd/cmd/containerd-shim-runc-v2 $containerd/cmd/ctr

plugins=github.com/containernetworking/plugins
# All standard plugins that need no daemon of their own. docs/networking.md has the list.
CGO_ENABLED=0 LDFLAGS="-X $plugins/pkg/utils/buildversion.BuildVersion=$(version node $plugins)" \
	hack/go-install.sh node bin/node/cni \
	$plugins/plugins/main/{bridge,host-device,ipvlan,loopback,macvlan,ptp,vlan} \
	$plugins/plugins/ipam/{host-local,static} \
	$plugins/plugins/meta/{bandwidth,firewall,portmap,sbr,tuning,vrf}
