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
		alone         bool
		refused       string // field and part of the message
	}{
		"nothing":                                 {},
		"the default, written down":               {after: config{PodNetwork: bootstrapv1.PodNetworkRoutes, KubeProxy: bootstrapv1.KubeProxyNFTables, Encryption: encryption(bootstrapv1.EncryptionSecretBox, "secrets").Encryption}},
		"pod network":                             {after: config{PodNetwork: bootstrapv1.PodNetworkNone}, refused: "podNetwork: Forbidden"},
		"and back":                                {before: config{KubeProxy: bootstrapv1.KubeProxyNone}, refused: "kubeProxy: Forbidden"},
		"another mode":                            {after: encryption(bootstrapv1.EncryptionAESGCM), refused: "encryption: Forbidden: the existing data in etcd would become unreadable"},
		"no encryption any more":                  {after: encryption(bootstrapv1.EncryptionNone), refused: "<cluster>-encryption"},
		"encryption from now on":                  {before: encryption(bootstrapv1.EncryptionNone), after: encryption(bootstrapv1.EncryptionAESGCM, "secrets"), refused: "cannot read the secrets that the new setting encrypts"},
		"encryption from now on, of one machine":  {before: encryption(bootstrapv1.EncryptionNone), after: encryption(bootstrapv1.EncryptionAESGCM, "secrets"), alone: true},
		"more is encrypted":                       {after: encryption("", "configmaps", "secrets"), refused: "cannot read the configmaps that the new setting encrypts"},
		"more is encrypted, by one machine":       {after: encryption("", "configmaps", "secrets"), alone: true},
		"less is encrypted, by one machine":       {before: encryption("", "configmaps", "secrets"), after: encryption(""), alone: true, refused: "resources: Forbidden: configmaps are encrypted"},
		"less is encrypted":                       {before: encryption("", "configmaps", "secrets"), after: encryption(""), refused: "resources: Forbidden: configmaps are encrypted"},
		"something else":                          {after: encryption("", "configmaps"), refused: "secrets are encrypted"},
		"a configuration of one's own":            {after: config{Encryption: own}},
		"another configuration of one's own":      {before: config{Encryption: own}, after: config{Encryption: own}},
		"from a configuration of one's own to us": {before: config{Encryption: own}, refused: "encryption: Forbidden"},
	} {
		t.Run(name, func(t *testing.T) {
			path := field.NewPath("cluster")
			errs := validateClusterChange(tc.before, tc.after, path)
			got := append(errs, validateEncryptionChange(tc.before.Encryption, tc.after.Encryption, tc.alone, path.Child("encryption"))...).ToAggregate()
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

// Row CP-07: more is encrypted only where no API server runs that could not read it.
func TestEncryptionReachesAllAtOnce_CP07(t *testing.T) {
	type controlPlane = controlplanev1.CapstanControlPlane
	for name, tc := range map[string]struct {
		change  func(before, after *controlPlane)
		allowed bool
	}{
		"one machine, in place":    {func(*controlPlane, *controlPlane) {}, true},
		"one machine, another one": {func(_, after *controlPlane) { after.Spec.Rollout.Strategy.InPlace = controlplanev1.InPlacePrefer }, false},
		"three machines": {func(before, after *controlPlane) {
			before.Spec.Replicas, after.Spec.Replicas = ptr.To[int32](3), ptr.To[int32](3)
		}, false},
		"three machines now":       {func(_, after *controlPlane) { after.Spec.Replicas = ptr.To[int32](3) }, false},
		"three machines no longer": {func(before, _ *controlPlane) { before.Spec.Replicas = ptr.To[int32](3) }, false},
		"a machine leaves":         {func(before, _ *controlPlane) { before.Status.Replicas = ptr.To[int32](2) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			before := &controlPlane{}
			before.Spec.Version, before.Spec.Replicas = "v1.36.3", ptr.To[int32](1)
			before.Spec.Config.Cluster.Encryption.Mode = bootstrapv1.EncryptionNone
			before.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
			after := before.DeepCopy()
			after.Spec.Config.Cluster.Encryption.Mode = bootstrapv1.EncryptionSecretBox
			after.Spec.Rollout.Strategy.InPlace = controlplanev1.InPlaceOnly
			tc.change(before, after)
			if errs := validateChange(before, after); (len(errs) == 0) != tc.allowed {
				t.Errorf("got %v", errs)
			}
		})
	}
}
