package host

import (
	"fmt"
	"os"
	"path/filepath"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/network/wireguard"
)

// EncryptionWireGuard is the value of --overlay-encryption with which tunnels between hosts are encrypted.
const EncryptionWireGuard = "WireGuard"

// openLink reads the key of this host, or creates it; mu is held. The key exists exactly while the host encrypts its overlays, so
// it also records whether the existing networks are encrypted: they cannot change, because the hosts of a cluster must agree.
func (ns *networks) openLink() error {
	path := ns.store.path("wireguard.key")
	want := ns.config.EncryptOverlays
	if cluster := ns.acrossHostsCluster(); cluster != "" && want != atomicfile.Exists(path) {
		return encryptionChanged(cluster, want)
	}
	if !want {
		return atomicfile.Remove(path)
	}
	private, err := wireguard.EnsureKey(path)
	if err != nil {
		return fmt.Errorf("the key for the encryption of overlays: %w", err)
	}
	ns.box.Link = &wireguard.Link{
		KeyFile: path, Public: private.PublicKey(), Dir: filepath.Join(ns.box.Dir, "wireguard"), UID: ns.config.BalancerUID,
		Logging: ns.config.Logging,
	}
	return os.MkdirAll(ns.box.Link.Dir, 0o700) // It exists as long as capstand watches the log in it.
}

// acrossHostsCluster returns the cluster of a recorded network with an overlay, or "".
func (ns *networks) acrossHostsCluster() string {
	for _, n := range ns.byID {
		if n.Overlay != nil {
			return n.Namespace + "/" + n.Name
		}
	}
	return ""
}

func encryptionChanged(cluster string, want bool) error {
	if want {
		return fmt.Errorf("--overlay-encryption=%s: the network of cluster %s on this host is not encrypted, and cannot change while it exists: "+
			"remove the option, restore the file wireguard.key if it was lost, or remove the machines of all clusters across hosts from this host first", EncryptionWireGuard, cluster)
	}
	return fmt.Errorf("the network of cluster %s on this host is encrypted, and cannot change while it exists: "+
		"set --overlay-encryption=%s again, or remove the machines of all clusters across hosts from this host first", cluster, EncryptionWireGuard)
}
