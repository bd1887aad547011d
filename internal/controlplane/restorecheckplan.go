package controlplane

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// checkWay says who looks at a backup before machines are removed for it.
type checkWay string

const (
	// checkByMachine: the cluster serves, so there is something to lose, and one of its machines has to look.
	checkByMachine checkWay = "Machine"
	// checkByNobody: there is nothing to lose, or nobody to ask any more.
	checkByNobody checkWay = "Nobody"
	// checkLater: nobody answers now, and somebody may in a moment.
	checkLater checkWay = "Later"
)

const (
	// checkPatience is after how long another machine is asked when one has not begun.
	checkPatience = 2 * time.Minute
	// checkLimit of one check: machines give up after an hour.
	checkLimit = 90 * time.Minute
)

// usesEtcd says that the API server answers and that its etcd has a majority.
func (a *reply) usesEtcd() bool { return a != nil && a.err == nil && len(a.failing(true)) == 0 }

// whoChecks decides who looks at the backup, and why nobody can; silent is for how long the API server has not said that it
// can use etcd. A connection that blinks must never cost a cluster that serves.
func whoChecks(f fleet, a *reply, initialized bool, silent time.Duration) (way checkWay, why string) {
	switch {
	case !initialized || len(f.instances) == 0:
		return checkByNobody, ""
	case a.usesEtcd():
		return checkByMachine, ""
	case f.lostMachines() != "":
		return checkByNobody, f.lostMachines()
	case silent < grace:
		return checkLater, a.problem()
	}
	return checkByNobody, a.problem()
}

// checkName is that of the check of what spec.restore says now. A change of anything else in the spec begins no restore that
// was refused.
func checkName(cp *controlplanev1.CapstanControlPlane) string {
	data, _ := json.Marshal([]any{cp.UID, cp.Spec.Restore, cp.Spec.Backup.Store}) //nolint:errchkjson // of strings and booleans
	sum := sha256.Sum256(data)
	return "restore-" + hex.EncodeToString(sum[:5])
}

// outOfDate says that a machine has found a backup good so long ago that another one has to look again.
func outOfDate(c *etcdv1.EtcdBackupCheck, now time.Time) bool {
	return c.Status.Phase == etcdv1.CheckSucceeded && now.Sub(c.CreationTimestamp.Time) >= checkLimit
}

// nextCheck decides whether a check has to be made, and by which of the members that could; "" when it is under way, or
// nobody can. What a machine has found stands.
func nextCheck(found *etcdv1.EtcdBackupCheck, members []string, now time.Time) (member string) {
	switch {
	case len(members) == 0:
		return ""
	case found == nil:
		return members[0]
	case found.Status.Phase == etcdv1.CheckSucceeded || found.Status.Phase == etcdv1.CheckFailed:
		return ""
	}
	age := now.Sub(found.CreationTimestamp.Time)
	idle := found.Status.Phase == "" || !slices.Contains(members, found.Spec.Member)
	if age < checkPatience || !idle && age < checkLimit {
		return ""
	}
	return members[(slices.Index(members, found.Spec.Member)+1)%len(members)]
}

// checking says how far a check is. member is who is asked now; "" when nobody can be.
func checking(backup string, found *etcdv1.EtcdBackupCheck, member, problem, annotation, id string) string {
	hint := fmt.Sprintf(". Machines that an older Capstan has made cannot do it: replace them with spec.rollout.after. To restore without a check, set the annotation %s to %q", annotation, id)
	switch {
	case member != "":
		return fmt.Sprintf("Before anything is removed, the machine of %s checks the backup %s", member, backup)
	case problem != "":
		return fmt.Sprintf("Before anything is removed, a machine has to check the backup %s, and none can: %s%s", backup, problem, hint)
	case found.Status.Phase == "":
		return fmt.Sprintf("Before anything is removed, the machine of %s has to check the backup %s, and has not begun yet%s", found.Spec.Member, backup, hint)
	}
	return fmt.Sprintf("Before anything is removed, the machine of %s checks the backup %s", found.Spec.Member, backup)
}

// unfit is why a backup that a machine could read is of no use here.
func unfit(found etcdv1.EtcdBackupCheckStatus, keys []etcdv1.BackupKey, cp *controlplanev1.CapstanControlPlane) []string {
	problems := nodeconfig.DifferentKeys(keyMap(found.Keys), keyMap(keys), otherAuthorities(cp))
	return append(problems, wrongVersion(found.KubernetesVersion, wantedVersion(cp))...)
}
