package model

import (
	"cmp"
	"fmt"
	"slices"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
)

// TwoSteps is the way to more encrypted resources in a cluster with several API servers.
const TwoSteps = "change the encryption in two steps (docs/control-plane-settings.md, Encryption in etcd)"

// TwoStepsOrAlone is the way for every number of API servers.
const TwoStepsOrAlone = TwoSteps + ". Or, with one replica, set rollout.strategy.inPlace to Only"

// EncryptionMode returns the mode of an API server.
func EncryptionMode(spec bootstrapv1.EncryptionSpec) bootstrapv1.EncryptionMode {
	return cmp.Or(spec.Mode, bootstrapv1.EncryptionSecretBox)
}

// EncryptedResources returns the resources that an API server encrypts without a configuration of the user.
func EncryptedResources(spec bootstrapv1.EncryptionSpec) []string {
	if spec.Mode == bootstrapv1.EncryptionNone {
		return nil
	}
	return render.EncryptedResources(spec)
}

// HasOtherEncryption reports whether the API server of a Machine may not read the data that one with the present spec writes. The
// CapstanConfig is changed before the machine, so the annotation of the update counts too. A configuration of the user is the user's
// responsibility.
func HasOtherEncryption(controlPlane *controlplanev1.CapstanControlPlane, machine *clusterv1.Machine, config *bootstrapv1.CapstanConfig) bool {
	want := controlPlane.Spec.Config.Cluster.Encryption
	if want.Configuration.Secret.Name != "" {
		return false
	}
	_, begun := machine.Annotations[controlplanev1.UpdateEncryptionAnnotation]
	return begun || config != nil && changesEncryption(config.Spec.Cluster.Encryption, want)
}

func changesEncryption(has, want bootstrapv1.EncryptionSpec) bool {
	if has.Configuration.Secret.Name != "" {
		return false
	}
	sorted := func(spec bootstrapv1.EncryptionSpec) []string {
		return slices.Sorted(slices.Values(EncryptedResources(spec)))
	}
	return EncryptionMode(has) != EncryptionMode(want) || !slices.Equal(sorted(has), sorted(want))
}

// unreadable returns the reason why no API server with the present spec can be added; "" when it can. Once one runs beside the others, the
// rollout ends as soon as possible.
func (f Fleet) unreadable() string {
	active := f.active()
	if len(active) == 0 || slices.ContainsFunc(active, func(i *Instance) bool { return !i.otherEncryption }) {
		return ""
	}
	return fmt.Sprintf("Machine %s has the former encryption setting and cannot read data that the new setting encrypts: %s", active[0].Name(), TwoStepsOrAlone)
}
