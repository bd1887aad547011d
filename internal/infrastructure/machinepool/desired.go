package machinepool

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
)

// maxReplicas is the largest number of providerIDs in spec.providerIDList.
const maxReplicas = 10000

// invalid is the reason why the pool cannot follow its spec (MP-09).
type invalid struct{ reason, message string }

// desire computes the desired state of the pool. If a part of the spec is invalid, s.invalid contains the reason and
// the pool is frozen: it only deletes surplus machines.
func (r *Reconciler) desire(ctx context.Context, s *scope) error {
	mp, pool := s.machinePool, s.pool
	s.want = desired{
		replicas: replicas(mp, pool),
		policy:   pool.Spec.DeletePolicy,
		domains:  mp.Spec.FailureDomains,
		version:  mp.Spec.Template.Spec.Version,
		secret:   ptr.Deref(mp.Spec.Template.Spec.Bootstrap.DataSecretName, ""),
		minReady: time.Duration(ptr.Deref(mp.Spec.Template.Spec.MinReadySeconds, 0)) * time.Second,
	}
	var err error
	if s.want.hash, err = specHash(pool.Spec.MachineTemplate.Spec, s.want.version, s.want.secret); err != nil {
		return err
	}
	if err := r.desireUpdates(ctx, s); err != nil {
		return err
	}
	if s.hosts, err = hostselection.UsableIn(ctx, r.Client, s.cluster, pool.Namespace, pool.Spec.MachineTemplate.Spec.HostSelector); err != nil {
		return err
	}
	stale, err := r.checkData(ctx, s)
	if err != nil {
		return err
	}
	controlPlane := &clusterv1.MachineList{}
	if err := r.Client.List(ctx, controlPlane, reconciling.ControlPlaneOf(client.ObjectKeyFromObject(s.cluster)), client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	s.want.open = openDomains(s.want, s.cluster.Status.FailureDomains, s.hosts, pool.Spec.MachineTemplate.Spec)
	s.want.missing = missingDomains(s.want.domains, s.cluster.Status.FailureDomains)
	s.want.budget, s.invalid = resolveBudget(pool.Spec.RollingUpdate, s.want.replicas)
	if len(pool.Spec.MachineTemplate.Spec.Volumes) > 0 {
		s.want.budget = s.want.budget.withVolumes()
	}
	for _, check := range []*invalid{
		checkReplicas(s.want.replicas), checkDomains(s.want.domains, s.cluster.Status.FailureDomains), checkVersion(s.want.version, versions(s.hosts)),
		checkSkew(mp, controlPlane.Items), stale,
	} {
		if s.invalid == nil {
			s.invalid = check
		}
	}
	s.want.frozen = s.invalid != nil
	return nil
}

// replicas returns the number in the MachinePool, or that of the pool while another component manages it and the
// MachinePool follows.
func replicas(mp *clusterv1.MachinePool, pool *infrav1.CapstanMachinePool) int {
	n := ptr.Deref(mp.Spec.Replicas, 1)
	if annotations.ReplicasManagedByExternalAutoscaler(mp) {
		n = ptr.Deref(pool.Spec.Replicas, n)
	}
	return int(n)
}

// versions are those that the pool's hosts can run.
func versions(usable []infrav1.CapstanHost) []string {
	var out []string
	for i := range usable {
		out = append(out, usable[i].Status.Versions...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// checkData reports whether the bootstrap data is for another version: after a change of the MachinePool's version the
// bootstrap provider creates new data first, because machines would otherwise be created twice. Data of other providers
// does not contain its version.
func (r *Reconciler) checkData(ctx context.Context, s *scope) (*invalid, error) {
	if s.want.secret == "" {
		return nil, nil
	}
	secret := &corev1.Secret{}
	if err := r.SecretCachingClient.Get(ctx, client.ObjectKey{Namespace: s.pool.Namespace, Name: s.want.secret}, secret); err != nil {
		return nil, client.IgnoreNotFound(err) // The user's own, without the cluster's label, is not in the cache.
	}
	madeFor := secret.Annotations[bootstrapv1.KubernetesVersionAnnotation]
	if madeFor == "" || madeFor == s.want.version {
		return nil, nil
	}
	return &invalid{infrav1.WaitingForBootstrapDataReason, fmt.Sprintf(
		"Waiting for bootstrap data for Kubernetes %s: Secret %s is for %s", s.want.version, s.want.secret, madeFor)}, nil
}

func checkReplicas(n int) *invalid {
	if n < 0 || n > maxReplicas {
		return &invalid{infrav1.PoolInvalidReplicasReason, fmt.Sprintf("The MachinePool has %d replicas: set spec.replicas to a number from 0 to %d", n, maxReplicas)}
	}
	return nil
}

func checkVersion(wanted string, available []string) *invalid {
	if _, err := version.ParseSemantic(wanted); err != nil {
		return &invalid{infrav1.PoolInvalidVersionReason, fmt.Sprintf(
			"The MachinePool's spec.template.spec.version is %q: set it to a version of Kubernetes, for example v1.36.3", wanted)}
	}
	if !slices.Contains(available, wanted) {
		return &invalid{infrav1.PoolVersionNotAvailableReason, fmt.Sprintf(
			"No CapstanHost that the pool may use can run Kubernetes %s; they can run %s", wanted, cmp.Or(strings.Join(available, ", "), "none"))}
	}
	return nil
}

// checkSkew returns the reason why a pool waits for its control plane: a kubelet must not have a newer minor version than an API
// server. Cluster API core has this check for MachineSets, and an annotation that skips it. A control plane without Machines or
// without versions stops no pool.
func checkSkew(mp *clusterv1.MachinePool, controlPlane []clusterv1.Machine) *invalid {
	skipped := strings.Split(strings.ReplaceAll(mp.Annotations[clusterv1.MachineSetSkipPreflightChecksAnnotation], " ", ""), ",")
	if slices.Contains(skipped, string(clusterv1.MachineSetPreflightCheckAll)) || slices.Contains(skipped, string(clusterv1.MachineSetPreflightCheckKubernetesVersionSkew)) {
		return nil
	}
	wanted, err := version.ParseSemantic(mp.Spec.Template.Spec.Version)
	if err != nil {
		return nil // See checkVersion.
	}
	for i := range controlPlane {
		m := &controlPlane[i]
		// During an update in place, the machine still runs the former version.
		runs, err := version.ParseSemantic(cmp.Or(m.Annotations[controlplanev1.UpdateFromAnnotation], m.Spec.Version))
		if err == nil && minorOf(runs).LessThan(minorOf(wanted)) {
			remedy := "upgrade the control plane first"
			if !m.DeletionTimestamp.IsZero() {
				remedy = "it is being deleted, see its conditions"
			}
			return &invalid{infrav1.PoolWaitingForControlPlaneReason, fmt.Sprintf(
				"Waiting for the control plane: Machine %s has Kubernetes v%s, and kubelets of v%s must not be newer: %s", m.Name, runs, wanted, remedy)}
		}
	}
	return nil
}

func minorOf(v *version.Version) *version.Version { return version.MajorMinor(v.Major(), v.Minor()) }

// resolveBudget converts percentages to numbers of machines: maxSurge is rounded up, maxUnavailable is rounded down. If
// both are 0, one machine may be unavailable, because otherwise no machine could ever be replaced.
func resolveBudget(spec infrav1.MachinePoolRollingUpdate, replicas int) (budget, *invalid) {
	replicas = max(0, replicas)
	surge, err := intstr.GetScaledValueFromIntOrPercent(intstr.ValueOrDefault(spec.MaxSurge, intstr.FromInt32(1)), replicas, true)
	if err != nil {
		return budget{}, &invalid{infrav1.PoolInvalidRollingUpdateReason, fmt.Sprintf("spec.rollingUpdate.maxSurge: %s", err)}
	}
	unavailable, err := intstr.GetScaledValueFromIntOrPercent(intstr.ValueOrDefault(spec.MaxUnavailable, intstr.FromInt32(0)), replicas, false)
	if err != nil {
		return budget{}, &invalid{infrav1.PoolInvalidRollingUpdateReason, fmt.Sprintf("spec.rollingUpdate.maxUnavailable: %s", err)}
	}
	if surge <= 0 && unavailable <= 0 {
		unavailable = 1
	}
	return budget{maxSurge: max(0, surge), maxUnavailable: max(0, unavailable)}, nil
}

// withVolumes returns the budget of machines with volumes: a successor gets the volumes of its predecessor, so the predecessor is
// deleted first.
func (b budget) withVolumes() budget {
	return budget{maxUnavailable: max(1, b.maxUnavailable)}
}

// specHash is a hash of all properties of a machine. It contains the name of the bootstrap data Secret and not its
// content, which changes with each renewal of the join token, without a need to replace machines.
func specHash(spec infrav1.CapstanMachineSpec, version, secret string) (string, error) {
	data, err := json.Marshal(struct {
		Spec            infrav1.CapstanMachineSpec
		Version, Secret string
	}{spec, version, secret})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:8]), nil
}
