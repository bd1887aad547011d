package model

import (
	"fmt"
	"sort"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/order"
	"capstan.dev/capstan/internal/stored"
)

// Outdated returns the reasons why the spec demands another Machine (CP-18, CP-20). Specs are compared as they are stored.
// New defaults of a new version of Capstan are no reason to replace a Machine.
func Outdated(controlPlane *controlplanev1.CapstanControlPlane, machine *clusterv1.Machine, config *bootstrapv1.CapstanConfig, infraMachine *unstructured.Unstructured, now time.Time) []string {
	var out []string
	if wanted := WantedVersion(controlPlane); machine.Spec.Version != wanted {
		out = append(out, fmt.Sprintf("Version %s, %s required", machine.Spec.Version, wanted))
	}
	if config != nil && !sameConfig(config.Spec, controlPlane.Spec.Config) {
		out = append(out, "CapstanConfig is not up-to-date")
	}
	if infraMachine != nil && !ClonedFrom(infraMachine, controlPlane.Spec.MachineTemplate.Spec.InfrastructureRef) {
		out = append(out, fmt.Sprintf("%s is not up-to-date", infraMachine.GetKind()))
	}
	if after := controlPlane.Spec.Rollout.After; !after.IsZero() && !now.Before(after.Time) && machine.CreationTimestamp.Before(&after) {
		out = append(out, "the time in spec.rollout.after has passed")
	}
	if expiring, young := expiry(controlPlane, machine, now); expiring && !young {
		out = append(out, fmt.Sprintf("Certificates expire within %d days", controlPlane.Spec.Rollout.Before.CertificatesExpiryDays))
	}
	sort.Strings(out)
	return out
}

// WantedVersion is spec.version with its leading v (CP-05). Objects that were stored before the webhook added the v may lack it.
func WantedVersion(controlPlane *controlplanev1.CapstanControlPlane) string {
	if version, err := render.Version(controlPlane.Spec.Version); err == nil {
		return version
	}
	return controlPlane.Spec.Version
}

// sameConfig ignores the role, which differs between the first machine and the others, and the backup that the first machine
// started with.
func sameConfig(has, want bootstrapv1.CapstanConfigSpec) bool {
	has.Role, want.Role = "", ""
	has.Restore, want.Restore = bootstrapv1.RestoreSource{}, bootstrapv1.RestoreSource{}
	return stored.Equal(has, want)
}

// ClonedFrom reports whether an infrastructure machine was created from a template.
func ClonedFrom(infraMachine *unstructured.Unstructured, ref clusterv1.ContractVersionedObjectReference) bool {
	name := infraMachine.GetAnnotations()[clusterv1.TemplateClonedFromNameAnnotation]
	kind := infraMachine.GetAnnotations()[clusterv1.TemplateClonedFromGroupKindAnnotation]
	return (name == "" || name == ref.Name) && (kind == "" || kind == ref.GroupKind().String())
}

// expiry reports whether the certificates of a Machine expire within rollout.before.certificatesExpiryDays, and whether the
// Machine was created within these days. In the second case a replacement would have no longer certificates, for example when
// they end with their authority, and the rollout would never end.
func expiry(controlPlane *controlplanev1.CapstanControlPlane, machine *clusterv1.Machine, now time.Time) (expiring, young bool) {
	before := time.Duration(controlPlane.Spec.Rollout.Before.CertificatesExpiryDays) * Day
	expire := certificatesExpire(machine)
	if before == 0 || expire.IsZero() {
		return false, false
	}
	due := expire.Add(-before)
	return now.After(due), !machine.CreationTimestamp.Time.Before(due)
}

// FutileRollouts names the Machines that are not replaced although their certificates expire; "" when there are none.
func FutileRollouts(controlPlane *controlplanev1.CapstanControlPlane, machines []*clusterv1.Machine, now time.Time) string {
	var names []string
	for _, m := range machines {
		if expiring, young := expiry(controlPlane, m, now); expiring && young {
			names = append(names, m.Name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	sort.Strings(names)
	return fmt.Sprintf("Machines %s are not replaced: their certificates expire within rollout.before.certificatesExpiryDays (%d), but the Machines were made within these days, and the certificates of their replacements would end no later. "+
		"If the certificate authority expires, replace it (spec.certificates.rotateCAAfter); else make certificatesExpiryDays less than config.cluster.certificateValidityDays",
		strings.Join(names, ", "), controlPlane.Spec.Rollout.Before.CertificatesExpiryDays)
}

// certificatesExpire reads the annotation of a Machine, which this provider keeps current; zero when it is not known.
func certificatesExpire(machine *clusterv1.Machine) time.Time {
	at, err := time.Parse(time.RFC3339, machine.Annotations[clusterv1.MachineCertificatesExpiryDateAnnotation])
	if err != nil {
		return time.Time{}
	}
	return at
}

// NextOutdated returns the time until the next Machine becomes outdated by the clock alone; 0 when none does.
func NextOutdated(controlPlane *controlplanev1.CapstanControlPlane, machines []*clusterv1.Machine, now time.Time) time.Duration {
	var next time.Duration
	soonest := func(at time.Time) { next = order.Sooner(next, at.Sub(now)) }
	if after := controlPlane.Spec.Rollout.After; !after.IsZero() {
		soonest(after.Time)
	}
	if days := controlPlane.Spec.Rollout.Before.CertificatesExpiryDays; days > 0 {
		for _, m := range machines {
			if expire := certificatesExpire(m); !expire.IsZero() {
				soonest(expire.Add(-time.Duration(days) * Day))
			}
		}
	}
	return next
}
