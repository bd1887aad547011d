package embedded

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/cluster-api/feature"
)

// defaultGates takes back what --core-feature-gates has set before.
const defaultGates = "none"

// gatesOf are the feature gates of Cluster API that a plane has after it was asked for others; nothing asked changes nothing.
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
			return nil, fmt.Errorf("wanted --core-feature-gates Name=true or Name=false, with commas between them, found %q", gate)
		}
		out[name] = enabled
	}
	// On a copy: this process has gates of its own.
	if err := feature.MutableGates.DeepCopy().SetFromMap(out); err != nil {
		return nil, fmt.Errorf("wanted feature gates of Cluster API in --core-feature-gates: %w; it has %s", err, strings.Join(feature.MutableGates.KnownFeatures(), "; "))
	}
	return out, nil
}

// coreFeatureGates is the flag of core. ClusterTopology is off in Cluster API by default; all other gates stay as they are.
func coreFeatureGates(s State) string {
	gates := map[string]bool{string(feature.ClusterTopology): true}
	maps.Copy(gates, s.CoreFeatureGates)
	var out []string
	for _, name := range slices.Sorted(maps.Keys(gates)) {
		out = append(out, fmt.Sprintf("%s=%t", name, gates[name]))
	}
	return "--feature-gates=" + strings.Join(out, ",")
}
