//go:build linux

package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/internal/embedded"
)

func TestBackupTarget(t *testing.T) {
	schedule := embedded.BackupSchedule{BackupTarget: embedded.BackupTarget{To: "/mnt/backups", Keep: 3}}
	withSchedule, without := &app{root: t.TempDir()}, &app{root: t.TempDir()}
	for a, s := range map[*app]embedded.State{withSchedule: {ID: "a", Settings: embedded.Settings{Backup: &schedule}}, without: {ID: "b"}} {
		data, err := json.Marshal(s)
		if err == nil {
			err = os.WriteFile(a.layout().State(), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	hidden := filepath.Join(t.TempDir(), ".plane.tar.gz")
	if err := os.WriteFile(hidden, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		app    *app
		target embedded.BackupTarget
		file   string
		want   embedded.BackupTarget
		fails  string
	}{
		"target of the schedule":       {app: withSchedule, want: schedule.BackupTarget},
		"no schedule":                  {app: without, fails: "expected --to or --file"},
		"no plane":                     {app: &app{root: filepath.Join(here, "nowhere")}, fails: "there is no management plane"},
		"a file without a plane":       {app: &app{root: filepath.Join(here, "nowhere")}, file: "x.tar.gz", fails: "there is no management plane"},
		"flags without a target":       {app: withSchedule, target: embedded.BackupTarget{Keep: 1}, fails: "expected --to with the other flags"},
		"relative folder":              {app: without, target: embedded.BackupTarget{To: "x"}, want: embedded.BackupTarget{To: filepath.Join(here, "x")}},
		"file":                         {app: without, file: "x.tar.gz", want: embedded.BackupTarget{To: filepath.Join(here, "x.tar.gz"), Exact: true}},
		"a hidden file that exists":    {app: without, file: hidden, fails: "expected a new file for the backup, found " + hidden},
		"bucket":                       {app: without, target: embedded.BackupTarget{To: "s3://bucket//a/"}, want: embedded.BackupTarget{To: "s3://bucket/a"}},
		"folder of the plane":          {app: without, target: embedded.BackupTarget{To: without.root + "/x"}, fails: "outside of"},
		"negative number of backups":   {app: without, target: embedded.BackupTarget{To: "/x", Keep: -1}, fails: "expected a number"},
		"relative path of credentials": {app: without, target: embedded.BackupTarget{To: "s3://b", S3: embedded.S3{CredentialsFile: "c"}}, want: embedded.BackupTarget{To: "s3://b", S3: embedded.S3{CredentialsFile: filepath.Join(here, "c")}}},
	} {
		got, err := test.app.backupTarget(test.target, test.file)
		switch {
		case test.fails != "":
			if err == nil || !strings.Contains(err.Error(), test.fails) {
				t.Errorf("%s: %v", name, err)
			}
		case err != nil || got != test.want:
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

func TestPrintBackups(t *testing.T) {
	at := time.Date(2026, 3, 1, 3, 0, 0, 0, time.UTC)
	schedule := &embedded.BackupSchedule{BackupTarget: embedded.BackupTarget{To: "/mnt"}, Every: metav1.Duration{Duration: 6 * time.Hour}}
	for want, status := range map[string]embedded.Status{
		"Backups:  none; configure them with `capstan up --backup-to`\n": {},
		"Backups:      every 6h to /mnt\nLast backup:  2026-03-01T03:00:00Z /mnt/a\n": {
			Settings: embedded.Settings{Backup: schedule}, BackupStatus: embedded.BackupStatus{Last: &embedded.Backup{Time: at, Location: "/mnt/a"}},
		},
		"Backups:       every 6h to /mnt\nLast backup:   none\nBackup error:  no folder (2026-03-01T03:00:00Z; next attempt at 2026-03-01T03:01:00Z)\n": {
			Settings: embedded.Settings{Backup: schedule}, BackupStatus: embedded.BackupStatus{Error: "no folder", Tried: at, Next: at.Add(time.Minute)},
		},
	} {
		var out bytes.Buffer
		w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
		printBackups(w, status)
		if err := w.Flush(); err != nil || out.String() != want {
			t.Errorf("got %q, want %q", out.String(), want)
		}
	}
	for d, want := range map[time.Duration]string{6 * time.Hour: "6h", 90 * time.Minute: "1h30m", time.Minute: "1m", 61 * time.Second: "1m1s", 10 * time.Hour: "10h"} {
		if got := shortDuration(d); got != want {
			t.Errorf("%s: %q", d, got)
		}
	}
}

func TestPrintRestored(t *testing.T) {
	r := embedded.Restored{PlaneKubernetesVersion: "v1.35.4"}
	r.KubernetesVersion, r.CapstanVersion, r.Revision, r.Time = "v1.35.4", "v0.1.0", 7, time.Date(2026, 3, 1, 3, 0, 0, 0, time.UTC)
	const first = "Restored the backup of 2026-03-01T03:00:00Z (Capstan v0.1.0, Kubernetes v1.35.4, revision 7) to /srv/plane.\n"
	for want, change := range map[string]func(*embedded.Restored){
		first: func(*embedded.Restored) {},
		first + "The plane will run Kubernetes v1.36.3, because v1.35.4 is not installed on this box.\n":        func(r *embedded.Restored) { r.PlaneKubernetesVersion = "v1.36.3" },
		first + "The previous data is in /srv/plane/before-x: remove this folder when you no longer need it.\n": func(r *embedded.Restored) { r.Kept = "/srv/plane/before-x" },
	} {
		restored := r
		change(&restored)
		var out bytes.Buffer
		if printRestored(&out, restored, "/srv/plane"); out.String() != want {
			t.Errorf("got %q, want %q", out.String(), want)
		}
	}
}
