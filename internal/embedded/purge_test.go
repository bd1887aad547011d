package embedded

import (
	"os"
	"path/filepath"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
)

// A host removes an object only for a request that names the owner (ALL-18). `capstan down` therefore finds the owner of
// each object in the host's events, and for networks without machines in its folder.
func TestInventoryKnowsOwners_ALL18(t *testing.T) {
	root := t.TempDir()
	for id, spec := range map[string]string{
		"idle":   `{"id": "idle", "namespace": "n", "name": "c3", "cidr": "10.1.0.0/24", "ofALaterVersion": true}`,
		"broken": `{"id`,
	} {
		if err := os.MkdirAll(filepath.Join(root, "networks", id), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "networks", id, "spec.json"), []byte(spec), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	have := inventoryOf{map[string]owner.Object{}, map[string]owner.Object{}, map[string]owner.Object{}}
	machine := func(id string, gone hostpb.Event_Type) {
		have.observe(&hostpb.Event{Type: gone, Object: &hostpb.Event_Machine{Machine: &hostpb.Machine{Spec: &hostpb.MachineSpec{
			Id: id, Namespace: "n", Name: "of-" + id, Network: &hostpb.Network{Id: "net", Namespace: "n", Name: "c1"},
		}}}})
	}
	machine("m1", hostpb.Event_CHANGED)
	machine("m2", hostpb.Event_CHANGED)
	machine("m2", hostpb.Event_DELETED)
	have.observe(&hostpb.Event{Type: hostpb.Event_CHANGED, Object: &hostpb.Event_LoadBalancer{LoadBalancer: &hostpb.LoadBalancer{Id: "lb", Namespace: "n", Name: "c2"}}})
	if err := have.recordedNetworks(root); err != nil {
		t.Fatal(err)
	}
	for what, test := range map[string]struct {
		have map[string]owner.Object
		want map[string]string
	}{
		"machines":  {have.machines, map[string]string{"m1": "of-m1"}},
		"balancers": {have.balancers, map[string]string{"lb": "c2"}},
		"networks":  {have.networks, map[string]string{"net": "c1", "idle": "c3"}},
	} {
		if len(test.have) != len(test.want) {
			t.Errorf("%s: %v, want %v", what, test.have, test.want)
		}
		for id, name := range test.want {
			if of := test.have[id]; of == nil || of.GetNamespace() != "n" || of.GetName() != name {
				t.Errorf("%s %s: belongs to %v, want n/%s", what, id, of, name)
			}
		}
	}
	if err := have.recordedNetworks(t.TempDir()); err != nil {
		t.Errorf("a host without networks: %v", err)
	}
}
