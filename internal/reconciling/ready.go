package reconciling

import (
	"slices"

	"sigs.k8s.io/cluster-api/util/conditions"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// SetReady sets the Ready condition from the conditions of the given types, listed in the order in which they become
// true, and from Deleting (ALL-09). The first condition with the wrong status provides the reason. Missing conditions
// are ignored: the condition before them explains the delay.
func SetReady(obj conditions.Setter, types ...string) error {
	types = append(slices.Clone(types), clusterv1.DeletingCondition)
	if !slices.ContainsFunc(types, func(t string) bool { return conditions.Has(obj, t) }) {
		return nil // No step was tried yet.
	}
	negative := conditions.NegativePolarityConditionTypes{clusterv1.DeletingCondition}
	return conditions.SetSummaryCondition(obj, obj, clusterv1.ReadyCondition,
		conditions.ForConditionTypes(types), negative, conditions.IgnoreTypesIfMissing(types),
		conditions.CustomMergeStrategy{MergeStrategy: conditions.DefaultMergeStrategy(
			conditions.GetPriorityFunc(conditions.GetDefaultMergePriorityFunc(negative...)),
			conditions.ComputeReasonFunc(func(issues, unknown, _ []conditions.ConditionWithOwnerInfo) string {
				return firstReason(types, append(slices.Clone(issues), unknown...))
			}),
		)},
	)
}

func firstReason(types []string, bad []conditions.ConditionWithOwnerInfo) string {
	for _, t := range types {
		for _, c := range bad {
			if c.Type == t {
				return c.Reason
			}
		}
	}
	return clusterv1.ReadyReason
}
