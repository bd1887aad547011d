package embedded

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

// Feature gates of Cluster API are stored in the state and passed to core. A change restarts the plane.
func TestCoreFeatureGates(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	assets := testAssets(t, "v1.36.3")
	const alone = "--feature-gates=ClusterTopology=true,InPlaceUpdates=true,RuntimeSDK=true"
	for _, test := range []struct{ asked, want string }{
		{"", alone},
		{"MachineTaintPropagation=true", "--feature-gates=ClusterTopology=true,InPlaceUpdates=true,MachineTaintPropagation=true,RuntimeSDK=true"},
		{"", "--feature-gates=ClusterTopology=true,InPlaceUpdates=true,MachineTaintPropagation=true,RuntimeSDK=true"},
		{"RuntimeSDK=false, ClusterTopology=false", "--feature-gates=ClusterTopology=false,InPlaceUpdates=false,RuntimeSDK=false"},
		{"RuntimeSDK=false,InPlaceUpdates=false", "--feature-gates=ClusterTopology=true,InPlaceUpdates=false,RuntimeSDK=false"},
		{"InPlaceUpdates=false", "--feature-gates=ClusterTopology=true,InPlaceUpdates=false,RuntimeSDK=true"},
		{"InPlaceUpdates=true", alone},
		{"none", alone},
	} {
		before, _ := LoadState(l)
		s, err := decideState(l, assets, Options{CoreFeatureGates: test.asked})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.save(l); err != nil {
			t.Fatal(err)
		}
		if args := coreManagerComponent(l, s).args; !slices.Contains(args, test.want) {
			t.Errorf("--core-feature-gates %q: core has %q", test.asked, args)
		}
		status := Status{Settings: s.Settings, Assets: assets, Build: buildOf(s)}
		status.CoreFeatureGates = before.CoreFeatureGates
		if served := (Options{CoreFeatureGates: test.asked}).served(status, assets, Layout{}); served != maps.Equal(before.CoreFeatureGates, s.CoreFeatureGates) {
			t.Errorf("--core-feature-gates %q is accepted by a plane with %v: %v", test.asked, before.CoreFeatureGates, served)
		}
	}
	if _, err := gatesOf(map[string]bool{"Removed": true}, ""); err == nil || !strings.Contains(err.Error(), "Removed") || !strings.Contains(err.Error(), "--core-feature-gates none") {
		t.Errorf("a stored gate that this version does not have: %v", err)
	}
	for asked, why := range map[string]string{"Unheard=true": "Unheard", "MachinePool": "Name=true", "MachinePool=maybe": "Name=true", "InPlaceUpdates=true,RuntimeSDK=false": "RuntimeSDK=true with InPlaceUpdates=true"} {
		if _, err := decideState(l, assets, Options{CoreFeatureGates: asked}); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("--core-feature-gates %q: %v", asked, err)
		}
	}
}
