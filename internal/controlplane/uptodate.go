package controlplane

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"sort"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/external"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
)

// findOutdated finds out which Machines are not what the spec would make now, and why; and since when the
// infrastructure of those that are being deleted has been going.
func (r *Reconciler) findOutdated(ctx context.Context, s *scope) error {
	s.outdated, s.going = map[string][]string{}, map[string]time.Time{}
	for _, machine := range s.machines {
		config, infraMachine, err := r.partsOf(ctx, machine)
		if err != nil {
			return err
		}
		if infraMachine != nil && infraMachine.GetDeletionTimestamp() != nil {
			s.going[machine.Name] = infraMachine.GetDeletionTimestamp().Time
		}
		s.outdated[machine.Name] = outdated(s.controlPlane, machine, config, infraMachine, now())
	}
	return r.findOtherAuthorities(ctx, s)
}

// partsOf are the CapstanConfig and the infrastructure machine of a Machine; nil when they are not there,
// because it is being deleted, or cannot be read now: that is no reason to call it outdated.
func (r *Reconciler) partsOf(ctx context.Context, machine *clusterv1.Machine) (*bootstrapv1.CapstanConfig, *unstructured.Unstructured, error) {
	config := &bootstrapv1.CapstanConfig{}
	key := client.ObjectKey{Namespace: machine.Namespace, Name: machine.Spec.Bootstrap.ConfigRef.Name}
	if err := r.Client.Get(ctx, key, config); client.IgnoreNotFound(err) != nil {
		return nil, nil, err
	} else if err != nil {
		config = nil
	}
	infraMachine, err := external.GetObjectFromContractVersionedRef(ctx, r.Client, machine.Spec.InfrastructureRef, machine.Namespace)
	if err != nil {
		infraMachine = nil
	}
	return config, infraMachine, nil
}

// wantedVersion is spec.version with its leading v (CP-05). The spec itself stays as its author wrote it, so that tools that
// compare it with a file find no difference.
func wantedVersion(controlPlane *controlplanev1.CapstanControlPlane) string {
	if version, err := render.Version(controlPlane.Spec.Version); err == nil {
		return version
	}
	return controlPlane.Spec.Version
}

// outdated says why a Machine is not what the spec would make now (CP-18, CP-20). Specs are compared as they
// are stored, never with what this version of Capstan makes of them: a new version, which may have new
// defaults, is no reason to replace anything.
func outdated(controlPlane *controlplanev1.CapstanControlPlane, machine *clusterv1.Machine, config *bootstrapv1.CapstanConfig, infraMachine *unstructured.Unstructured, now time.Time) []string {
	var out []string
	if wanted := wantedVersion(controlPlane); machine.Spec.Version != wanted {
		out = append(out, fmt.Sprintf("Version %s, %s required", machine.Spec.Version, wanted))
	}
	if config != nil && !sameConfig(config.Spec, controlPlane.Spec.Config) {
		out = append(out, "CapstanConfig is not up-to-date")
	}
	if infraMachine != nil && !clonedFrom(infraMachine, controlPlane.Spec.MachineTemplate.Spec.InfrastructureRef) {
		out = append(out, fmt.Sprintf("%s is not up-to-date", infraMachine.GetKind()))
	}
	if after := controlPlane.Spec.Rollout.After; !after.IsZero() && !now.Before(after.Time) && machine.CreationTimestamp.Before(&after) {
		out = append(out, "rollout.after has come")
	}
	if expiring, young := expiry(controlPlane, machine, now); expiring && !young {
		out = append(out, fmt.Sprintf("Certificates expire within %d days", controlPlane.Spec.Rollout.Before.CertificatesExpiryDays))
	}
	sort.Strings(out)
	return out
}

// sameConfig compares all but the role, which differs between the first machine and the others, and the backup that the first
// one began with.
func sameConfig(has, want bootstrapv1.CapstanConfigSpec) bool {
	has.Role, want.Role = "", ""
	has.Restore, want.Restore = bootstrapv1.RestoreSource{}, bootstrapv1.RestoreSource{}
	return equalJSON(has, want)
}

// clonedFrom says whether an infrastructure machine was made from a template.
func clonedFrom(infraMachine *unstructured.Unstructured, ref clusterv1.ContractVersionedObjectReference) bool {
	name := infraMachine.GetAnnotations()[clusterv1.TemplateClonedFromNameAnnotation]
	kind := infraMachine.GetAnnotations()[clusterv1.TemplateClonedFromGroupKindAnnotation]
	return (name == "" || name == ref.Name) && (kind == "" || kind == ref.GroupKind().String())
}

// expiry says whether the certificates of a Machine expire within rollout.before.certificatesExpiryDays, and whether it
// was made within these days itself. Then those of another one would expire within them, too, as they do when they end with
// their authority: the rollout would never end.
func expiry(controlPlane *controlplanev1.CapstanControlPlane, machine *clusterv1.Machine, now time.Time) (expiring, young bool) {
	before := time.Duration(controlPlane.Spec.Rollout.Before.CertificatesExpiryDays) * day
	expire := certificatesExpire(machine)
	if before == 0 || expire.IsZero() {
		return false, false
	}
	due := expire.Add(-before)
	return now.After(due), !machine.CreationTimestamp.Time.Before(due)
}

// inVain says which Machines are not replaced although their certificates expire; "" when there are none.
func inVain(controlPlane *controlplanev1.CapstanControlPlane, machines []*clusterv1.Machine, now time.Time) string {
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
	return fmt.Sprintf("Machines %s have certificates that expire within rollout.before.certificatesExpiryDays (%d), and were made within these days: others would have no better ones. "+
		"If the certificate authority expires, replace it (spec.certificates.rotateCAAfter); else make certificatesExpiryDays less than config.cluster.certificateValidityDays",
		strings.Join(names, ", "), controlPlane.Spec.Rollout.Before.CertificatesExpiryDays)
}

// certificatesExpire is what the Machine's annotation says, which we keep; zero when nothing is known.
func certificatesExpire(machine *clusterv1.Machine) time.Time {
	at, err := time.Parse(time.RFC3339, machine.Annotations[clusterv1.MachineCertificatesExpiryDateAnnotation])
	if err != nil {
		return time.Time{}
	}
	return at
}

// nextOutdated is when the next Machine becomes outdated by the clock alone, which is no event; 0 when none does.
func nextOutdated(controlPlane *controlplanev1.CapstanControlPlane, machines []*clusterv1.Machine, now time.Time) time.Duration {
	var next time.Duration
	soonest := func(at time.Time) {
		if d := at.Sub(now); d > 0 && (next == 0 || d < next) {
			next = d
		}
	}
	if after := controlPlane.Spec.Rollout.After; !after.IsZero() {
		soonest(after.Time)
	}
	if days := controlPlane.Spec.Rollout.Before.CertificatesExpiryDays; days > 0 {
		for _, m := range machines {
			if expire := certificatesExpire(m); !expire.IsZero() {
				soonest(expire.Add(-time.Duration(days) * day))
			}
		}
	}
	return next
}

// equalJSON compares as the API server stores: empty and missing are the same.
func equalJSON(a, b any) bool {
	x, err := json.Marshal(a)
	if err != nil {
		return false
	}
	y, err := json.Marshal(b)
	return err == nil && bytes.Equal(x, y)
}
