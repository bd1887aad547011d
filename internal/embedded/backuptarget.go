package embedded

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/node/backup"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

const (
	s3Scheme = "s3://"
	// defaultS3Endpoint is the endpoint of AWS.
	defaultS3Endpoint = "https://s3.amazonaws.com"
	// DefaultBackupKeep is the default number of scheduled backups to keep.
	DefaultBackupKeep = 14
	// minBackupEvery is the shortest interval of a schedule.
	minBackupEvery = time.Minute
)

// BackupTarget is the place of the plane's backups.
type BackupTarget struct {
	// To is an absolute folder, or s3://BUCKET/PREFIX. With Exact, it is the path of the file.
	To    string `json:"to"`
	Exact bool   `json:"-"`
	// Keep is the number of backups of this plane to keep; 0 keeps all.
	Keep int `json:"keep,omitempty"`
	S3   S3  `json:"s3,omitzero"`
}

// S3 describes the connection to a bucket. It contains no secrets.
type S3 struct {
	// Endpoint is a URL. Default: AWS.
	Endpoint string `json:"endpoint,omitempty"`
	// Region of the bucket. Default: requested from the endpoint.
	Region string `json:"region,omitempty"`
	// CredentialsFile has the format of ~/.aws/credentials, profile default, mode 0600. Default, but not for a schedule: the environment
	// variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
	CredentialsFile string `json:"credentialsFile,omitempty"`
	// CAFile contains the certificate authorities of the endpoint in PEM format. Default: those of the box.
	CAFile string `json:"caFile,omitempty"`
}

func (t BackupTarget) inS3() bool { return strings.HasPrefix(t.To, s3Scheme) }

// split returns the folder of the target, and with Exact the name of the file.
func (t BackupTarget) split() (folder, name string) {
	if !t.Exact {
		return t.To, ""
	}
	i := strings.LastIndex(t.To, "/")
	return cmp.Or(t.To[:max(i, 0)], "/"), t.To[i+1:]
}

func (t BackupTarget) nameOf(id string, at time.Time) string {
	_, name := t.split()
	return cmp.Or(name, archiveName(id, at))
}

// open opens the store of the target.
func (t BackupTarget) open() (backup.Store, error) {
	folder, _ := t.split()
	if !t.inS3() {
		if info, err := os.Stat(folder); err != nil || !info.IsDir() {
			return nil, fmt.Errorf("expected a folder for backups, found none at %s: create it, or mount it there", folder)
		}
		return backup.OpenAnywhere(nodeconfig.BackupStore{Directory: folder, Folder: "."})
	}
	bucket, prefix, _ := strings.Cut(strings.TrimPrefix(folder, s3Scheme), "/")
	s3 := nodeconfig.S3{Endpoint: cmp.Or(t.S3.Endpoint, defaultS3Endpoint), Bucket: bucket, Prefix: prefix, Region: t.S3.Region}
	value, err := t.S3.credentials()
	if err != nil {
		return nil, err
	}
	s3.AccessKeyID, s3.SecretAccessKey = value.AccessKeyID, value.SecretAccessKey
	if t.S3.CAFile != "" {
		ca, err := os.ReadFile(t.S3.CAFile)
		if err != nil {
			return nil, err
		}
		s3.CA = string(ca)
	}
	return backup.OpenAnywhere(nodeconfig.BackupStore{S3: &s3, Folder: "."})
}

// credentials returns the credentials from a file or the environment. Arguments of a process are visible to all users.
func (s S3) credentials() (credentials.Value, error) {
	if s.CredentialsFile == "" {
		value, err := credentials.NewEnvAWS().Get()
		if err != nil || value.AccessKeyID == "" || value.SecretAccessKey == "" {
			return value, errors.Join(err, errors.New("expected credentials for S3, found none: set --s3-credentials to a file, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"))
		}
		return value, nil
	}
	info, err := os.Stat(s.CredentialsFile)
	if err != nil {
		return credentials.Value{}, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return credentials.Value{}, fmt.Errorf("expected S3 credentials that only root can read, found %s with mode %s: run `chmod 600` on it", s.CredentialsFile, info.Mode().Perm())
	}
	value, err := credentials.NewFileAWSCredentials(s.CredentialsFile, "default").Get()
	if err == nil && (value.AccessKeyID == "" || value.SecretAccessKey == "") {
		err = errors.New("aws_access_key_id or aws_secret_access_key is missing")
	}
	if err != nil {
		return value, fmt.Errorf("expected S3 credentials in %s, profile default: %w", s.CredentialsFile, err)
	}
	return value, nil
}

// Check returns an error for an invalid target. It does not connect to the store.
func (t BackupTarget) Check(l Layout) error {
	if t.Keep < 0 {
		return invalid("expected a number of backups to keep, found %d", t.Keep)
	}
	if t.inS3() {
		return t.checkS3()
	}
	folder, _ := t.split()
	if !filepath.IsAbs(folder) || strings.Contains(folder, "://") {
		return invalid("expected an absolute folder or s3://BUCKET/PREFIX for backups, found %q", folder)
	}
	if inside, err := filepath.Rel(l.Root, folder); err == nil && filepath.IsLocal(inside) {
		return invalid("expected a folder for backups outside of %s, found %s: the backups would be lost with the plane", l.Root, folder)
	}
	if t.Exact && atomicfile.Exists(t.To) {
		return invalid("expected a new file for the backup, found %s: choose another name, or remove it", t.To)
	}
	return nil
}

// Beside reports whether the folder of the target is on the file system of the installation: its backups are then lost with it.
func (t BackupTarget) Beside(l Layout) bool {
	var folder, root unix.Stat_t
	dir, _ := t.split()
	return !t.inS3() && unix.Stat(dir, &folder) == nil && unix.Stat(l.Root, &root) == nil && folder.Dev == root.Dev
}

// CheckArchive returns an error if the target, with Exact, cannot be an existing backup. It does not connect to the store.
func (t BackupTarget) CheckArchive() error {
	if t.inS3() {
		return t.checkS3()
	}
	info, err := os.Stat(t.To)
	if err != nil {
		return fmt.Errorf("expected a backup, found no file: %w", err)
	}
	if info.IsDir() {
		return invalid("expected the file of a backup, found the folder %s", t.To)
	}
	return nil
}

func (t BackupTarget) checkS3() error {
	bucket, key, _ := strings.Cut(strings.TrimPrefix(t.To, s3Scheme), "/")
	switch {
	case t.Exact && (bucket == "" || key == ""):
		return invalid("expected s3://BUCKET/KEY, found %q", t.To)
	case bucket == "":
		return invalid("expected s3://BUCKET/PREFIX, found %q", t.To)
	case t.S3.Endpoint == "":
		return nil
	}
	u, err := url.Parse(t.S3.Endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || strings.Trim(u.Path, "/") != "" || u.User != nil {
		return invalid("expected the S3 endpoint as http(s)://HOST[:PORT], found %q", t.S3.Endpoint)
	}
	return nil
}

// Absolute makes the paths of a target absolute.
func (t *BackupTarget) Absolute() (err error) {
	for _, p := range []*string{&t.To, &t.S3.CredentialsFile, &t.S3.CAFile} {
		switch {
		case *p == "" || *p == scheduleNone:
		case strings.HasPrefix(*p, s3Scheme):
			*p = s3Scheme + strings.Trim(path.Clean("/"+strings.TrimPrefix(*p, s3Scheme)), "/")
		default:
			if *p, err = filepath.Abs(*p); err != nil {
				return err
			}
		}
	}
	return nil
}
