package model

import (
	"cmp"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/blang/semver/v4"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/conditions"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/inplace"
)

// ControlPlane contains all data of one reconciliation of a control plane. The decisions of this package are functions
// of it. They read nothing else, and Now is their only clock.
type ControlPlane struct {
	// Object is the CapstanControlPlane, and Cluster its owner.
	Object  *controlplanev1.CapstanControlPlane
	Cluster *clusterv1.Cluster
	// InfraCluster is the infrastructure's cluster object. It is read only until core has copied everything from it; nil
	// after that.
	InfraCluster *unstructured.Unstructured
	// Now is the time of this reconciliation.
	Now time.Time
	// Machines of the control plane.
	Machines collections.Machines
	// Ambiguous is the reason why the Machines of the control plane cannot be determined; "" when they can. With a reason,
	// no Machine is created or deleted.
	Ambiguous string
	// Outdated maps the name of each Machine to the reasons why it is not up to date; nil before it is known.
	Outdated map[string][]string
	// Changes maps the name of each Machine to its differences from the spec, and Updates to its update in place.
	Changes map[string][]inplace.Change
	Updates map[string]*Update
	// Volumes has the names of the Machines with volumes that a successor needs: it gets them when they are free.
	Volumes map[string]bool
	// OtherEncryption has the names of the Machines whose API server may not read the data that one with the present spec writes.
	OtherEncryption map[string]bool
	// InfrastructureDeletedAt maps the name of a Machine to the deletion timestamp of its infrastructure machine.
	InfrastructureDeletedAt map[string]time.Time
	// Authority is the Secret of the cluster's certificate authority; nil before it exists.
	Authority *corev1.Secret
	// Workload is the state of the workload cluster.
	Workload *Workload
	// Interrupted: the workload cluster answered less than Grace ago, and does not answer now or was not asked.
	Interrupted bool
	// Readiness is the answer of the API server through the endpoint; nil without a request.
	Readiness *Readiness
	// RestoreSource is the backup that the first Machine of a restored cluster starts with; nil without a restore.
	RestoreSource *bootstrapv1.RestoreSource
	// Irreplaceable is the reason why no Machine can be created; "" when one can. The number of Machines does not matter.
	Irreplaceable string
	// UpgradeHeld is the reason why no other version may be rolled out; "" when it may.
	UpgradeHeld string
}

// Initialized reports whether the API server has answered once.
func (cp *ControlPlane) Initialized() bool {
	_, written := cp.Object.Annotations[controlplanev1.InitializedAnnotation]
	return written || ptr.Deref(cp.Object.Status.Initialization.ControlPlaneInitialized, false)
}

// Stacked reports whether etcd runs on the Machines.
func (cp *ControlPlane) Stacked() bool {
	return len(cp.Object.Spec.Config.Cluster.Etcd.External.Endpoints) == 0
}

// CompleteFleet returns the state of all Machines.
func (cp *ControlPlane) CompleteFleet() Fleet {
	f := newFleet(cp.Machines, cp.Outdated, cp.Stacked(), cp.Workload, cp.Now)
	f.irreplaceable = cp.Irreplaceable
	for n := range f.Instances {
		i := &f.Instances[n]
		i.Changes, i.Update, i.otherEncryption = cp.Changes[i.Name()], cp.Updates[i.Name()], cp.OtherEncryption[i.Name()]
	}
	return f
}

// Fleet returns the state of the Machines without those whose deletion is stuck.
func (cp *ControlPlane) Fleet() Fleet {
	f := cp.CompleteFleet()
	if !cp.Initialized() {
		return f // The first Machine starts the cluster: two of them must never exist.
	}
	return f.withoutStuck(cp.InfrastructureDeletedAt, cp.Now)
}

// Target returns the demand of the spec for the number of Machines.
func (cp *ControlPlane) Target() Target {
	out := Target{
		Replicas: int(ptr.Deref(cp.Object.Spec.Replicas, 1)), maxSurge: 1,
		initialized: cp.Initialized(), version: WantedVersion(cp.Object), held: cmp.Or(cp.UpgradeHeld, topologyHold(cp.Cluster, cp.Object.Spec.Version)), domains: ForControlPlanes(cp.FailureDomains()),
		inPlace: cp.Object.Spec.Rollout.Strategy.InPlace,
	}
	if surge := cp.Object.Spec.Rollout.Strategy.RollingUpdate.MaxSurge; surge != nil && out.Replicas >= 3 {
		out.maxSurge = surge.IntValue()
	}
	for name := range cp.Volumes {
		out.inherits = out.inherits || len(cp.Outdated[name]) > 0
	}
	return out
}

// topologyHold returns the reason to roll nothing out while the topology of the Cluster has another version than the control plane: the
// topology controller will change the version, and the Machines would be replaced twice. It returns "" during an upgrade by steps, whose
// present step is the version of the control plane.
func topologyHold(c *clusterv1.Cluster, version string) string {
	next := c.Spec.Topology.Version
	if next == "" || next == version || c.Annotations[clusterv1.ClusterTopologyUpgradeStepAnnotation] == version {
		return ""
	}
	return fmt.Sprintf("the topology of the Cluster has version %s: Machines are replaced after the topology controller has set it", next)
}

// Grace is the time for which conditions keep the last known state of a workload cluster that cannot be asked. So a start of
// the manager or a short interruption changes no condition. Decisions do not use it.
const Grace = 2 * time.Minute

// UnhealthyRetry is the interval of requests to a control plane that does not answer or is not ready, because its
// recovery is no event in the management cluster.
const UnhealthyRetry = 5 * time.Second

// FirstRetry is the interval at which new Leases are read: their next renewal proves that the holder lives, and is no event.
const FirstRetry = 2 * time.Second

// JoiningRetry is the interval at which a joining Machine is read, for joiningTime: the start of its API server is no event.
const (
	JoiningRetry = time.Second
	joiningTime  = 5 * time.Minute
)

// LookAgain returns the time after which the workload cluster has to be read again without an event.
func (f Fleet) LookAgain(stale time.Duration, now time.Time) time.Duration {
	for _, i := range f.active() {
		if i.apiServer != metav1.ConditionTrue && now.Sub(i.Machine.CreationTimestamp.Time) < joiningTime {
			return JoiningRetry
		}
	}
	if slices.ContainsFunc(f.active(), func(i *Instance) bool { return i.apiServer == metav1.ConditionUnknown }) {
		return FirstRetry
	}
	return max(stale, UnhealthyRetry)
}

// SilentRetry returns the time after which a workload cluster is asked again that does not report the state of etcd: the kind
// may not exist yet. The interval grows with the age of the cluster.
func SilentRetry(controlPlane *controlplanev1.CapstanControlPlane, now time.Time) time.Duration {
	age := time.Minute
	if c := conditions.Get(controlPlane, controlplanev1.InitializedCondition); c != nil {
		age = now.Sub(c.LastTransitionTime.Time)
	}
	return min(max(age/4, 500*time.Millisecond), 10*time.Second)
}

// LowestVersion returns the oldest Kubernetes version among the Machines; without Machines, the version of the spec.
func (cp *ControlPlane) LowestVersion() string {
	if all := Versions(cp.Machines); len(all) > 0 {
		return all[0].Version
	}
	return WantedVersion(cp.Object)
}

// Versions returns the versions of the Machines from old to new, with their numbers (CP-05). A Machine has its version from
// its creation: MachineSets wait for it. One that is updated in place counts with its former version.
func Versions(machines collections.Machines) []clusterv1.StatusVersion {
	counts := map[string]int32{}
	for _, m := range machines {
		if version := VersionOf(m); version != "" {
			counts[version]++
		}
	}
	var out []clusterv1.StatusVersion
	for version, n := range counts {
		out = append(out, clusterv1.StatusVersion{Version: version, Replicas: n})
	}
	sort.Slice(out, func(i, j int) bool {
		a, errA := semver.ParseTolerant(out[i].Version)
		b, errB := semver.ParseTolerant(out[j].Version)
		if errA != nil || errB != nil || a.EQ(b) {
			return out[i].Version < out[j].Version
		}
		return a.LT(b)
	})
	return out
}

// Count returns the number of Machines whose condition of this type is True.
func Count(machines collections.Machines, condition string) *int32 {
	return ptr.To(int32(len(machines.Filter(func(m *clusterv1.Machine) bool { return conditions.IsTrue(m, condition) }))))
}

// Day is the unit of periods that the API gives in days, such as certificatesExpiryDays.
const Day = 24 * time.Hour
