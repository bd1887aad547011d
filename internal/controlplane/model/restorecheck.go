package model

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

// CheckWay is the place where a backup is examined before Machines are removed for it.
type CheckWay string

// Ways to check a backup.
const (
	// checkByMachine: the cluster serves and has data, so that one of its machines has to examine the backup.
	checkByMachine CheckWay = "Machine"
	// CheckByNobody: there is no data, or no machine can check the backup any more.
	CheckByNobody CheckWay = "Nobody"
	// CheckLater: no machine answers now, and one may answer soon.
	CheckLater CheckWay = "Later"
	// CheckImpossible: the kubeconfig is refused, so that the cluster may serve, and the end of a restore would not be seen.
	CheckImpossible CheckWay = "Impossible"
)

const (
	// checkPatience is the time after which another machine is asked when one has not started.
	checkPatience = 2 * time.Minute
	// checkLimit is the maximum duration of one check. Machines give up after an hour.
	checkLimit = 90 * time.Minute
)

// ChooseCheck decides whether a machine examines the backup, and returns the reason if none does now. silent is the time since the API
// server last used etcd. A short interruption must never cost a cluster that serves.
func ChooseCheck(f Fleet, a *Readiness, initialized bool, silent time.Duration) (way CheckWay, why string) {
	switch {
	case a.Refused():
		return CheckImpossible, a.Problem()
	case !initialized || len(f.Instances) == 0:
		return CheckByNobody, ""
	case a.UsesEtcd():
		return checkByMachine, ""
	case f.lostMachines() != "":
		return CheckByNobody, f.lostMachines()
	case silent < Grace:
		return CheckLater, a.Problem()
	}
	return CheckByNobody, a.Problem()
}

// CheckName returns the name of the check for the present spec.restore. A change of other fields of the spec does not repeat
// a refused restore.
func CheckName(cp *controlplanev1.CapstanControlPlane) string {
	data, _ := json.Marshal([]any{cp.UID, cp.Spec.Restore, cp.Spec.Backup.Store}) //nolint:errchkjson // of strings and booleans
	sum := sha256.Sum256(data)
	return "restore-" + hex.EncodeToString(sum[:5])
}

// CheckIsOutdated reports whether a successful check is too old to start a restore.
func CheckIsOutdated(c *etcdv1.EtcdBackupCheck, now time.Time) bool {
	return c.Status.Phase == etcdv1.CheckSucceeded && now.Sub(c.CreationTimestamp.Time) >= checkLimit
}

// NextCheck returns the member that has to examine the backup; "" when a check is running, is complete, or no member can. A
// result is final.
func NextCheck(found *etcdv1.EtcdBackupCheck, members []string, now time.Time) (member string) {
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

// CheckMessage describes the progress of a check. member was asked now; "" when no member was asked.
func CheckMessage(backup string, found *etcdv1.EtcdBackupCheck, member, problem, annotation, id string) string {
	hint := fmt.Sprintf(". Machines that an older Capstan has made cannot do it: replace them with spec.rollout.after. To restore without a check, set the annotation %s to %q", annotation, id)
	switch {
	case member != "":
		return fmt.Sprintf("Before anything is removed, the machine of the etcd member %s checks the backup %s", member, backup)
	case problem != "":
		return fmt.Sprintf("Before anything is removed, a machine has to check the backup %s, and none can: %s%s", backup, problem, hint)
	case found.Status.Phase == "":
		return fmt.Sprintf("Before anything is removed, the machine of the etcd member %s has to check the backup %s, and has not begun yet%s", found.Spec.Member, backup, hint)
	}
	return fmt.Sprintf("Before anything is removed, the machine of the etcd member %s checks the backup %s", found.Spec.Member, backup)
}

// UnfitBackup returns the reasons why a readable backup cannot be used here.
func UnfitBackup(found etcdv1.EtcdBackupCheckStatus, keys []etcdv1.BackupKey, cp *controlplanev1.CapstanControlPlane) []string {
	problems := nodeconfig.DifferentKeys(keyMap(found.Keys), keyMap(keys), otherAuthorities(cp))
	return append(problems, wrongVersion(found.KubernetesVersion, WantedVersion(cp))...)
}
