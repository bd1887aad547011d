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

const (
	runtimeSDK     = string(feature.RuntimeSDK)
	inPlaceUpdates = string(feature.InPlaceUpdates)
)

// gatesOf returns the feature gates of Cluster API after a request. An empty request changes nothing. Cluster API removes gates in new
// versions, so stored gates are checked as well.
func gatesOf(have map[string]bool, asked string) (map[string]bool, error) {
	switch asked {
	case "":
		if err := checkGates(have); err != nil {
			return nil, invalid("the stored feature gates do not fit this build: %w. Set others, or remove them with --core-feature-gates none", err)
		}
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
	return out, checkGates(out)
}

// checkGates returns an error for gates with which Cluster API core does not start.
func checkGates(gates map[string]bool) error {
	// A copy, because the gates of this process must not change.
	if err := feature.MutableGates.DeepCopy().SetFromMap(gates); err != nil {
		return invalid("expected feature gates of Cluster API in --core-feature-gates: %w; its gates are %s", err, strings.Join(feature.MutableGates.KnownFeatures(), "; "))
	}
	if gates[inPlaceUpdates] && !coreGates(gates)[runtimeSDK] {
		return invalid("expected RuntimeSDK=true with InPlaceUpdates=true in --core-feature-gates, found RuntimeSDK=false: Cluster API core does not start without its client for hooks. Set InPlaceUpdates=false, or leave it out")
	}
	return nil
}

// coreGates returns the gates that differ from core's defaults, from those of a plane. The gates of ClusterClasses and of updates in place
// are off in core. Updates in place need the Runtime SDK and follow it.
func coreGates(set map[string]bool) map[string]bool {
	gates := map[string]bool{string(feature.ClusterTopology): true, runtimeSDK: true}
	maps.Copy(gates, set)
	if _, found := gates[inPlaceUpdates]; !found {
		gates[inPlaceUpdates] = gates[runtimeSDK]
	}
	return gates
}

// coreFeatureGates returns the flag of Cluster API core. Other gates keep their defaults.
func coreFeatureGates(s State) string {
	gates := coreGates(s.CoreFeatureGates)
	var out []string
	for _, name := range slices.Sorted(maps.Keys(gates)) {
		out = append(out, fmt.Sprintf("%s=%t", name, gates[name]))
	}
	return "--feature-gates=" + strings.Join(out, ",")
}
