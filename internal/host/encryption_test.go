package host

import (
	"os"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
)

// The encryption of a host can change only while it has no network across hosts. Its key lasts as long as it encrypts.
func TestOpenLink(t *testing.T) {
	h := onBox(t)
	path := h.store.path("wireguard.key")
	open := func(encrypt bool) string {
		t.Helper()
		h.config.EncryptOverlays, h.box.Link = encrypt, nil
		if err := h.networks.openLink(); err != nil {
			return err.Error()
		}
		if encrypt != (h.box.Link != nil) {
			t.Errorf("encrypt %t: %+v", encrypt, h.box.Link)
		}
		return ""
	}
	publicKey := func() string {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.machines.info().OverlayPublicKey
	}
	if trouble := open(false); trouble != "" || publicKey() != "" {
		t.Errorf("without encryption: %s", trouble)
	}
	if trouble := open(true); trouble != "" || len(publicKey()) != 44 {
		t.Errorf("with encryption: %s, key %q", trouble, publicKey())
	}
	first := publicKey()
	across := &hostpb.Network{Id: "n", Namespace: "default", Name: "demo", Overlay: &hostpb.Overlay{Vni: 5000}}
	h.networks.byID["n"] = across
	if trouble := open(true); trouble != "" || publicKey() != first {
		t.Errorf("the key did not survive a restart: %s", trouble)
	}
	if trouble := open(false); !strings.Contains(trouble, "cluster default/demo on this host is encrypted") {
		t.Errorf("the encryption of a network ended: %q", trouble)
	}
	delete(h.networks.byID, "n")
	if trouble := open(false); trouble != "" {
		t.Error(trouble)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the key stays: %v", err)
	}
	h.networks.byID["n"] = across
	if trouble := open(true); !strings.Contains(trouble, "cluster default/demo on this host is not encrypted") {
		t.Errorf("a network became encrypted: %q", trouble)
	}
	across.Overlay = nil
	if trouble := open(true); trouble != "" || publicKey() == first {
		t.Errorf("a network on one box does not matter, and the key is another one: %s", trouble)
	}
}
