package embedded

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/backoff"
)

// scheduleNone as --backup-to ends the schedule.
const scheduleNone = "none"

const (
	// A failed backup is retried after backupRetry. The delay doubles with each failure, up to backupRetryMax.
	backupRetry    = time.Minute
	backupRetryMax = time.Hour
)

// BackupSchedule configures backups by the daemon.
type BackupSchedule struct {
	BackupTarget
	// Every is the interval between backups.
	Every metav1.Duration `json:"every,omitzero"`
}

// scheduleOf returns the schedule after a request. Empty fields of the request change nothing.
func scheduleOf(have *BackupSchedule, asked BackupSchedule, l Layout) (*BackupSchedule, error) {
	if asked == (BackupSchedule{}) {
		return have, nil
	}
	if asked.To == scheduleNone {
		return nil, nil
	}
	out := BackupSchedule{}
	if have != nil {
		out = *have
	}
	out.To, out.Keep = cmp.Or(asked.To, out.To), cmp.Or(asked.Keep, out.Keep, DefaultBackupKeep)
	out.Every.Duration = cmp.Or(asked.Every.Duration, out.Every.Duration)
	out.S3 = S3{
		Endpoint: cmp.Or(asked.S3.Endpoint, out.S3.Endpoint), Region: cmp.Or(asked.S3.Region, out.S3.Region),
		CredentialsFile: cmp.Or(asked.S3.CredentialsFile, out.S3.CredentialsFile), CAFile: cmp.Or(asked.S3.CAFile, out.S3.CAFile),
	}
	if out.To == "" {
		return nil, invalid("expected --backup-to with the other flags for backups: set it to a folder, or to s3://BUCKET/PREFIX")
	}
	if out.Every.Duration < minBackupEvery {
		return nil, invalid("expected --backup-every of at least %s, found %s", minBackupEvery, out.Every.Duration)
	}
	if err := out.Check(l); err != nil {
		return nil, err
	}
	if out.inS3() && out.S3.CredentialsFile == "" {
		return nil, invalid("expected --backup-s3-credentials with a file for scheduled backups to %s, found none: the daemon makes them, and it does not have the environment of this command after a restart", out.To)
	}
	_, err := out.open()
	return &out, err
}

// BackupStatus is the status of the scheduled backups.
type BackupStatus struct {
	// Target is the place of the backups.
	Target BackupTarget `json:"target,omitzero"`
	// Last is the newest complete backup.
	Last *Backup `json:"last,omitempty"`
	// Error of the last attempt; empty when it succeeded.
	Error string `json:"error,omitempty"`
	// Failures in a row, and the time of the last attempt.
	Failures int       `json:"failures,omitempty"`
	Tried    time.Time `json:"tried,omitzero"`
	// Next is the time of the next backup.
	Next time.Time `json:"next,omitzero"`
}

// next returns the time of the next backup. A missed backup is due at once.
func (s BackupStatus) next(every time.Duration, now time.Time) time.Time {
	switch {
	case s.Failures > 0 && !s.Tried.After(now):
		return s.Tried.Add(min(backoff.After(s.Failures-1, backupRetry, backupRetryMax), every))
	case s.Failures > 0 || s.Last == nil || s.Last.Time.After(now): // A time in the future, from a wrong clock, must not stop the schedule.
		return now
	}
	return s.Last.Time.Add(every)
}

// backupStatus is the file that keeps the status when the daemon ends.
func (l Layout) backupStatus() string { return filepath.Join(l.Root, "backup.json") }

// backUp creates the scheduled backups until ctx ends.
func (p *plane) backUp(ctx context.Context) {
	schedule := p.state.Backup
	if schedule == nil {
		return
	}
	if !p.board.await(ctx, func(s Status) bool { return s.Installed }) {
		return
	}
	status := lastStatus(p.layout, schedule.BackupTarget)
	for {
		now := time.Now()
		status.Next = status.next(schedule.Every.Duration, now)
		p.board.update(func(s *Status) { s.BackupStatus = status })
		timer := time.NewTimer(max(0, status.Next.Sub(now)))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		status = p.attempt(ctx, status)
		if ctx.Err() != nil {
			return
		}
		if err := atomicfile.WriteJSON(p.layout.backupStatus(), status, 0o600); err != nil {
			slog.Error("Cannot write the status of backups", "error", err)
		}
	}
}

// lastStatus returns the status of the backups to a place. It is empty if the last attempt was for another place, so that a backup is due at
// once. The place does not include the number of backups to keep.
func lastStatus(l Layout, target BackupTarget) BackupStatus {
	target.Keep = 0
	var last BackupStatus
	if err := atomicfile.ReadJSON(l.backupStatus(), &last); err != nil && !errors.Is(err, os.ErrNotExist) {
		slog.Error("Cannot read the status of backups", "error", err) // the next backup writes the file again
	}
	if last.Target == (BackupTarget{}) {
		last.Target = target // An earlier build did not record the place.
	}
	if last.Target != target {
		return BackupStatus{Target: target}
	}
	return last
}

// attempt creates one backup.
func (p *plane) attempt(ctx context.Context, before BackupStatus) BackupStatus {
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	made, err := MakeBackup(ctx, p.layout, p.state.Backup.BackupTarget)
	after := BackupStatus{Target: before.Target, Last: before.Last, Tried: time.Now().UTC().Truncate(time.Second)}
	if made.Location != "" { // The backup is complete, even if an older one could not be removed.
		after.Last = &made
	}
	if err != nil {
		slog.Error("Cannot make a backup", "error", err)
		after.Error = err.Error()
	}
	if made.Location == "" {
		after.Failures = before.Failures + 1
	}
	return after
}
