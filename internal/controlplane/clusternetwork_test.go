package controlplane

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// Row CP-07: in an existing cluster, changes that no rollout can apply are refused.
func TestClusterChange_CP07(t *testing.T) {
	type config = bootstrapv1.ClusterConfiguration
	own := bootstrapv1.EncryptionSpec{}
	own.Configuration.Secret.Name = "mine"
	encryption := func(mode bootstrapv1.EncryptionMode, resources ...string) config {
		return config{Encryption: bootstrapv1.EncryptionSpec{Mode: mode, Resources: resources}}
	}
	for name, tc := range map[string]struct {
		before, after config
		refused       string // field and part of the message
	}{
		"nothing":                                 {},
		"the default, written down":               {after: config{PodNetwork: bootstrapv1.PodNetworkRoutes, KubeProxy: bootstrapv1.KubeProxyNFTables, Encryption: encryption(bootstrapv1.EncryptionSecretBox, "secrets").Encryption}},
		"pod network":                             {after: config{PodNetwork: bootstrapv1.PodNetworkNone}, refused: "podNetwork: Forbidden"},
		"and back":                                {before: config{KubeProxy: bootstrapv1.KubeProxyNone}, refused: "kubeProxy: Forbidden"},
		"another mode":                            {after: encryption(bootstrapv1.EncryptionAESGCM), refused: "encryption: Forbidden: the existing data in etcd would become unreadable"},
		"no encryption any more":                  {after: encryption(bootstrapv1.EncryptionNone), refused: "<cluster>-encryption"},
		"encryption from now on":                  {before: encryption(bootstrapv1.EncryptionNone), after: encryption(bootstrapv1.EncryptionAESGCM, "secrets")},
		"more is encrypted":                       {after: encryption("", "configmaps", "secrets")},
		"less is encrypted":                       {before: encryption("", "configmaps", "secrets"), after: encryption(""), refused: "resources: Forbidden: configmaps are encrypted"},
		"something else":                          {after: encryption("", "configmaps"), refused: "secrets are encrypted"},
		"a configuration of one's own":            {after: config{Encryption: own}},
		"another configuration of one's own":      {before: config{Encryption: own}, after: config{Encryption: own}},
		"from a configuration of one's own to us": {before: config{Encryption: own}, refused: "encryption: Forbidden"},
	} {
		t.Run(name, func(t *testing.T) {
			got := validateClusterChange(tc.before, tc.after, field.NewPath("cluster")).ToAggregate()
			if tc.refused == "" && got != nil || tc.refused != "" && (got == nil || !strings.Contains(got.Error(), tc.refused)) {
				t.Errorf("got %v, want %q", got, tc.refused)
			}
		})
	}

	before := &controlplanev1.CapstanControlPlane{}
	before.Spec.Version = "v1.36.3"
	after := before.DeepCopy()
	after.Spec.Config.Cluster.PodNetwork = bootstrapv1.PodNetworkNone
	if errs := validateChange(before, after); len(errs) > 0 {
		t.Errorf("without a cluster: %v", errs)
	}
	before.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
	if errs := validateChange(before, after); len(errs) != 1 {
		t.Errorf("in an existing cluster: %v", errs)
	}
}
