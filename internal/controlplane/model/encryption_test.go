package model

import (
	"testing"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// TestHasOtherEncryption: other modes and resources count, their order does not, and neither do configurations of the user.
func TestHasOtherEncryption(t *testing.T) {
	none, box := bootstrapv1.EncryptionSpec{Mode: bootstrapv1.EncryptionNone}, bootstrapv1.EncryptionSpec{Mode: bootstrapv1.EncryptionSecretBox}
	two := bootstrapv1.EncryptionSpec{Resources: []string{"secrets", "configmaps"}}
	swapped := bootstrapv1.EncryptionSpec{Resources: []string{"configmaps", "secrets"}}
	var own bootstrapv1.EncryptionSpec
	own.Configuration.Secret.Name = "own"
	for name, c := range map[string]struct {
		has, want bootstrapv1.EncryptionSpec
		updates   bool
		other     bool
	}{
		"the default":               {has: box},
		"it begins":                 {has: none, want: box, other: true},
		"more resources":            {has: box, want: two, other: true},
		"another order":             {has: swapped, want: two},
		"another mode":              {has: box, want: bootstrapv1.EncryptionSpec{Mode: bootstrapv1.EncryptionAESGCM}, other: true},
		"to a configuration":        {has: none, want: own},
		"from a configuration":      {has: own, want: two},
		"the update is not over":    {has: box, want: box, updates: true, other: true},
		"a configuration is better": {has: box, want: own, updates: true},
	} {
		machine, config, cp := &clusterv1.Machine{}, &bootstrapv1.CapstanConfig{}, &controlplanev1.CapstanControlPlane{}
		config.Spec.Cluster.Encryption, cp.Spec.Config.Cluster.Encryption = c.has, c.want
		if c.updates {
			machine.Annotations = map[string]string{controlplanev1.UpdateEncryptionAnnotation: ""}
		}
		if got := HasOtherEncryption(cp, machine, config); got != c.other {
			t.Errorf("%s: %v", name, got)
		}
	}
	if HasOtherEncryption(&controlplanev1.CapstanControlPlane{}, &clusterv1.Machine{}, nil) {
		t.Error("a CapstanConfig that cannot be read differs")
	}
}
