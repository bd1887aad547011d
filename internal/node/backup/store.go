// Package backup takes snapshots of a cluster's etcd, stores them in a directory or an S3-compatible store, and starts
// an etcd from one of them. A backup is two files in the folder of its cluster: <name>.db is etcd's own snapshot, and
// <name>.json describes it. The description is written last and removed first, so an incomplete backup has no
// description.
//
// Layer: node. Allowed imports: api, library, contract.
package backup

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/cidr"
	"capstan.dev/capstan/internal/endingreader"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

const (
	// s3Retries of one request. The backup or restore itself is retried as well.
	s3Retries = 3
	// s3Answer is the limit for the start of the store's answer.
	s3Answer = 30 * time.Second
)

// Store keeps files.
type Store interface {
	// Put stores a local file, completely or not at all.
	Put(ctx context.Context, name, file string) error
	// Get copies a file to a local file, which must not exist.
	Get(ctx context.Context, name, file string) error
	// Remove removes a file, and the parts of an interrupted Put, if the credentials allow that. A missing file is no error.
	Remove(ctx context.Context, name string) error
	// List returns the names of all complete files, sorted, without those in subfolders.
	List(ctx context.Context) ([]string, error)
	// Location describes the place of a file for messages.
	Location(name string) string
}

// errNotFound means that the store works and does not have the file.
var errNotFound = errors.New("the file does not exist")

// mayReach returns an error if a tenant's store must not be at an address. Tests replace it, because their store is on
// the loopback interface.
var mayReach = cidr.Remote

// Open opens a store that a tenant has configured. The store must not be on this machine or at a link-local address.
// Open sends no request. The store refuses file names that lead out of its folder, because the folders of other
// clusters are beside it.
func Open(c nodeconfig.BackupStore) (Store, error) { return open(c, mayReach) }

// OpenAnywhere is Open for a store that the operator of this machine has configured.
func OpenAnywhere(c nodeconfig.BackupStore) (Store, error) {
	return open(c, func(netip.Addr) error { return nil })
}

func open(c nodeconfig.BackupStore, mayReach func(netip.Addr) error) (Store, error) {
	if !filepath.IsLocal(c.Folder) || path.Clean(c.Folder) != c.Folder {
		return nil, fmt.Errorf("expected a folder in the backup store, such as namespace/name, found %q", c.Folder)
	}
	if c.S3 != nil {
		store, err := openS3(*c.S3, c.Folder, mayReach)
		if err != nil {
			return nil, err
		}
		return inFolder{store}, nil
	}
	if !filepath.IsAbs(c.Directory) {
		return nil, fmt.Errorf("expected an absolute directory for the backup store, found %q", c.Directory)
	}
	return inFolder{directory{root: c.Directory, folder: c.Folder}}, nil
}

// inFolder refuses file names that lead out of the folder of the store.
type inFolder struct{ Store }

func checkName(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\\\x00") {
		return fmt.Errorf("expected the name of a backup, found %q, which leads out of the folder of the backups", name)
	}
	return nil
}

// Put implements Store.
func (s inFolder) Put(ctx context.Context, name, file string) error {
	if err := checkName(name); err != nil {
		return err
	}
	return s.Store.Put(ctx, name, file)
}

// Get implements Store.
func (s inFolder) Get(ctx context.Context, name, file string) error {
	if err := checkName(name); err != nil {
		return err
	}
	return s.Store.Get(ctx, name, file)
}

// Remove implements Store.
func (s inFolder) Remove(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	return s.Store.Remove(ctx, name)
}

// directory on this machine.
type directory struct{ root, folder string }

func (d directory) path(name string) string { return filepath.Join(d.root, d.folder, name) }

// part is the name of a file until it is complete.
func (d directory) part(name string) string { return d.path("." + name + ".part") }

// Location implements Store.
func (d directory) Location(name string) string { return d.path(name) }

// exists refuses a missing directory: without a mount, backups would be on the machine's own disk and be lost with it.
func (d directory) exists() error {
	if info, err := os.Stat(d.root); err != nil || !info.IsDir() {
		return fmt.Errorf("the backup directory %s does not exist on this machine: mount it there, or set another one (Capstan's machines have /var/lib/capstan/backups)", d.root)
	}
	return nil
}

// Put implements Store.
func (d directory) Put(ctx context.Context, name, file string) error {
	if err := d.exists(); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(d.path(name)), 0o700); err != nil {
		return err
	}
	part := d.part(name)
	defer func() { _ = os.Remove(part) }()
	if err := atomicfile.Remove(part); err != nil {
		return err
	}
	if err := copyFile(ctx, file, part); err != nil {
		return err
	}
	if err := os.Rename(part, d.path(name)); err != nil {
		return err
	}
	return atomicfile.SyncDir(filepath.Dir(d.path(name)))
}

// Get implements Store.
func (d directory) Get(ctx context.Context, name, file string) error {
	if err := d.exists(); err != nil {
		return err
	}
	err := copyFile(ctx, d.path(name), file)
	if errors.Is(err, fs.ErrNotExist) {
		return errNotFound
	}
	return err
}

// Remove implements Store.
func (d directory) Remove(_ context.Context, name string) error {
	if err := d.exists(); err != nil {
		return err
	}
	for _, path := range []string{d.path(name), d.part(name)} {
		if err := atomicfile.Remove(path); err != nil {
			return err
		}
	}
	return nil
}

// List implements Store.
func (d directory) List(context.Context) ([]string, error) {
	if err := d.exists(); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(filepath.Join(d.root, d.folder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.Type().IsRegular() && !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// copyFile copies a file and syncs the copy to the disk.
func copyFile(ctx context.Context, from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(copySynced(ctx, out, in), out.Close())
}

// syncedBlock is the number of bytes of a copy that are not yet on the disk at most.
const syncedBlock = 16 << 20

// copySynced copies until the end of ctx. Each block is on the disk before the next one: a slow network mount can give bytes for hours, and
// the cache takes them faster than the mount, so that a single sync at the end would last for hours after the end of ctx.
func copySynced(ctx context.Context, to interface {
	io.Writer
	Sync() error
}, from io.Reader,
) error {
	from = endingreader.New(ctx, from)
	for {
		_, err := io.CopyN(to, from, syncedBlock)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if err := errors.Join(to.Sync(), ctx.Err()); err != nil {
			return err
		}
		if err != nil {
			return nil // the end of the file
		}
	}
}

// bucket of an S3-compatible store.
type bucket struct {
	client   *minio.Client
	endpoint string
	name     string
	folder   string
}

func openS3(c nodeconfig.S3, folder string, mayReach func(netip.Addr) error) (Store, error) {
	prefix := strings.Trim(c.Prefix, "/")
	if prefix != "" && (!filepath.IsLocal(prefix) || path.Clean(prefix) != prefix) {
		return nil, fmt.Errorf("expected a prefix for the backup store without empty parts, . and .., found %q", c.Prefix)
	}
	endpoint, err := url.Parse(c.Endpoint)
	if err != nil || endpoint.Host == "" || endpoint.Scheme != "http" && endpoint.Scheme != "https" {
		return nil, fmt.Errorf("the endpoint %q of the backup store is not a URL with http or https and a host", c.Endpoint)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone() //nolint:forcetypeassert // it is documented to be one
	transport.ResponseHeaderTimeout = s3Answer
	transport.Proxy = nil // A proxy would resolve names after the check.
	transport.DialContext = (&net.Dialer{Timeout: s3Answer, Control: checked(mayReach)}).DialContext
	transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: c.InsecureSkipTLSVerify} //nolint:gosec // the user's choice
	if c.CA != "" {
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM([]byte(c.CA)) {
			return nil, errors.New("ca.crt of the backup store holds no PEM certificate")
		}
		transport.TLSClientConfig.RootCAs = pool
	}
	client, err := minio.New(endpoint.Host, &minio.Options{
		Creds:  credentials.NewStaticV4(c.AccessKeyID, c.SecretAccessKey, ""),
		Secure: endpoint.Scheme == "https", Region: c.Region, Transport: transport, MaxRetries: s3Retries,
	})
	if err != nil {
		return nil, fmt.Errorf("the backup store %s: %w", c.Endpoint, err)
	}
	return bucket{client: client, endpoint: endpoint.Host, name: c.Bucket, folder: path.Join(prefix, folder)}, nil
}

// checked refuses connections to forbidden addresses. It runs after the resolution of names, also for redirects.
func checked(mayReach func(netip.Addr) error) func(network, address string, _ syscall.RawConn) error {
	return func(_, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		if err := mayReach(to.Addr()); err != nil {
			return fmt.Errorf("the backup store must not be at this address: %w", err)
		}
		return nil
	}
}

func (b bucket) key(name string) string { return path.Join(b.folder, name) }

// Location implements Store.
func (b bucket) Location(name string) string {
	return "s3://" + b.endpoint + "/" + b.name + "/" + b.key(name)
}

// Put implements Store.
func (b bucket) Put(ctx context.Context, name, file string) error {
	b.removeParts(ctx, name)
	_, err := b.client.FPutObject(ctx, b.name, b.key(name), file, minio.PutObjectOptions{ContentType: "application/octet-stream"})
	return b.explain("writing", name, err)
}

// removeParts removes the parts of an interrupted Put. An error does not matter: to list such parts is a right in the whole bucket, which the
// credentials may not have. A rule of the bucket can remove them instead.
func (b bucket) removeParts(ctx context.Context, name string) {
	_ = b.client.RemoveIncompleteUpload(ctx, b.name, b.key(name))
}

// Get implements Store.
func (b bucket) Get(ctx context.Context, name, file string) error {
	err := b.client.FGetObject(ctx, b.name, b.key(name), file, minio.GetObjectOptions{})
	if minio.ToErrorResponse(err).Code == minio.NoSuchKey {
		return errNotFound
	}
	if err == nil {
		err = os.Chmod(file, 0o600)
	}
	return b.explain("reading", name, err)
}

// Remove implements Store.
func (b bucket) Remove(ctx context.Context, name string) error {
	b.removeParts(ctx, name)
	err := b.client.RemoveObject(ctx, b.name, b.key(name), minio.RemoveObjectOptions{})
	if minio.ToErrorResponse(err).Code == minio.NoSuchKey {
		return nil
	}
	return b.explain("removing", name, err)
}

// List implements Store. The prefix ends with a slash, because the folder demo-2 is not in the folder demo.
func (b bucket) List(ctx context.Context) ([]string, error) {
	prefix := ""
	if b.folder != "." {
		prefix = b.folder + "/"
	}
	var names []string
	for object := range b.client.ListObjects(ctx, b.name, minio.ListObjectsOptions{Prefix: prefix}) {
		if object.Err != nil {
			return nil, b.explain("listing", "", object.Err)
		}
		if name := strings.TrimPrefix(object.Key, prefix); name != "" && !strings.Contains(name, "/") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

func (b bucket) explain(what, name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", what, b.Location(name), err)
}
