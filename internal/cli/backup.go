//go:build linux

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

// s3Flags are the flags for the connection to a bucket. The credentials are never arguments, which other users can read. before is the part
// of the usage in front of a default.
func s3Flags(f *pflag.FlagSet, s *embedded.S3, prefix, before string) {
	f.StringVar(&s.Endpoint, prefix+"s3-endpoint", "", "URL of the S3-compatible store (default: "+before+"AWS)")
	f.StringVar(&s.Region, prefix+"s3-region", "", "region of the bucket (default: "+before+"requested from the store)")
	f.StringVar(&s.CredentialsFile, prefix+"s3-credentials", "", "file in the format of ~/.aws/credentials with the profile default, mode 0600 (default: the environment variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)")
	f.StringVar(&s.CAFile, prefix+"s3-ca", "", "PEM file with the certificate authorities of the store (default: "+before+"those of this box)")
}

// scheduleFlags are the flags of `capstan up` for scheduled backups.
func scheduleFlags(f *pflag.FlagSet, s *embedded.BackupSchedule) {
	f.StringVar(&s.To, "backup-to", "", "folder, or s3://BUCKET/PREFIX, for scheduled backups of this management plane; none ends the schedule (default: unchanged)")
	f.DurationVar(&s.Every.Duration, "backup-every", 0, "interval between backups, for example 6h (default: unchanged)")
	f.IntVar(&s.Keep, "backup-keep", 0, fmt.Sprintf("number of backups of this plane to keep (default: unchanged, at first %d)", embedded.DefaultBackupKeep))
	s3Flags(f, &s.S3, "backup-", "unchanged, also with another --backup-to; at first ")
	f.Lookup("backup-s3-credentials").Usage = "file in the format of ~/.aws/credentials with the profile default, mode 0600; required for S3 (default: unchanged)"
}

func (a *app) backupCommand() *cobra.Command {
	var target embedded.BackupTarget
	var file string
	var timeout time.Duration
	c := &cobra.Command{
		Use: "backup", Short: "Back up the running management plane", Args: cobra.NoArgs,
		Long: `Back up the running management plane to one file, with all objects and keys.
The file contains all keys of the plane and of its clusters. Store it as safely as the files of root.

capstan backup --to /mnt/backups/capstan --keep 14
capstan backup --to s3://bucket/prefix --s3-endpoint https://s3.example.org:9000 --s3-credentials /etc/capstan/s3
capstan backup --file plane.tar.gz

Without --to and --file, the backup goes to the place of the scheduled backups (` + "`capstan up --backup-to`" + `).`,
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
			if a.structured() {
				return a.print(made)
			}
			fmt.Fprintf(a.out, "%s (%d bytes, revision %d)\n", made.Location, made.SizeBytes, made.Revision)
			for _, name := range made.Removed {
				fmt.Fprintf(a.out, "removed %s\n", name)
			}
			return nil
		},
	}
	c.Flags().StringVar(&target.To, "to", "", "folder, or s3://BUCKET/PREFIX; the command chooses the file name")
	c.Flags().StringVar(&file, "file", "", "path of the file; it must not exist")
	c.Flags().IntVar(&target.Keep, "keep", 0, "number of backups of this plane to keep in --to (default: all)")
	c.Flags().DurationVar(&timeout, "timeout", time.Hour, "time limit; 0 for none")
	s3Flags(c.Flags(), &target.S3, "", "")
	c.MarkFlagsMutuallyExclusive("to", "file")
	c.MarkFlagsMutuallyExclusive("keep", "file")
	return c
}

// backupTarget returns the place that the flags name; without flags, the place of the scheduled backups.
func (a *app) backupTarget(target embedded.BackupTarget, file string) (embedded.BackupTarget, error) {
	state, err := embedded.LoadState(a.layout())
	if err != nil {
		return target, a.noPlane(err)
	}
	if file != "" {
		target.To, target.Exact = file, true
	}
	if target.To == "" {
		if state.Backup == nil {
			return target, coded{errors.New("expected --to or --file: this plane has no schedule with a place for backups"), exitUsage}
		}
		if target != (embedded.BackupTarget{}) {
			return target, coded{errors.New("expected --to with the other flags: without --to, the settings of the schedule apply"), exitUsage}
		}
		return state.Backup.BackupTarget, nil
	}
	err = target.Absolute()
	if err == nil {
		err = target.Check(a.layout())
	}
	return target, usage(err)
}

func (a *app) restoreCommand() *cobra.Command {
	o := embedded.RestoreOptions{}
	var timeout time.Duration
	c := &cobra.Command{
		Use: "restore ARCHIVE", Short: "Restore the management plane of this box from a backup", Args: cobra.ExactArgs(1),
		Long: `Restore the management plane of this box from a backup of ` + "`capstan backup`" + `: a file, or s3://BUCKET/KEY.
The command checks the whole backup before it changes anything. The plane must be stopped. Start it with ` + "`capstan up`" + `
afterwards.

Never run the original plane and the restored plane at the same time: both would manage the same hosts.`,
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := withTimeout(c.Context(), timeout)
			defer cancel()
			o.Root, o.Assets, o.Wait = a.root, a.assets, a.waits
			o.Archive.To, o.Archive.Exact = args[0], true
			if err := o.Archive.Absolute(); err != nil {
				return err
			}
			if err := o.Archive.CheckArchive(); err != nil {
				return usage(missingFile(err))
			}
			restored, err := embedded.Restore(ctx, o)
			if err != nil {
				return err
			}
			if a.structured() {
				return a.print(restored)
			}
			printRestored(a.out, restored, a.root)
			fmt.Fprintf(a.out, "Start the plane with `%s up`.\n", a.self())
			return nil
		},
	}
	c.Flags().BoolVar(&o.Replace, "replace", false, "replace the data of an existing installation; its machines stay, and its data is moved to a folder beside it")
	c.Flags().DurationVar(&timeout, "timeout", time.Hour, "time limit; 0 for none")
	s3Flags(c.Flags(), &o.Archive.S3, "", "")
	return c
}

// printRestored prints the result of a restore.
func printRestored(w io.Writer, r embedded.Restored, root string) {
	fmt.Fprintf(w, "Restored the backup of %s (Capstan %s, Kubernetes %s, revision %d) to %s.\n",
		r.Time.Format(time.RFC3339), r.CapstanVersion, r.KubernetesVersion, r.Revision, root)
	if r.PlaneKubernetesVersion != r.KubernetesVersion {
		fmt.Fprintf(w, "The plane will run Kubernetes %s, because %s is not installed on this box.\n", r.PlaneKubernetesVersion, r.KubernetesVersion)
	}
	if r.Kept != "" {
		fmt.Fprintf(w, "The previous data is in %s: remove this folder when you no longer need it.\n", r.Kept)
	}
}

// printBackups prints the schedule of a plane and its last result.
func printBackups(w io.Writer, s embedded.Status) {
	if s.Backup == nil {
		fmt.Fprintln(w, "Backups:\tnone; configure them with `capstan up --backup-to`")
		return
	}
	fmt.Fprintf(w, "Backups:\tevery %s to %s\n", shortDuration(s.Backup.Every.Duration), s.Backup.To)
	last := "none"
	if b := s.BackupStatus.Last; b != nil {
		last = b.Time.Format(time.RFC3339) + " " + b.Location
	}
	fmt.Fprintf(w, "Last backup:\t%s\n", last)
	if s.BackupStatus.Error != "" {
		fmt.Fprintf(w, "Backup error:\t%s (%s; next attempt at %s)\n", s.BackupStatus.Error, s.BackupStatus.Tried.Format(time.RFC3339), s.BackupStatus.Next.UTC().Format(time.RFC3339))
	}
}

// shortDuration omits zero units at the end: 6h instead of 6h0m0s.
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
