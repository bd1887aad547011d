package controlplane

import (
	"fmt"
	"strings"

	"github.com/blang/semver/v4"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// restoreStep is the next step of a restore.
type restoreStep string

const (
	// restoreNone: there is nothing to restore, or it was done.
	restoreNone restoreStep = "None"
	// restoreBegin: nothing has been done yet.
	restoreBegin restoreStep = "Begin"
	// restoreRemove: Machines of before are there, and go first. Two etcds of one cluster must never serve at the same time.
	restoreRemove restoreStep = "Remove"
	// restoreCreate: the first Machine of the restored cluster has to be made.
	restoreCreate restoreStep = "Create"
	// restoreWait: it does not serve yet.
	restoreWait restoreStep = "Wait"
	// restoreFinish: it serves.
	restoreFinish restoreStep = "Finish"
)

// restoring is what a restore is decided on.
type restoring struct {
	// id of the restore that spec asks for; began and done are those that have begun and are done.
	id, began, done string
	machines        []*clusterv1.Machine
	// outdated are Machines that the spec would not make any more.
	outdated map[string][]string
	// serves says that the cluster answers through its endpoint.
	serves bool
}

// next is the next step, and the Machines that it is about. Nothing is remembered but the annotations, so that a step may be
// interrupted anywhere, and done again: each Machine says which restore it belongs to.
func (r restoring) next() (restoreStep, []*clusterv1.Machine) {
	switch {
	case r.id == "" || r.id == r.done:
		return restoreNone, nil
	case r.began != r.id:
		return restoreBegin, nil
	}
	var gone []*clusterv1.Machine
	for _, m := range r.machines {
		useless := len(r.outdated[m.Name]) > 0 && !r.serves
		if m.Annotations[controlplanev1.RestoreAnnotation] != r.id || !m.DeletionTimestamp.IsZero() || useless {
			gone = append(gone, m)
		}
	}
	switch {
	case len(gone) > 0:
		return restoreRemove, gone
	case len(r.machines) == 0:
		return restoreCreate, nil
	case !r.serves:
		return restoreWait, r.machines
	}
	return restoreFinish, r.machines
}

// restoreSource is what spec.restore names, put together with what is known of the backup. problems are why it cannot be
// restored: they are found before anything is removed. blind says that nobody can look into the backup before that.
func restoreSource(cp *controlplanev1.CapstanControlPlane, folder string, keys []etcdv1.BackupKey, blind bool) (known *controlplanev1.BackupStatus, store etcdv1.BackupStore, problems []string) {
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
		problems = append(problems, wrongVersion(known.KubernetesVersion, wantedVersion(cp))...)
	}
	return known, store, problems
}

func otherAuthorities(cp *controlplanev1.CapstanControlPlane) bool {
	return ptr.Deref(cp.Spec.Restore.OtherAuthorities, false)
}

// wrongVersion says when a version of Kubernetes cannot use the data of another one.
func wrongVersion(made, version string) []string {
	if canRun(made, version) {
		return nil
	}
	return []string{fmt.Sprintf("it was made with Kubernetes %s, and %s cannot use its data: it takes the same minor version, or the next one", made, version)}
}

// restoringCondition says how far a restore is. why is why no machine could look at the backup before it began; later steps
// only know that none could.
func restoringCondition(message string, unchecked bool, why string) (reason, text string) {
	switch {
	case why != "":
		return controlplanev1.RestoringUncheckedReason, message + notChecked(why)
	case unchecked:
		return controlplanev1.RestoringUncheckedReason, message + ". No machine could check the backup before the restore began"
	}
	return controlplanev1.RestoringReason, message
}

func notChecked(why string) string {
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

// canRun says whether a version of Kubernetes can use the data of another one.
func canRun(made, version string) bool {
	from, errFrom := semver.ParseTolerant(made)
	to, errTo := semver.ParseTolerant(version)
	return errFrom != nil || errTo != nil || from.Major == to.Major && (to.Minor == from.Minor || to.Minor == from.Minor+1)
}

// staleNodes are the Nodes of Machines that are not there any more: those that went when the cluster was restored, or that it
// has had at the time of the backup. Cluster API has written on each Node whose it is.
func staleNodes(nodes map[string]map[string]string, namespace string, machines map[string]bool) []string {
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

// beginsWith says how the first Machine fares, as far as it tells.
func beginsWith(machines []*clusterv1.Machine, name string, messages ...string) string {
	out := fmt.Sprintf("Machine %s begins with the backup %s", machines[0].Name, name)
	for _, m := range messages {
		if m != "" {
			out += ": " + m
		}
	}
	return strings.TrimSpace(out)
}

// lostMachines says that so many Machines do not run, as their infrastructure says, that etcd can have no majority; "" when it
// may have one. It is what is left to know when no API server answers.
func (f fleet) lostMachines() string {
	if !f.stacked || len(f.instances) == 0 {
		return ""
	}
	down := f.filter(func(i *instance) bool {
		return i.machine.Status.NodeRef.IsDefined() && conditions.IsFalse(i.machine, clusterv1.InfrastructureReadyCondition)
	})
	if len(f.instances)-len(down) > len(f.instances)/2 {
		return ""
	}
	return fmt.Sprintf("no API server answers, and %d of %d machines do not run: etcd has no majority", len(down), len(f.instances))
}
