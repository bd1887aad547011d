package model

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/robfig/cron/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/order"
	"capstan.dev/capstan/internal/shorten"
)

const (
	// A failed backup is tried again after backupRetry. The delay doubles with each failure, up to backupRetryMax.
	backupRetry    = 30 * time.Second
	backupRetryMax = 10 * time.Minute
	// upgradeBackupAge is the maximum age of a backup before an upgrade, at the start of the upgrade.
	upgradeBackupAge = time.Hour
	// longestRequest is the limit of spec.request of EtcdBackups, in characters.
	longestRequest = 256
	// keptFailures is the number of failed backups that are kept for diagnosis.
	keptFailures = 5
)

// BackupAttempt is one attempt to make a backup.
type BackupAttempt struct {
	name, request string
	trigger       etcdv1.BackupTrigger
	phase         etcdv1.BackupPhase // "" while it is being made
	began         time.Time
	message       string
}

// WantedBackup is a backup that has to be made.
type WantedBackup struct {
	Trigger etcdv1.BackupTrigger
	Request string
}

// BackupTarget is the demand of the spec and of the Machines.
type BackupTarget struct {
	// Schedule is nil when there is none. It counts from Since.
	Schedule cron.Schedule
	Since    time.Time
	// OnDemand is the value of the annotation. UpgradeTo is the version that is about to be rolled out. Begun: some Machines
	// have that version already, or are being updated to it.
	OnDemand, UpgradeTo string
	Begun               bool
}

// DueAfter returns when a backup is due by the schedule after the newest complete one, whose time is zero without any. The result is zero
// without a schedule.
func (w BackupTarget) DueAfter(last time.Time) time.Time {
	if w.Schedule == nil {
		return time.Time{}
	}
	if last.Before(w.Since) {
		last = w.Since
	}
	return w.next(last)
}

// next returns when the schedule demands the first backup after a time. cron computes in the time zone of its argument, and decoded times
// have the zone of the host.
func (w BackupTarget) next(after time.Time) time.Time {
	return w.Schedule.Next(after.UTC())
}

// OnDemandRequest returns the value of the annotation that requests a backup. A value that no EtcdBackup can have is ignored, because a
// backup on demand precedes all others.
func OnDemandRequest(controlPlane *controlplanev1.CapstanControlPlane) (request, problem string) {
	request = controlPlane.Annotations[controlplanev1.BackupAnnotation]
	if n := utf8.RuneCountInString(request); n > longestRequest {
		return "", fmt.Sprintf("expected at most %d characters in the annotation %s, found %d: set it to a shorter value, or remove it",
			longestRequest, controlplanev1.BackupAnnotation, n)
	}
	return request, ""
}

// ParseSchedule parses spec.backup.schedule.
func ParseSchedule(text string) (cron.Schedule, error) {
	if text == "" {
		return nil, nil
	}
	s, err := parseCron(text)
	if err != nil {
		return nil, fmt.Errorf("%q is no schedule: %w; write five fields (minute, hour, day of month, month, day of week), for example \"0 3 * * *\", or one of @hourly, @daily, @weekly, @monthly, @every 6h", text, err)
	}
	return s, nil
}

// parseCron accepts five fields and names such as @daily. Time zones are refused, because the parser would use their name as
// the path of a file.
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

// compareAttempts orders attempts from old to new. The names of backups contain the time, and order two of the same second.
func compareAttempts(a, b BackupAttempt) int {
	return cmp.Or(a.began.Compare(b.began), cmp.Compare(a.name, b.name))
}

// NextBackup returns the backup that has to be made now, if any, and the time until the next decision; 0 when an event
// follows. The order of attempts does not matter.
func NextBackup(w BackupTarget, attempts []BackupAttempt, now time.Time) (next *WantedBackup, again time.Duration) {
	attempts = slices.SortedFunc(slices.Values(attempts), compareAttempts)
	var wants []WantedBackup
	if w.OnDemand != "" {
		wants = append(wants, WantedBackup{etcdv1.BackupOnDemand, w.OnDemand})
	}
	if w.UpgradeTo != "" && upgradeHeld(w, attempts, now) {
		wants = append(wants, WantedBackup{etcdv1.BackupBeforeUpgrade, w.UpgradeTo})
	}
	if w.Schedule != nil {
		due, after := dueBySchedule(w, attempts, now)
		if due != nil {
			wants = append(wants, *due)
		}
		again = after
	}
	for _, want := range wants {
		ready, wait := readyFor(want, attempts, now)
		if ready {
			return &want, 0
		}
		again = order.Sooner(again, wait)
	}
	return nil, again
}

// dueBySchedule returns the scheduled backup that is due, or the time until the next one. Several missed backups are replaced
// by one.
func dueBySchedule(w BackupTarget, attempts []BackupAttempt, now time.Time) (*WantedBackup, time.Duration) {
	from := w.Since
	for _, a := range attempts {
		if a.trigger != etcdv1.BackupScheduled {
			continue
		}
		if a.phase == etcdv1.BackupFailed && !a.began.Before(from) && !w.next(a.began).Before(now) {
			return &WantedBackup{etcdv1.BackupScheduled, a.request}, 0 // until the next one is due
		}
		if a.began.After(from) {
			from = a.began
		}
	}
	at := w.next(from)
	if at.IsZero() { // a date that does not exist
		return nil, 0
	}
	if wait := at.Sub(now); wait > 0 {
		return nil, wait
	}
	return &WantedBackup{etcdv1.BackupScheduled, at.Format(time.RFC3339)}, 0
}

// readyFor reports whether a backup can be made now: it does not exist, and after a failure the delay has passed.
func readyFor(want WantedBackup, attempts []BackupAttempt, now time.Time) (ready bool, wait time.Duration) {
	failures := 0
	var last time.Time
	for _, a := range attempts {
		switch {
		case a.phase == "":
			return false, 0 // One at a time. Its end is an event.
		case a.trigger != want.Trigger || a.request != want.Request:
		case a.phase == etcdv1.BackupFailed:
			failures, last = failures+1, a.began
		case want.Trigger == etcdv1.BackupBeforeUpgrade: // It is too old, otherwise it would not be wanted.
			failures = 0
		default:
			return false, 0
		}
	}
	if failures == 0 {
		return true, 0
	}
	wait = last.Add(backoff.After(failures-1, backupRetry, backupRetryMax)).Sub(now)
	return wait <= 0, max(wait, 0)
}

// upgradeHeld reports whether the rollout of a version has to wait for a backup.
func upgradeHeld(w BackupTarget, attempts []BackupAttempt, now time.Time) bool {
	if w.UpgradeTo == "" {
		return false
	}
	for _, a := range attempts {
		if a.trigger == etcdv1.BackupBeforeUpgrade && a.request == w.UpgradeTo && a.phase == etcdv1.BackupSucceeded &&
			(w.Begun || now.Sub(a.began) < upgradeBackupAge) {
			return false
		}
	}
	return true
}

// ExpiredBackups returns the backups to remove once the next one exists, the oldest first. The last backup of each other
// trigger stays, because it proves that its request was served; without it, the backup would be made again. The backup that
// spec.restore names stays as well.
func ExpiredBackups(backups []controlplanev1.BackupStatus, keep int, next etcdv1.BackupTrigger, restore string) []string {
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

// MergeBackups returns status.backups after a look at the workload cluster: new backups are added, and backups that
// were removed from the store are removed. Backups without an object in the workload cluster stay, because it may have
// been restored to an earlier time.
func MergeBackups(known []controlplanev1.BackupStatus, found []etcdv1.EtcdBackup) []controlplanev1.BackupStatus {
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

// maxBackups is the maximum length of status.backups.
const maxBackups = 100

func backupStatus(b *etcdv1.EtcdBackup) controlplanev1.BackupStatus {
	return controlplanev1.BackupStatus{
		Name: b.Name, Trigger: b.Spec.Trigger, Request: b.Spec.Request, Location: b.Status.Location,
		Time: ptr.Deref(b.Status.Time, b.CreationTimestamp), SizeBytes: b.Status.SizeBytes, Revision: b.Status.Revision,
		EtcdVersion: b.Status.EtcdVersion, KubernetesVersion: b.Spec.KubernetesVersion, SHA256: b.Status.SHA256, Keys: b.Spec.Keys,
	}
}

// RefuseReport turns a complete backup into a failed one if the API server would refuse its entry in status.backups, and with it the whole
// status. An administrator of the workload cluster can remove the limits of EtcdBackups there.
func RefuseReport(b *etcdv1.EtcdBackup) {
	if b.Status.Phase != etcdv1.BackupSucceeded {
		return
	}
	if problem := reportProblem(backupStatus(b)); problem != "" {
		b.Status.Phase = etcdv1.BackupFailed
		b.Status.Message = "its report in the workload cluster is not valid: " + problem + ". Check the definition of the kind EtcdBackup there"
	}
}

// reportProblem returns the limit of status.backups that an entry exceeds; "" for a valid entry.
func reportProblem(b controlplanev1.BackupStatus) string {
	for _, field := range []struct {
		name, value string
		limit       int
	}{
		{"metadata.name", b.Name, 253}, {"spec.request", b.Request, longestRequest}, {"spec.kubernetesVersion", b.KubernetesVersion, 256},
		{"status.location", b.Location, 2048}, {"status.etcdVersion", b.EtcdVersion, 256}, {"status.sha256", b.SHA256, 64},
	} {
		if n := utf8.RuneCountInString(field.value); n > field.limit {
			return fmt.Sprintf("expected at most %d characters in %s, found %d", field.limit, field.name, n)
		}
	}
	triggers := []etcdv1.BackupTrigger{etcdv1.BackupScheduled, etcdv1.BackupOnDemand, etcdv1.BackupBeforeUpgrade}
	switch {
	case !slices.Contains(triggers, b.Trigger):
		return fmt.Sprintf("expected one of %v in spec.trigger, found %q", triggers, shorten.Marked(string(b.Trigger), 64))
	case b.Time.IsZero(), !canBeStored(b.Time.Time):
		return "expected a time of the years 1 to 9999 in status.time"
	}
	return keysProblem(b.Keys)
}

// keysProblem returns the limit of a list of keys that the keys exceed.
func keysProblem(keys []etcdv1.BackupKey) string {
	const most = 8
	names := map[string]bool{}
	for _, k := range keys {
		if n := utf8.RuneCountInString(k.Name); n < 1 || n > 63 || utf8.RuneCountInString(k.SHA256) != 64 {
			return "expected a name of 1 to 63 characters and a checksum of 64 characters in each element of spec.keys"
		}
		names[k.Name] = true
	}
	if len(keys) > most || len(names) < len(keys) {
		return fmt.Sprintf("expected at most %d elements with different names in spec.keys, found %d with %d names", most, len(keys), len(names))
	}
	return ""
}

// canBeStored reports whether the API server accepts a time as a field of an object. A time zone can move the last hours of the year 9999 to
// the year 10000.
func canBeStored(t time.Time) bool {
	year := t.UTC().Year()
	return year >= 1 && year <= 9999
}

// BackupAttempts returns all known attempts.
func BackupAttempts(known []controlplanev1.BackupStatus, found []etcdv1.EtcdBackup) []BackupAttempt {
	var out []BackupAttempt
	seen := map[string]bool{}
	for i := range found {
		b := &found[i]
		seen[b.Name] = true
		out = append(out, BackupAttempt{b.Name, b.Spec.Request, b.Spec.Trigger, b.Status.Phase, b.CreationTimestamp.Time, b.Status.Message})
	}
	for _, b := range known {
		if !seen[b.Name] {
			out = append(out, BackupAttempt{b.Name, b.Request, b.Trigger, etcdv1.BackupSucceeded, b.Time.Time, ""})
		}
	}
	return out
}

// IsLostBackup reports whether a running backup will never end: its Machine is gone, it takes too long, or a restore began
// while it was made.
func IsLostBackup(b *etcdv1.EtcdBackup, known []controlplanev1.BackupStatus, f Fleet, now time.Time) bool {
	if b.Status.Phase != "" {
		return false
	}
	if slices.ContainsFunc(known, func(k controlplanev1.BackupStatus) bool { return k.Name == b.Name }) {
		return true
	}
	there := slices.ContainsFunc(f.Instances, func(i Instance) bool { return slices.Contains(i.names, b.Spec.Member) })
	return !there || now.Sub(b.CreationTimestamp.Time) > 2*time.Hour
}

// SupersededBackups returns the EtcdBackups that are not needed any more: those that are not in the store, and failures. The
// newest failures stay until a backup succeeds.
func SupersededBackups(known []controlplanev1.BackupStatus, found []etcdv1.EtcdBackup) []string {
	var failed []etcdv1.EtcdBackup
	var success *etcdv1.EtcdBackup // the newest
	var out []string
	for _, b := range found {
		switch {
		case b.Status.Phase == etcdv1.BackupFailed:
			failed = append(failed, b)
		case b.Status.Phase == etcdv1.BackupSucceeded && (success == nil || compareBackups(&b, success) > 0):
			success = &b
		}
		if b.Status.Phase == etcdv1.BackupSucceeded && !slices.ContainsFunc(known, func(k controlplanev1.BackupStatus) bool { return k.Name == b.Name }) {
			out = append(out, b.Name)
		}
	}
	slices.SortFunc(failed, func(a, b etcdv1.EtcdBackup) int { return compareBackups(&b, &a) })
	for n, b := range failed {
		if n >= keptFailures || success != nil && compareBackups(&b, success) < 0 {
			out = append(out, b.Name)
		}
	}
	slices.Sort(out)
	return out
}

// compareBackups orders EtcdBackups from old to new, as compareAttempts does: the API server counts in seconds.
func compareBackups(a, b *etcdv1.EtcdBackup) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
}

// BackupMembers returns the healthy members, whose machines can make or check a backup. The leader comes last, because it has
// the most work.
func BackupMembers(f Fleet, members map[string]etcdv1.EtcdMember) []string {
	var followers, leaders []string
	for _, i := range f.active() {
		if i.Member == nil || !i.Member.voting || i.Member.Leave || i.Member.health != metav1.ConditionTrue {
			continue
		}
		if m := members[i.Member.Name]; ptr.Deref(m.Status.Leader, false) {
			leaders = append(leaders, i.Member.Name)
		} else {
			followers = append(followers, i.Member.Name)
		}
	}
	slices.Sort(followers)
	return append(followers, leaders...)
}

// VersionSpread reports whether Machines run another version, and whether Machines have this version or are being updated to it.
func VersionSpread(machines []*clusterv1.Machine, version string) (outdated, begun bool) {
	for _, m := range machines {
		outdated = outdated || VersionOf(m) != version
		begun = begun || m.Spec.Version == version
	}
	return outdated, begun
}

// BackupCondition returns the condition BackupSucceeded.
func BackupCondition(attempts []BackupAttempt, problem string) metav1.Condition {
	c := metav1.Condition{Type: controlplanev1.BackupSucceededCondition, Status: metav1.ConditionUnknown, Reason: controlplanev1.NoBackupReason, Message: "No backup was due yet"}
	var last *BackupAttempt
	for n := range attempts {
		if a := &attempts[n]; a.phase != "" && (last == nil || compareAttempts(*a, *last) > 0) {
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

// UpgradeHold returns the reason why another version cannot be rolled out yet; "" when it can.
func UpgradeHold(w BackupTarget, attempts []BackupAttempt, now time.Time) string {
	if !upgradeHeld(w, attempts, now) {
		return ""
	}
	return fmt.Sprintf("the backup before the upgrade to %s is not there yet; see the condition %s, or set spec.backup.beforeUpgrade to false to go on without it", w.UpgradeTo, controlplanev1.BackupSucceededCondition)
}

// BackupName returns the name of a backup. Two managers that make the same backup use the same name. Clusters have different
// names, because two clusters with one name may share a bucket and a schedule.
func BackupName(cluster *clusterv1.Cluster, at time.Time) string {
	sum := sha256.Sum256([]byte(cluster.UID))
	return "etcd-" + at.UTC().Format("20060102-150405") + "-" + hex.EncodeToString(sum[:3])
}

// BackupFolder returns the folder of a cluster in a store.
func BackupFolder(cluster *clusterv1.Cluster) string { return cluster.Namespace + "/" + cluster.Name }

// LastBackup returns the time of the newest complete backup.
func LastBackup(cp *controlplanev1.CapstanControlPlane) (at time.Time) {
	for _, b := range cp.Status.Backups {
		at = slices.MaxFunc([]time.Time{at, b.Time.Time}, func(a, b time.Time) int { return cmp.Compare(a.Unix(), b.Unix()) })
	}
	return at
}
