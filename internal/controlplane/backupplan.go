package controlplane

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/robfig/cron/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

const (
	// A backup that failed is tried again after backupRetry, then after twice that, up to backupRetryMax.
	backupRetry    = 30 * time.Second
	backupRetryMax = 10 * time.Minute
	// upgradeBackupAge is how old a backup before an upgrade may be when the upgrade begins.
	upgradeBackupAge = time.Hour
	// keptFailures is how many backups that failed are kept for people to look at.
	keptFailures = 5
)

// attempt is a backup that was tried.
type attempt struct {
	name, request string
	trigger       etcdv1.BackupTrigger
	phase         etcdv1.BackupPhase // "" while it is being made
	began         time.Time
	message       string
}

// wanted is a backup to make.
type wanted struct {
	trigger etcdv1.BackupTrigger
	request string
}

// backupWish is what the spec and the Machines ask for.
type backupWish struct {
	// schedule is nil when there is none; since is from when on it counts.
	schedule cron.Schedule
	since    time.Time
	// onDemand is the annotation's value; upgradeTo is the version that is to be rolled out, and begun says that there are
	// Machines of it.
	onDemand, upgradeTo string
	begun               bool
}

// parseSchedule reads spec.backup.schedule.
func parseSchedule(text string) (cron.Schedule, error) {
	if text == "" {
		return nil, nil
	}
	s, err := parseCron(text)
	if err != nil {
		return nil, fmt.Errorf("%q is no schedule: %w; write five fields (minute, hour, day of month, month, day of week), for example \"0 3 * * *\", or one of @hourly, @daily, @weekly, @monthly, @every 6h", text, err)
	}
	return s, nil
}

// parseCron accepts five fields and names like @daily, but no time zone: its name would be read as the path of a file.
func parseCron(text string) (cron.Schedule, error) {
	if strings.Contains(text, "=") {
		return nil, errors.New("time zones are not supported: times are UTC")
	}
	s, err := cron.ParseStandard(text)
	if every, ok := s.(cron.ConstantDelaySchedule); ok && every.Delay < time.Minute {
		return nil, fmt.Errorf("every %s is more often than once a minute", every.Delay)
	}
	return s, err
}

// nextBackup is the backup that is to be made now, if any; again is when to ask anew, if no event tells (0: never).
// attempts are all that are known, in any order.
func nextBackup(w backupWish, attempts []attempt, now time.Time) (next *wanted, again time.Duration) {
	attempts = slices.SortedFunc(slices.Values(attempts), func(a, b attempt) int { return cmp.Or(a.began.Compare(b.began), cmp.Compare(a.name, b.name)) })
	var wants []wanted
	if w.onDemand != "" {
		wants = append(wants, wanted{etcdv1.BackupOnDemand, w.onDemand})
	}
	if w.upgradeTo != "" && upgradeHeld(w, attempts, now) {
		wants = append(wants, wanted{etcdv1.BackupBeforeUpgrade, w.upgradeTo})
	}
	if w.schedule != nil {
		due, after := dueBySchedule(w, attempts, now)
		if due != nil {
			wants = append(wants, *due)
		}
		again = after
	}
	for _, want := range wants {
		switch ready, wait := readyFor(want, attempts, now); {
		case ready:
			return &want, 0
		case wait > 0 && (again == 0 || wait < again):
			again = wait
		}
	}
	return nil, again
}

// dueBySchedule is the scheduled backup that is due, or after how long the next one is. What was missed is made up for once.
func dueBySchedule(w backupWish, attempts []attempt, now time.Time) (*wanted, time.Duration) {
	from := w.since
	for _, a := range attempts {
		if a.trigger != etcdv1.BackupScheduled {
			continue
		}
		if a.phase == etcdv1.BackupFailed && !a.began.Before(from) && !w.schedule.Next(a.began).Before(now) {
			return &wanted{etcdv1.BackupScheduled, a.request}, 0 // until the next one is due
		}
		if a.began.After(from) {
			from = a.began
		}
	}
	at := w.schedule.Next(from)
	if at.IsZero() { // a day that never comes
		return nil, 0
	}
	if wait := at.Sub(now); wait > 0 {
		return nil, wait
	}
	return &wanted{etcdv1.BackupScheduled, at.UTC().Format(time.RFC3339)}, 0
}

// readyFor says whether a backup can be made now: it was not made yet, and if it failed, a while has passed.
func readyFor(want wanted, attempts []attempt, now time.Time) (ready bool, wait time.Duration) {
	failures := 0
	var last time.Time
	for _, a := range attempts {
		switch {
		case a.phase == "":
			return false, 0 // One at a time; its end is an event.
		case a.trigger != want.trigger || a.request != want.request:
		case a.phase == etcdv1.BackupFailed:
			failures, last = failures+1, a.began
		case want.trigger == etcdv1.BackupBeforeUpgrade: // too old, or it would not be wanted
			failures = 0
		default:
			return false, 0
		}
	}
	if failures == 0 {
		return true, 0
	}
	pause := backupRetryMax
	if failures < 10 {
		pause = min(backupRetry<<(failures-1), backupRetryMax)
	}
	wait = last.Add(pause).Sub(now)
	return wait <= 0, max(wait, 0)
}

// upgradeHeld says whether the rollout of a version has to wait for a backup.
func upgradeHeld(w backupWish, attempts []attempt, now time.Time) bool {
	if w.upgradeTo == "" {
		return false
	}
	for _, a := range attempts {
		if a.trigger == etcdv1.BackupBeforeUpgrade && a.request == w.upgradeTo && a.phase == etcdv1.BackupSucceeded &&
			(w.begun || now.Sub(a.began) < upgradeBackupAge) {
			return false
		}
	}
	return true
}

// expired are the backups that go once another one is there, with the oldest first. The last one of each other trigger stays,
// however old: that it is there says that what asked for it was served, and it would be made again. So does the one that is to
// be restored.
func expired(backups []controlplanev1.BackupStatus, keep int, next etcdv1.BackupTrigger, restore string) []string {
	sorted := slices.SortedFunc(slices.Values(backups), newestFirst)
	last := map[etcdv1.BackupTrigger]bool{next: true}
	var out []string
	for i, b := range sorted {
		if i >= keep-1 && last[b.Trigger] && b.Name != restore {
			out = append([]string{b.Name}, out...)
		}
		last[b.Trigger] = true
	}
	return out
}

func newestFirst(a, b controlplanev1.BackupStatus) int {
	return cmp.Or(b.Time.Compare(a.Time.Time), cmp.Compare(b.Name, a.Name))
}

// mergeBackups is status.backups after what the workload cluster says: new ones are added, and those go that were removed
// from the store. What the workload cluster does not know stays: it may have been restored to a time before.
func mergeBackups(known []controlplanev1.BackupStatus, found []etcdv1.EtcdBackup) []controlplanev1.BackupStatus {
	byName := map[string]controlplanev1.BackupStatus{}
	for _, b := range known {
		byName[b.Name] = b
	}
	for i := range found {
		if b := &found[i]; b.Status.Phase == etcdv1.BackupSucceeded {
			byName[b.Name] = backupStatus(b)
		}
	}
	for i := range found {
		for _, name := range found[i].Status.Removed {
			delete(byName, name)
		}
	}
	var out []controlplanev1.BackupStatus
	for _, b := range byName {
		out = append(out, b)
	}
	slices.SortFunc(out, newestFirst)
	return out[:min(len(out), maxBackups)]
}

// maxBackups in the status.
const maxBackups = 100

func backupStatus(b *etcdv1.EtcdBackup) controlplanev1.BackupStatus {
	return controlplanev1.BackupStatus{
		Name: b.Name, Trigger: b.Spec.Trigger, Request: b.Spec.Request, Location: b.Status.Location,
		Time: ptr.Deref(b.Status.Time, b.CreationTimestamp), SizeBytes: b.Status.SizeBytes, Revision: b.Status.Revision,
		EtcdVersion: b.Status.EtcdVersion, KubernetesVersion: b.Spec.KubernetesVersion, SHA256: b.Status.SHA256, Keys: b.Spec.Keys,
	}
}

// attemptsOf are all backups that are known to have been tried.
func attemptsOf(known []controlplanev1.BackupStatus, found []etcdv1.EtcdBackup) []attempt {
	var out []attempt
	seen := map[string]bool{}
	for i := range found {
		b := &found[i]
		seen[b.Name] = true
		out = append(out, attempt{b.Name, b.Spec.Request, b.Spec.Trigger, b.Status.Phase, b.CreationTimestamp.Time, b.Status.Message})
	}
	for _, b := range known {
		if !seen[b.Name] {
			out = append(out, attempt{b.Name, b.Request, b.Trigger, etcdv1.BackupSucceeded, b.Time.Time, ""})
		}
	}
	return out
}

// lost says why a backup that is being made will never be: its machine is gone, or it takes too long; or that it is one of
// the time before a restore, which began while it was made.
func lost(b *etcdv1.EtcdBackup, known []controlplanev1.BackupStatus, f fleet, now time.Time) bool {
	if b.Status.Phase != "" {
		return false
	}
	if slices.ContainsFunc(known, func(k controlplanev1.BackupStatus) bool { return k.Name == b.Name }) {
		return true
	}
	there := slices.ContainsFunc(f.instances, func(i instance) bool { return slices.Contains(i.names, b.Spec.Member) })
	return !there || now.Sub(b.CreationTimestamp.Time) > 2*time.Hour
}

// superseded are the EtcdBackups that nobody needs any more: those that are not in the store, and failures, but for the last
// ones as long as nothing has succeeded since.
func superseded(known []controlplanev1.BackupStatus, found []etcdv1.EtcdBackup) []string {
	var failed []etcdv1.EtcdBackup
	var success time.Time
	var out []string
	for _, b := range found {
		switch {
		case b.Status.Phase == etcdv1.BackupFailed:
			failed = append(failed, b)
		case b.Status.Phase == etcdv1.BackupSucceeded && b.CreationTimestamp.After(success):
			success = b.CreationTimestamp.Time
		}
		if b.Status.Phase == etcdv1.BackupSucceeded && !slices.ContainsFunc(known, func(k controlplanev1.BackupStatus) bool { return k.Name == b.Name }) {
			out = append(out, b.Name)
		}
	}
	slices.SortFunc(failed, func(a, b etcdv1.EtcdBackup) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(b.Name, a.Name))
	})
	for n, b := range failed {
		if n >= keptFailures || b.CreationTimestamp.Time.Before(success) {
			out = append(out, b.Name)
		}
	}
	slices.Sort(out)
	return out
}

// backupMembers are the members whose machines can make a backup, or look at one: the healthy ones. The leader comes last: it
// has enough to do.
func backupMembers(f fleet, members map[string]etcdv1.EtcdMember) []string {
	var followers, leaders []string
	for _, i := range f.active() {
		if i.member == nil || !i.member.voting || i.member.leave || i.member.health != metav1.ConditionTrue {
			continue
		}
		if m := members[i.member.name]; ptr.Deref(m.Status.Leader, false) {
			leaders = append(leaders, i.member.name)
		} else {
			followers = append(followers, i.member.name)
		}
	}
	slices.Sort(followers)
	return append(followers, leaders...)
}

// rolling says whether there are Machines of another one than is wanted,
// and whether there are some of that already.
func rolling(machines []*clusterv1.Machine, version string) (outdated, begun bool) {
	for _, m := range machines {
		if m.Spec.Version == version {
			begun = true
		} else {
			outdated = true
		}
	}
	return outdated, begun
}

// backupCondition says how the backups are.
func backupCondition(attempts []attempt, problem string) metav1.Condition {
	c := metav1.Condition{Type: controlplanev1.BackupSucceededCondition, Status: metav1.ConditionUnknown, Reason: controlplanev1.NoBackupReason, Message: "No backup was due yet"}
	var last *attempt
	for n := range attempts {
		if a := &attempts[n]; a.phase != "" && (last == nil || a.began.After(last.began)) {
			last = a
		}
	}
	switch {
	case problem != "":
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, controlplanev1.BackupImpossibleReason, problem
	case last == nil && len(attempts) > 0:
		c.Message = "The first backup is being made"
	case last != nil && last.phase == etcdv1.BackupFailed:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, controlplanev1.BackupFailedReason, fmt.Sprintf("The backup %s failed, and is tried again: %s", last.name, last.message)
	case last != nil:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, controlplanev1.BackupSucceededReason, ""
	}
	return c
}
