package embedded

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/cluster-api/feature"
)

// defaultGates as --core-feature-gates removes all earlier settings.
const defaultGates = "none"

// gatesOf returns the feature gates of Cluster API after a request. An empty request changes nothing.
func gatesOf(have map[string]bool, asked string) (map[string]bool, error) {
	switch asked {
	case "":
		return have, nil
	case defaultGates:
		return nil, nil
	}
	out := map[string]bool{}
	for gate := range strings.SplitSeq(asked, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(gate), "=")
		enabled, err := strconv.ParseBool(value)
		if err != nil {
			return nil, invalid("expected --core-feature-gates Name=true or Name=false, separated by commas, found %q", gate)
		}
		out[name] = enabled
	}
	// A copy, because the gates of this process must not change.
	if err := feature.MutableGates.DeepCopy().SetFromMap(out); err != nil {
		return nil, invalid("expected feature gates of Cluster API in --core-feature-gates: %w; its gates are %s", err, strings.Join(feature.MutableGates.KnownFeatures(), "; "))
	}
	return out, nil
}

// coreGates returns the gates that differ from core's defaults. The gates of ClusterClasses and of updates in place are off in
// core.
func coreGates(s State) map[string]bool {
	gates := map[string]bool{string(feature.ClusterTopology): true, string(feature.RuntimeSDK): true, string(feature.InPlaceUpdates): true}
	maps.Copy(gates, s.CoreFeatureGates)
	return gates
}

// coreFeatureGates returns the flag of Cluster API core. Other gates keep their defaults.
func coreFeatureGates(s State) string {
	gates := coreGates(s)
	var out []string
	for _, name := range slices.Sorted(maps.Keys(gates)) {
		out = append(out, fmt.Sprintf("%s=%t", name, gates[name]))
	}
	return "--feature-gates=" + strings.Join(out, ",")
}
