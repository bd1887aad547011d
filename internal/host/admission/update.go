package admission

import (
	"fmt"
	"regexp"
	"strings"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/version"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/host/refusal"
)

// maxUpdateData bounds the data of an update, in bytes. A Secret has the same limit.
const maxUpdateData = 1 << 20

var updateIDForm = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}$`)

// Update decides whether a host may update a machine that exists in place. have is the machine as its clients see it. again
// is true if the host has accepted this update already: it then changes nothing.
func Update(req *hostpb.UpdateMachineRequest, have *hostpb.Machine, info *hostpb.HostInfo) (again bool, err error) {
	spec, want := have.GetSpec(), req.GetSpec()
	if err := owner.Ensure("machine", spec.GetId(), spec, want); err != nil {
		return false, err
	}
	if err := ownCluster(req, have); err != nil {
		return false, err
	}
	last := have.GetStatus().GetUpdate()
	if last.GetId() == req.UpdateId {
		return true, nil
	}
	if !Ended(last) {
		return false, refusal.Errorf(hostpb.Refusal_UPDATE_IN_PROGRESS, "machine %s/%s: update %s has not ended, so update %s cannot start; wait until it ends",
			spec.Namespace, spec.Name, last.GetId(), req.UpdateId)
	}
	if err := checkChange(spec, want); err != nil {
		return false, err
	}
	if err := fitsGrown(spec, want, info); err != nil {
		return false, err
	}
	return false, updatable(have)
}

// CheckUpdate refuses a request that is invalid on every host (INVALID).
func CheckUpdate(req *hostpb.UpdateMachineRequest) error {
	if !updateIDForm.MatchString(req.GetUpdateId()) {
		return invalid("update id %q is not valid: expected at most 128 letters, digits, '.', '_' and '-'", req.GetUpdateId())
	}
	if len(req.Data) > maxUpdateData {
		return invalid("the data of update %s has %d bytes: expected at most %d", req.UpdateId, len(req.Data), maxUpdateData)
	}
	return CheckMachine(req.Spec)
}

// ownCluster refuses the update of a machine of another management cluster (NOT_OWNER). Machines and callers without a
// management cluster are accepted: older managers record none.
func ownCluster(req *hostpb.UpdateMachineRequest, have *hostpb.Machine) error {
	recorded := have.GetStatus().GetManagementCluster()
	if recorded == "" || req.ManagementCluster == "" || recorded == req.ManagementCluster {
		return nil
	}
	return refusal.Errorf(hostpb.Refusal_NOT_OWNER, "machine %s/%s belongs to management cluster %s, not to %s; update it there",
		have.Spec.Namespace, have.Spec.Name, recorded, req.ManagementCluster)
}

// Ended returns whether no update is in progress: it has ended, or the argument is nil.
func Ended(u *hostpb.UpdateStatus) bool {
	switch u.GetPhase() {
	case hostpb.UpdateStatus_PENDING, hostpb.UpdateStatus_RUNNING:
		return false
	default:
		return true
	}
}

// updatable refuses the update of a machine that is being deleted (DELETED), that has failed, or that is not bootstrapped
// (NOT_RUNNING). A machine whose PID 1 is started again continues its update.
func updatable(m *hostpb.Machine) error {
	switch {
	case m.Status.Phase == hostpb.MachineStatus_DELETING:
		return refusal.Errorf(hostpb.Refusal_DELETED, "machine %s/%s is being deleted", m.Spec.Namespace, m.Spec.Name)
	case m.Status.Phase == hostpb.MachineStatus_FAILED:
		return refusal.Errorf(hostpb.Refusal_NOT_RUNNING, "machine %s/%s has failed, so it cannot be updated: %s", m.Spec.Namespace, m.Spec.Name, m.Status.Message)
	case m.Status.Bootstrap != hostpb.MachineStatus_SUCCEEDED:
		return refusal.Errorf(hostpb.Refusal_NOT_RUNNING, "machine %s/%s has not been bootstrapped; wait until its bootstrap succeeds", m.Spec.Namespace, m.Spec.Name)
	}
	return nil
}

// checkChange refuses a change that cannot be made in place (INVALID). The message names the field.
func checkChange(from, to *hostpb.MachineSpec) error {
	from, to = Normalized(from), Normalized(to)
	if to.DiskBytes < from.DiskBytes {
		return invalid("machine %s/%s: disk_bytes cannot change from %d to %d in place: a disk can only grow; replace the machine", from.Namespace, from.Name, from.DiskBytes, to.DiskBytes)
	}
	if err := checkVersions(from.KubernetesVersion, to.KubernetesVersion); err != nil {
		return invalid("machine %s/%s: kubernetes_version cannot change in place: %v", from.Namespace, from.Name, err)
	}
	fixed := proto.CloneOf(from)
	fixed.Cpus, fixed.MemoryBytes, fixed.PidsLimit, fixed.DiskBytes, fixed.KubernetesVersion = to.Cpus, to.MemoryBytes, to.PidsLimit, to.DiskBytes, to.KubernetesVersion
	if names := differing(fixed, to); len(names) > 0 {
		return invalid("machine %s/%s: %s cannot change in place; replace the machine", from.Namespace, from.Name, strings.Join(names, ", "))
	}
	return nil
}

// differing returns the names of the fields in which two specs differ.
func differing(a, b *hostpb.MachineSpec) (names []string) {
	fields := a.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		if !a.ProtoReflect().Get(field).Equal(b.ProtoReflect().Get(field)) {
			names = append(names, string(field.Name()))
		}
	}
	return names
}

// checkVersions accepts the same version, a later patch release and the next minor release.
func checkVersions(from, to string) error {
	if from == to {
		return nil
	}
	have, err := version.ParseSemantic(from)
	if err != nil {
		return err
	}
	want, err := version.ParseSemantic(to)
	switch {
	case err != nil:
		return err
	case want.LessThan(have):
		return fmt.Errorf("%s is older than %s, and a downgrade is not possible", to, from)
	case want.Major() != have.Major() || want.Minor() > have.Minor()+1:
		return fmt.Errorf("%s is more than one minor release after %s; update one minor release at a time", to, from)
	}
	return nil
}

// fitsGrown refuses an update for which the host lacks the version, memory, processors or disk. The machine's present part
// of the memory is already its own.
func fitsGrown(from, to *hostpb.MachineSpec, info *hostpb.HostInfo) error {
	if err := provided(to, info); err != nil {
		return err
	}
	others := proto.CloneOf(info)
	others.AllocatedMemoryBytes -= from.MemoryBytes
	return fits(to, others)
}

// Undone returns the spec of a machine after an update was rolled back: the previous one, with a disk that stays grown.
func Undone(from, to *hostpb.MachineSpec) *hostpb.MachineSpec {
	spec := proto.CloneOf(from)
	if DiskBytes(to) > DiskBytes(from) {
		spec.DiskBytes = to.DiskBytes
	}
	return spec
}

// SameUpdatedMachine is sameMachine for a machine with an update. other is the spec before the update, or the desired spec of an
// update that was rolled back: a client whose cache is older or newer still has it.
func SameUpdatedMachine(have, other, want *hostpb.MachineSpec) error {
	err := sameMachine(have, want)
	if err == nil || other == nil || sameMachine(other, want) != nil {
		return err
	}
	return nil
}
