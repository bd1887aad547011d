package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"capstan.dev/capstan/internal/embedded"
)

// s3Flags say how to reach a bucket. The credentials themselves are never arguments.
func s3Flags(f *pflag.FlagSet, s *embedded.S3, prefix string) {
	f.StringVar(&s.Endpoint, prefix+"s3-endpoint", "", "URL of the S3-compatible store (default: that of AWS)")
	f.StringVar(&s.Region, prefix+"s3-region", "", "region of the bucket (default: the store is asked)")
	f.StringVar(&s.CredentialsFile, prefix+"s3-credentials", "", "file like ~/.aws/credentials with the profile default, mode 0600 (default: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)")
	f.StringVar(&s.CAFile, prefix+"s3-ca", "", "file with the certificate authorities of the store, PEM (default: those of this box)")
}

// scheduleFlags are those of `capstan up`.
func scheduleFlags(f *pflag.FlagSet, s *embedded.BackupSchedule) {
	f.StringVar(&s.To, "backup-to", "", "folder, or s3://BUCKET/PREFIX, for backups of this management plane; none ends the schedule (default: as it is)")
	f.DurationVar(&s.Every.Duration, "backup-every", 0, "time from one backup to the next, such as 6h (default: as it is)")
	f.IntVar(&s.Keep, "backup-keep", 0, fmt.Sprintf("how many backups of this plane stay (default: as it is, or %d)", embedded.DefaultBackupKeep))
	s3Flags(f, &s.S3, "backup-")
}

func (a *app) backupCommand() *cobra.Command {
	var target embedded.BackupTarget
	var file string
	var timeout time.Duration
	c := &cobra.Command{
		Use: "backup", Short: "Back the running management plane up: its objects and its keys", Args: noArgs,
		Long: `Back the running management plane up into one file: all objects, and the keys that they need.
Whoever has the file has all keys of the plane and of its clusters: keep it as safe as root's own files.

capstan backup --to /mnt/backups --keep 14
capstan backup --to s3://bucket/prefix --s3-endpoint https://s3.example.org:9000 --s3-credentials /etc/capstan/s3
capstan backup --file plane.tar.gz

Without --to and --file, the backup goes where those of the schedule go (` + "`capstan up --backup-to`" + `).`,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := withTimeout(c.Context(), timeout)
			defer cancel()
			target, err := a.backupTarget(target, file)
			if err != nil {
				return err
			}
			made, err := embedded.MakeBackup(ctx, a.layout(), target)
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(made)
			}
			fmt.Fprintf(a.out, "%s (%d bytes, revision %d)\n", made.Location, made.SizeBytes, made.Revision)
			for _, name := range made.Removed {
				fmt.Fprintf(a.out, "removed %s\n", name)
			}
			return nil
		},
	}
	c.Flags().StringVar(&target.To, "to", "", "folder, or s3://BUCKET/PREFIX; the name of the file is made")
	c.Flags().StringVar(&file, "file", "", "the file itself; it must not exist")
	c.Flags().IntVar(&target.Keep, "keep", 0, "how many backups of this plane stay in --to (default: all)")
	c.Flags().DurationVar(&timeout, "timeout", time.Hour, "how long to wait")
	s3Flags(c.Flags(), &target.S3, "")
	c.MarkFlagsMutuallyExclusive("to", "file")
	c.MarkFlagsMutuallyExclusive("keep", "file")
	return c
}

// backupTarget is what was asked for, or where the schedule's backups go.
func (a *app) backupTarget(target embedded.BackupTarget, file string) (embedded.BackupTarget, error) {
	if file != "" {
		target.To, target.Exact = file, true
	}
	if target.To == "" {
		state, err := embedded.LoadState(a.layout())
		if err != nil {
			return target, a.noPlane(err)
		}
		if state.Backup == nil {
			return target, coded{errors.New("wanted --to or --file: this plane has no schedule that names a place for its backups"), exitUsage}
		}
		if target != (embedded.BackupTarget{}) {
			return target, coded{errors.New("wanted --to with the other flags: without it, everything is as in the schedule"), exitUsage}
		}
		return state.Backup.BackupTarget, nil
	}
	err := target.Absolute()
	if err == nil {
		err = target.Check(a.layout())
	}
	return target, err
}

func (a *app) restoreCommand() *cobra.Command {
	o := embedded.RestoreOptions{}
	var timeout time.Duration
	c := &cobra.Command{
		Use: "restore ARCHIVE", Short: "Make the management plane of this box from a backup", Args: cobra.ExactArgs(1),
		Long: `Make the management plane of this box from a backup of ` + "`capstan backup`" + `: a file, or s3://BUCKET/KEY.
The whole backup is checked before anything changes. The plane must be stopped; start it with ` + "`capstan up`" + ` afterwards.

Never run the plane that was backed up and the restored one at the same time: both would manage the same hosts.`,
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := withTimeout(c.Context(), timeout)
			defer cancel()
			o.Root, o.Assets = a.root, a.assets
			o.Archive.To, o.Archive.Exact = args[0], true
			if err := o.Archive.Absolute(); err != nil {
				return err
			}
			restored, err := embedded.Restore(ctx, o)
			if err != nil {
				return err
			}
			if a.json() {
				return a.printJSON(restored)
			}
			fmt.Fprintf(a.out, "Restored the backup of %s (Capstan %s, Kubernetes %s, revision %d) to %s.\n",
				restored.Time.Format(time.RFC3339), restored.CapstanVersion, restored.KubernetesVersion, restored.Revision, a.root)
			if restored.Kept != "" {
				fmt.Fprintf(a.out, "What was there before is in %s: remove it when you do not need it any more.\n", restored.Kept)
			}
			fmt.Fprintf(a.out, "Start the plane with `%s up`.\n", a.self())
			return nil
		},
	}
	c.Flags().BoolVar(&o.Replace, "replace", false, "replace the data of the installation that is there; its machines stay, and its data is kept in a folder beside it")
	c.Flags().DurationVar(&timeout, "timeout", time.Hour, "how long to wait")
	s3Flags(c.Flags(), &o.Archive.S3, "")
	return c
}

// printBackups shows the schedule of a plane, and what has become of it.
func printBackups(w io.Writer, s embedded.Status) {
	if s.Backup == nil {
		fmt.Fprintln(w, "Backups:\tnone; see `capstan up --backup-to`")
		return
	}
	fmt.Fprintf(w, "Backups:\tevery %s to %s\n", shortDuration(s.Backup.Every.Duration), s.Backup.To)
	last := "none"
	if b := s.BackupStatus.Last; b != nil {
		last = b.Time.Format(time.RFC3339) + " " + b.Location
	}
	fmt.Fprintf(w, "Last backup:\t%s\n", last)
	if s.BackupStatus.Error != "" {
		fmt.Fprintf(w, "Backup error:\t%s (%s; again at %s)\n", s.BackupStatus.Error, s.BackupStatus.Tried.Format(time.RFC3339), s.BackupStatus.Next.UTC().Format(time.RFC3339))
	}
}

// shortDuration leaves out the zeros at the end: 6h instead of 6h0m0s.
func shortDuration(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}
