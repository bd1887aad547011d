package bootstrap

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// TestDataIsDecodedForItsToken: a reconcile decodes the bootstrap data only if its token is needed or still exists. The data of this test
// cannot be decoded.
func TestDataIsDecodedForItsToken(t *testing.T) {
	const available, removed = bootstrapv1.BootstrapTokenAvailableReason, bootstrapv1.BootstrapTokenRemovedReason
	joined, deleting := owner{joined: true}, owner{deleting: true}
	for name, tc := range map[string]struct {
		role    bootstrapv1.Role
		reason  string
		owner   owner
		decodes bool
	}{
		"the first machine":             {role: bootstrapv1.RoleInit},
		"a control plane machine":       {role: bootstrapv1.RoleControlPlane},
		"its node":                      {role: bootstrapv1.RoleControlPlane, owner: joined},
		"a former worker":               {role: bootstrapv1.RoleControlPlane, reason: available, decodes: true},
		"a new worker":                  {role: bootstrapv1.RoleWorker, decodes: true},
		"a new worker by default":       {decodes: true},
		"a worker with a token":         {reason: available, decodes: true},
		"a worker that has joined":      {reason: available, owner: joined, decodes: true},
		"a worker that is deleted":      {reason: available, owner: deleting, decodes: true},
		"a worker that joined before":   {reason: removed, owner: joined},
		"a worker in deletion":          {reason: removed, owner: deleting},
		"a worker that lost its node":   {reason: removed, decodes: true},
		"a restored worker with a node": {owner: joined, decodes: true},
	} {
		t.Run(name, func(t *testing.T) {
			config := &bootstrapv1.CapstanConfig{Spec: bootstrapv1.CapstanConfigSpec{Role: tc.role}}
			if tc.reason != "" {
				reconciling.SetCondition(config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionFalse, tc.reason, "")
			}
			config.Generation = 7
			_, err := (&Reconciler{}).reconcileToken(t.Context(), &scope{config: config, owner: &tc.owner, data: []byte("]")})
			if (err != nil) != tc.decodes {
				t.Errorf("decodes the data: %v, want %v", err, tc.decodes)
			}
			if c := conditions.Get(config, bootstrapv1.BootstrapTokenAvailableCondition); err == nil && c != nil && c.ObservedGeneration != 7 {
				t.Errorf("the condition is that of generation %d, want 7", c.ObservedGeneration)
			}
		})
	}
}
