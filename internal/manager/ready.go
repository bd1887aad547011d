package manager

import (
	"slices"

	"sigs.k8s.io/cluster-api/util/conditions"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// SetReady sets the Ready condition from the conditions of the given types, which are named in the order
// in which they become true, and from Deleting (ALL-09). Its reason is that of the first of them that
// is not as it should be. Those that are missing say nothing: the one before says what is waited for.
func SetReady(obj conditions.Setter, types ...string) error {
	types = append(slices.Clone(types), clusterv1.DeletingCondition)
	if !slices.ContainsFunc(types, func(t string) bool { return conditions.Has(obj, t) }) {
		return nil // nothing was tried yet
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
