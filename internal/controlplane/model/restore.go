package model

import (
	"fmt"
	"strings"

	"github.com/blang/semver/v4"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// RestoreStep is the next step of a restore.
type RestoreStep string

// Steps of a restore, in their order.
const (
	// RestoreNone: there is nothing to restore, or the restore is complete.
	RestoreNone RestoreStep = "None"
	// RestoreBegin: the restore has not started.
	RestoreBegin RestoreStep = "Begin"
	// RestoreRemove: former Machines have to be deleted first. Two etcd clusters of one cluster must never serve at the same
	// time.
	RestoreRemove RestoreStep = "Remove"
	// RestoreCreate: the first Machine of the restored cluster has to be created.
	RestoreCreate RestoreStep = "Create"
	// RestoreWait: the first Machine does not serve yet.
	RestoreWait RestoreStep = "Wait"
	// RestoreFinish: the first Machine serves.
	RestoreFinish RestoreStep = "Finish"
)

// Restoration is the input of the decision about a restore.
type Restoration struct {
	// id of the restore in the spec; began and done are the restores that have started and ended.
	id, began, done string
	machines        []*clusterv1.Machine
	// outdated maps Machines to the reasons why the spec demands another one.
	outdated map[string][]string
	// Serves: the cluster answers through its endpoint.
	Serves bool
	// refused: the kubeconfig is refused, so that the cluster may serve.
	refused bool
	// initialized: the cluster has served before. A MachineHealthCheck then judges a Machine only while the cluster serves, so its result
	// is no reason to delete the first Machine when one request fails.
	initialized bool
}

// Next returns the next step and its Machines. Only annotations are stored, and each Machine records its restore, so that an
// interrupted step can be repeated.
func (r Restoration) Next() (RestoreStep, []*clusterv1.Machine) {
	switch {
	case r.id == "" || r.id == r.done:
		return RestoreNone, nil
	case r.began != r.id:
		return RestoreBegin, nil
	}
	var gone []*clusterv1.Machine
	for _, m := range r.machines {
		unhealthy := !r.initialized && collections.IsUnhealthyAndOwnerRemediated(m)
		useless := (len(r.outdated[m.Name]) > 0 || unhealthy) && !r.Serves && !r.refused
		if m.Annotations[controlplanev1.RestoreAnnotation] != r.id || !m.DeletionTimestamp.IsZero() || useless {
			gone = append(gone, m)
		}
	}
	switch {
	case len(gone) > 0:
		return RestoreRemove, gone
	case len(r.machines) == 0:
		return RestoreCreate, nil
	case !r.Serves:
		return RestoreWait, r.machines
	}
	return RestoreFinish, r.machines
}

// RestoreSource combines spec.restore and the known facts about the backup. problems are the reasons why it cannot be
// restored, found before a Machine is removed. blind: no machine can examine the backup before that.
func RestoreSource(cp *controlplanev1.CapstanControlPlane, folder string, keys []etcdv1.BackupKey, blind bool) (known *controlplanev1.BackupStatus, store etcdv1.BackupStore, problems []string) {
	spec := cp.Spec.Restore
	store = spec.Store
	if !store.IsDefined() {
		store = cp.Spec.Backup.Store
	}
	if !store.IsDefined() {
		return nil, store, []string{"there is no store: set spec.restore.store or spec.backup"}
	}
	if spec.Folder == "" || spec.Folder == folder {
		for i := range cp.Status.Backups {
			if cp.Status.Backups[i].Name == spec.Name {
				known = &cp.Status.Backups[i]
			}
		}
	}
	needs := spec.Keys
	if known != nil && len(needs) == 0 {
		needs = known.Keys
	}
	if known == nil && len(needs) == 0 && blind {
		problems = append(problems, fmt.Sprintf("status.backups has no %s: copy the keys from %s.json in the store into spec.restore.keys, so that they can be compared before anything is removed", spec.Name, spec.Name))
	}
	problems = append(problems, nodeconfig.DifferentKeys(keyMap(needs), keyMap(keys), otherAuthorities(cp))...)
	if known != nil {
		problems = append(problems, wrongVersion(known.KubernetesVersion, WantedVersion(cp))...)
	}
	return known, store, problems
}

func otherAuthorities(cp *controlplanev1.CapstanControlPlane) bool {
	return ptr.Deref(cp.Spec.Restore.OtherAuthorities, false)
}

// wrongVersion returns a problem if a version of Kubernetes cannot use the data of another version.
func wrongVersion(made, version string) []string {
	if canRun(made, version) {
		return nil
	}
	return []string{fmt.Sprintf("it was made with Kubernetes %s, and %s cannot use its data: it takes the same minor version, or the next one", made, version)}
}

// RestoringCondition describes the progress of a restore. why is the reason why no machine examined the backup; later
// steps only see that none did.
func RestoringCondition(message string, unchecked bool, why string) (reason, text string) {
	switch {
	case why != "":
		return controlplanev1.RestoringUncheckedReason, message + NotChecked(why)
	case unchecked:
		return controlplanev1.RestoringUncheckedReason, message + ". No machine could check the backup before the restore began"
	}
	return controlplanev1.RestoringReason, message
}

// NotChecked returns the sentence that a restore's message ends with when no machine could check the backup. why is the
// reason; "" gives no sentence.
func NotChecked(why string) string {
	if why == "" {
		return ""
	}
	return ". No machine could check the backup before, because " + why
}

func keyMap(keys []etcdv1.BackupKey) map[string]string {
	out := map[string]string{}
	for _, k := range keys {
		out[k.Name] = k.SHA256
	}
	return out
}

// canRun reports whether a version of Kubernetes can use the data of another version.
func canRun(made, version string) bool {
	from, errFrom := semver.ParseTolerant(made)
	to, errTo := semver.ParseTolerant(version)
	return errFrom != nil || errTo != nil || from.Major == to.Major && (to.Minor == from.Minor || to.Minor == from.Minor+1)
}

// StaleNodes returns the Nodes whose Machines do not exist: Machines that were removed for the restore, or that existed at
// the time of the backup. Cluster API has written the Machine on each Node.
func StaleNodes(nodes map[string]map[string]string, namespace string, machines map[string]bool) []string {
	var out []string
	for name, annotations := range nodes {
		machine := annotations[clusterv1.MachineAnnotation]
		if machine == "" || annotations[clusterv1.ClusterNamespaceAnnotation] == namespace && machines[machine] {
			continue
		}
		out = append(out, name)
	}
	return out
}

// FirstMachineMessage describes the start of the first Machine.
func FirstMachineMessage(machines []*clusterv1.Machine, name string, messages ...string) string {
	out := fmt.Sprintf("Machine %s begins with the backup %s", machines[0].Name, name)
	for _, m := range messages {
		if m != "" {
			out += ": " + m
		}
	}
	return strings.TrimSpace(out)
}

// lostMachines returns a text if so many Machines are down that etcd has no majority, and "" otherwise. A Machine is down if its
// infrastructure reports this. While no API server answers, this report is the only evidence about the majority.
func (f Fleet) lostMachines() string {
	if !f.Stacked || len(f.Instances) == 0 {
		return ""
	}
	down := f.Filter(func(i *Instance) bool {
		return i.Machine.Status.NodeRef.IsDefined() && conditions.IsFalse(i.Machine, clusterv1.InfrastructureReadyCondition)
	})
	if len(f.Instances)-len(down) > len(f.Instances)/2 {
		return ""
	}
	return fmt.Sprintf("no API server answers, and %d of %d machines do not run: etcd has no majority", len(down), len(f.Instances))
}

// Restoration returns the state of the restore.
func (cp *ControlPlane) Restoration() Restoration {
	return Restoration{
		id:    cp.Object.Spec.Restore.ID(),
		began: cp.Object.Annotations[controlplanev1.RestoreAnnotation], done: cp.Object.Annotations[controlplanev1.RestoredAnnotation],
		machines: cp.Machines.SortedByCreationTimestamp(), outdated: cp.Outdated, Serves: cp.Readiness != nil && cp.Readiness.Ready && cp.Readiness.Err == nil,
		refused: cp.Readiness.Refused(), initialized: cp.Initialized(),
	}
}

// RestoredAs returns the restore that the present or next cluster results from; "" without a restore. Each Machine records
// it.
func (cp *ControlPlane) RestoredAs() string {
	known := cp.Restoration()
	if known.id != "" && (known.began == known.id || known.done == known.id) {
		return known.id
	}
	return known.done
}

// MustBeGiven reports whether a key must come from the cluster that was backed up. A new key could not read the backup.
func (cp *ControlPlane) MustBeGiven(purpose secret.Purpose) bool {
	spec := cp.Object.Spec.Restore
	if !spec.IsDefined() || cp.Initialized() {
		return false
	}
	return purpose == EncryptionPurpose || (purpose == secret.ClusterCA || purpose == secret.ServiceAccount) && !ptr.Deref(spec.OtherAuthorities, false)
}

// EncryptionPurpose is the purpose of the encryption key. Cluster API has none for it.
const EncryptionPurpose = secret.Purpose("encryption")

// NotGiven returns the message about a Secret with a key that MustBeGiven and does not exist.
func NotGiven(name string) string {
	return fmt.Sprintf("the Secret %s does not exist: spec.restore needs the one of the cluster that was backed up", name)
}
