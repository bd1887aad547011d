package machinepool

import (
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/labels/format"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/machinetemplate"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/shorten"
)

// describe shows the resources of a machine of the pool, for autoscalers that scale from zero.
func describe(s *scope) {
	described := machinetemplate.Describe(s.pool.Spec.MachineTemplate.Spec, s.hosts)
	s.pool.Status.Capacity, s.pool.Status.NodeInfo = described.Capacity, described.NodeInfo
}

// observeMembers sets the fields that the contract requires for each machine: providerIDList (MP-04), replicas (MP-08),
// instances (MP-01).
func observeMembers(s *scope, now time.Time) {
	pool := s.pool
	ids := []string{}
	pool.Status.Instances = nil
	for _, m := range s.members {
		if m.capstan.Spec.ProviderID != "" {
			ids = append(ids, m.capstan.Spec.ProviderID)
		}
		if len(pool.Status.Instances) < infrav1.MaxPoolInstances {
			pool.Status.Instances = append(pool.Status.Instances, describeInstance(m, s.want.minReady, now))
		}
	}
	slices.Sort(ids)
	pool.Spec.ProviderIDList = slices.Compact(ids)
	pool.Status.Replicas = ptr.To(int32(len(pool.Spec.ProviderIDList)))
}

func describeInstance(m member, minReady time.Duration, now time.Time) infrav1.CapstanMachinePoolInstanceStatus {
	version := nodeVersion(m.machine)
	if version == "" {
		version = m.capstan.Annotations[infrav1.MachineVersionAnnotation]
	}
	return infrav1.CapstanMachinePoolInstanceStatus{
		Addresses:    m.capstan.Status.Addresses,
		InstanceName: m.capstan.Name,
		ProviderID:   m.capstan.Spec.ProviderID,
		Version:      version,
		Ready:        ptr.To(m.availableIn(minReady, now) == 0),
	}
}

// setStatus fills in the status from the machines that were observed.
func setStatus(s *scope, now time.Time) {
	describe(s)
	observeMembers(s, now)
	c := census(s.members, s.want, now)
	st := &s.pool.Status
	st.InfrastructureMachineKind = infrav1.MachineKind
	st.Selector = labels.Set{
		clusterv1.ClusterNameLabel:     s.machinePool.Spec.ClusterName,
		clusterv1.MachinePoolNameLabel: format.MustFormatValue(s.machinePool.Name),
	}.String()
	st.ReadyReplicas, st.AvailableReplicas = ptr.To(int32(c.ready)), ptr.To(int32(c.available))
	st.UpToDateReplicas = ptr.To(int32(c.active - c.outdated))
	setProvisioned(s, c)
	setConditions(s, c)
	if s.next != nil {
		setUpdating(s, s.next.updates, s.next.instances)
	}
}

// setProvisioned sets ready and provisioned when the pool is complete: together, and for good (MP-05). Machines that failed are not waited
// for, but a pool whose machines all failed was never complete. An annotation records it: a move loses the status, and the pool may lack
// machines then (ALL-12).
func setProvisioned(s *scope, c numbers) {
	st := &s.pool.Status
	complete := s.invalid == nil && c.settled >= s.want.replicas && (c.provisioned > 0 || s.want.replicas == 0)
	if complete || ptr.Deref(st.Initialization.Provisioned, false) {
		metav1.SetMetaDataAnnotation(&s.pool.ObjectMeta, infrav1.PoolProvisionedAnnotation, "")
	}
	_, provisioned := s.pool.Annotations[infrav1.PoolProvisionedAnnotation]
	st.Ready = ptr.To(provisioned)
	if provisioned {
		st.Initialization.Provisioned = ptr.To(true)
	}
}

// numbers of machines. All but total and stuck leave out those that are being deleted.
type numbers struct{ total, stuck, active, provisioned, settled, ready, available, outdated, failed int }

func census(members []member, want desired, now time.Time) numbers {
	n := numbers{total: len(members)}
	for _, m := range members {
		if stuckIn(m.capstan, now) == 0 {
			n.stuck++
		}
		if m.leaving() {
			continue
		}
		n.active++
		if m.provisioned() {
			n.provisioned++
		}
		switch in := m.availableIn(want.minReady, now); {
		case in == 0:
			n.ready, n.available = n.ready+1, n.available+1
		case in > 0:
			n.ready++
		}
		if want.outdated(m) {
			n.outdated++
		}
		broken := failure(m.capstan) != "" || wantsRemediation(m.machine)
		if broken {
			n.failed++
		}
		if broken || m.provisioned() {
			n.settled++
		}
	}
	return n
}

// setConditions shows how the pool is (MP-07).
func setConditions(s *scope, n numbers) {
	want := s.want.replicas
	flag(s.pool, clusterv1.ScalingUpCondition, n.active < want || n.provisioned < want, clusterv1.ScalingUpReason, clusterv1.NotScalingUpReason,
		fmt.Sprintf("Scaling up from %d to %d machines", n.provisioned, want))
	flag(s.pool, clusterv1.ScalingDownCondition, n.total > want, clusterv1.ScalingDownReason, clusterv1.NotScalingDownReason,
		fmt.Sprintf("Scaling down from %d to %d machines", n.total, want))
	flag(s.pool, clusterv1.RollingOutCondition, n.outdated > 0, clusterv1.RollingOutReason, clusterv1.NotRollingOutReason,
		fmt.Sprintf("%d of %d machines are not up to date", n.outdated, n.active))
	reconciling.SetCondition(s.pool, clusterv1.DeletingCondition, metav1.ConditionFalse, clusterv1.NotDeletingReason, "")
	switch {
	case s.invalid != nil:
		reconciling.SetCondition(s.pool, clusterv1.ReadyCondition, metav1.ConditionFalse, s.invalid.reason, "%s", s.invalid.message)
	case s.trouble != nil:
		reconciling.SetCondition(s.pool, clusterv1.ReadyCondition, metav1.ConditionFalse, infrav1.PoolChangeFailedReason, "%s", summary(s.trouble))
	case n.available < want:
		reconciling.SetCondition(s.pool, clusterv1.ReadyCondition, metav1.ConditionFalse, infrav1.PoolNotReadyReason, "%s", notReady(s, n))
	default:
		reconciling.SetCondition(s.pool, clusterv1.ReadyCondition, metav1.ConditionTrue, infrav1.PoolReadyReason, "%s", s.want.remark())
	}
}

// maxTrouble limits an error in a condition, in bytes, because errors of the API server quote the refused object.
const maxTrouble = 1024

// summary is the first of the errors that are joined in one, and how many there are: there may be one for each
// machine.
func summary(err error) string {
	all := split(err)
	text := shorten.Marked(all[0].Error(), maxTrouble)
	if len(all) > 1 {
		return fmt.Sprintf("%d changes failed; the first: %s", len(all), text)
	}
	return text
}

// split returns the parts of an error of errors.Join, but does not unwrap other errors.
func split(err error) (out []error) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	for _, e := range joined.Unwrap() {
		out = append(out, split(e)...)
	}
	return out
}

// remark names the failure domains that the cluster lacks. They do not stop the pool, but their names can be wrong.
func (d desired) remark() string {
	if len(d.missing) == 0 {
		return ""
	}
	return fmt.Sprintf("spec.failureDomains of the MachinePool names %s, which the cluster does not have", strings.Join(d.missing, ", "))
}

// notReady returns the number of missing machines and the name of the first failed one.
func notReady(s *scope, n numbers) string {
	parts := []string{fmt.Sprintf("%d of %d machines are available", n.available, s.want.replicas)}
	if n.active < s.want.replicas {
		parts = append(parts, fmt.Sprintf("%d are not created yet", s.want.replicas-n.active))
	}
	if coming := n.active - n.available - n.failed; coming > 0 {
		parts = append(parts, fmt.Sprintf("%d are starting", coming))
	}
	if n.failed > 0 {
		parts = append(parts, fmt.Sprintf("%d failed", n.failed))
	}
	if n.stuck > 0 {
		parts = append(parts, fmt.Sprintf("%d cannot be removed: see their condition %s", n.stuck, clusterv1.DeletingCondition))
	}
	if remark := s.want.remark(); remark != "" {
		parts = append(parts, remark)
	}
	for _, m := range s.members {
		if why := failure(m.capstan); why != "" && !m.leaving() {
			parts = append(parts, fmt.Sprintf("%s: %s", m.capstan.Name, why))
			break
		}
	}
	return strings.Join(parts, "; ")
}

func flag(p *infrav1.CapstanMachinePool, condition string, on bool, yes, no, message string) {
	if on {
		reconciling.SetCondition(p, condition, metav1.ConditionTrue, yes, "%s", message)
		return
	}
	reconciling.SetCondition(p, condition, metav1.ConditionFalse, no, "")
}
