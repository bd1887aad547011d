package backup

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
)

// start starts a program and kills it at the end of the test.
func start(t *testing.T, log string, program string, args ...string) {
	t.Helper()
	cmd := exec.Command(program, args...)
	f, err := os.Create(log)
	expect.NoError(t, err)
	defer f.Close()
	cmd.Stdout, cmd.Stderr = f, f
	expect.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			if text, err := os.ReadFile(log); err == nil {
				t.Logf("%s:\n%s", filepath.Base(program), text)
			}
		}
	})
}

// s3Server is a real S3-compatible server on the loopback interface, with a bucket called backups.
func s3Server(t *testing.T, tls bool) nodeconfig.S3 {
	t.Helper()
	allowed := mayReach
	mayReach = func(netip.Addr) error { return nil }
	t.Cleanup(func() { mayReach = allowed })
	c := nodeconfig.S3{Bucket: testenv.S3Bucket, Region: "us-east-1", AccessKeyID: "someone", SecretAccessKey: "knows-it-well"}
	scheme := "http"
	var args []string
	if tls {
		dir := t.TempDir()
		c.CA = authority(t, dir)
		leaf := certfiles.Leaf{Name: "server", CA: "ca", Leaf: pki.Leaf{CommonName: "s3", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Usages: pki.Both}}
		_, err := leaf.Ensure(dir, time.Hour, time.Now())
		expect.NoError(t, err)
		scheme = "https"
		args = []string{"--cert", filepath.Join(dir, "server.crt"), "--key", filepath.Join(dir, "server.key")}
	}
	c.Endpoint = scheme + "://" + testenv.S3Server(t, c.AccessKeyID, c.SecretAccessKey, c.Region, args...)
	return c
}

func authority(t *testing.T, dir string) string {
	t.Helper()
	expect.NoError(t, certfiles.EnsureAuthority(dir, "ca", "ca", time.Now()))
	data, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	expect.NoError(t, err)
	return string(data)
}

// TestStoreOfATenant: Open refuses a tenant's store on this machine or at a link-local address. This applies to literal and to
// resolved addresses. The client does not follow redirects.
func TestStoreOfATenant(t *testing.T) {
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		http.Redirect(w, r, "http://169.254.169.254/", http.StatusTemporaryRedirect)
	}))
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	expect.NoError(t, err)
	list := func(host string, open func(nodeconfig.BackupStore) (Store, error)) error {
		store, err := open(nodeconfig.BackupStore{Folder: "a/b", S3: &nodeconfig.S3{
			Endpoint: "http://" + net.JoinHostPort(host, port), Bucket: "backups", Region: "us-east-1", AccessKeyID: "a", SecretAccessKey: "b",
		}})
		expect.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = store.List(ctx)
		return err
	}
	for _, host := range []string{"127.0.0.1", "127.1.2.3", "localhost", "::ffff:127.0.0.1", "0.0.0.0", "169.254.169.254"} {
		if err := list(host, Open); err == nil || !strings.Contains(err.Error(), "must not be at this address") {
			t.Errorf("%s: %v", host, err)
		}
	}
	if n := asked.Load(); n > 0 {
		t.Errorf("the server received %d requests, want none", n)
	}
	if err := list("127.0.0.1", OpenAnywhere); err == nil || strings.Contains(err.Error(), "169.254.169.254:") || asked.Load() == 0 {
		t.Errorf("the store of the operator: got %v after %d requests", err, asked.Load())
	}
}

// TestFolders: a cluster has access to its own folder only, even if the name of another cluster begins with its name.
func TestFolders(t *testing.T) {
	s3, dir := s3Server(t, false), t.TempDir()
	prefixed := s3
	prefixed.Prefix = "production"
	file := filepath.Join(t.TempDir(), "file")
	expect.NoError(t, os.WriteFile(file, []byte("content"), 0o600))
	for name, config := range map[string]nodeconfig.BackupStore{"directory": {Directory: dir}, "s3": {S3: &s3}, "s3 with a prefix": {S3: &prefixed}} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			open := func(folder string) Store {
				config.Folder = folder
				store, err := Open(config)
				expect.NoError(t, err)
				return store
			}
			own, other, all := open("default/demo"), open("default/demo-2"), open("default")
			expect.NoError(t, errors.Join(own.Put(ctx, "a.db", file), other.Put(ctx, "a.db", file), other.Put(ctx, "b.db", file)))
			for folder, test := range map[string]struct {
				store Store
				want  []string
			}{"demo": {own, []string{"a.db"}}, "demo-2": {other, []string{"a.db", "b.db"}}, "default": {all, nil}} {
				if names, err := test.store.List(ctx); err != nil || !slices.Equal(names, test.want) {
					t.Errorf("%s has %v, %v, want %v", folder, names, err, test.want)
				}
			}
			for _, bad := range []string{"../demo-2/a.db", "demo-2/a.db", "..", ".", "", "/a.db", `..\demo-2\a.db`} {
				for what, err := range map[string]error{
					"removed": own.Remove(ctx, bad), "read": own.Get(ctx, bad, filepath.Join(t.TempDir(), "x")), "written": own.Put(ctx, bad, file),
				} {
					if err == nil || !strings.Contains(err.Error(), "expected the name of a backup") {
						t.Errorf("%q was %s: %v", bad, what, err)
					}
				}
			}
			expect.NoError(t, own.Remove(ctx, "a.db"))
			if names, err := other.List(ctx); err != nil || len(names) != 2 {
				t.Errorf("the other cluster has %v, %v", names, err)
			}
		})
	}
	for _, bad := range []string{"", "../demo", "/demo", "default/../other", "default//demo"} {
		for name, config := range map[string]nodeconfig.BackupStore{"directory": {Directory: dir, Folder: bad}, "s3": {S3: &s3, Folder: bad}} {
			if _, err := Open(config); err == nil || !strings.Contains(err.Error(), "expected a folder") {
				t.Errorf("%s, folder %q: %v", name, bad, err)
			}
		}
	}
	for _, bad := range []string{"..", "a/../b", "a//b", "../a"} {
		prefixed.Prefix = bad
		if _, err := Open(nodeconfig.BackupStore{S3: &prefixed, Folder: "a/b"}); err == nil || !strings.Contains(err.Error(), "expected a prefix") {
			t.Errorf("prefix %q: %v", bad, err)
		}
	}
}

// TestStores: a directory and a real S3 server, with and without TLS, store and return backups.
func TestStores(t *testing.T) {
	folder := "default/demo"
	plain, secure := s3Server(t, false), s3Server(t, true)
	prefixed := plain
	prefixed.Prefix = "/some/where/"
	dir := t.TempDir()
	for name, c := range map[string]struct {
		config nodeconfig.BackupStore
		where  string
	}{
		"directory":        {nodeconfig.BackupStore{Directory: dir, Folder: folder}, dir + "/default/demo/a.db"},
		"s3":               {nodeconfig.BackupStore{S3: &plain, Folder: folder}, "/backups/default/demo/a.db"},
		"s3 with a prefix": {nodeconfig.BackupStore{S3: &prefixed, Folder: folder}, "/backups/some/where/default/demo/a.db"},
		"s3, TLS":          {nodeconfig.BackupStore{S3: &secure, Folder: folder}, "/backups/default/demo/a.db"},
	} {
		t.Run(name, func(t *testing.T) {
			store, err := Open(c.config)
			expect.NoError(t, err)
			scratch, ctx := t.TempDir(), t.Context()
			file := filepath.Join(scratch, "file")
			content := make([]byte, 6<<20+1) // more than one part of an upload
			_, _ = rand.Read(content)
			for range 2 { // The second upload replaces the first.
				expect.NoError(t, os.WriteFile(file, content, 0o600))
				expect.NoError(t, store.Put(ctx, "a.db", file))
			}
			if got := store.Location("a.db"); !strings.HasSuffix(got, c.where) {
				t.Errorf("location %s", got)
			}
			back := filepath.Join(scratch, "back")
			expect.NoError(t, store.Get(ctx, "a.db", back))
			got, err := os.ReadFile(back)
			expect.NoError(t, err)
			info, err := os.Stat(back)
			expect.NoError(t, err)
			if !slices.Equal(got, content) || info.Mode().Perm() != 0o600 {
				t.Errorf("%d bytes, mode %s", len(got), info.Mode())
			}
			if err := store.Get(ctx, "b.db", back+"2"); !errors.Is(err, errNotFound) {
				t.Errorf("a backup that does not exist: %v", err)
			}
			expect.NoError(t, store.Remove(ctx, "a.db"))
			expect.NoError(t, store.Remove(ctx, "a.db"))
			if err := store.Get(ctx, "a.db", back+"3"); !errors.Is(err, errNotFound) {
				t.Errorf("a backup that was removed: %v", err)
			}
		})
	}
}

// TestPartsOfInterruptedPut: an upload that was killed leaves parts in the bucket. The next Put and Remove of the file remove them, and no parts
// of other files. A store that refuses to list parts keeps working. The S3 server of the other tests lists none.
func TestPartsOfInterruptedPut(t *testing.T) {
	const uploads = `<ListMultipartUploadsResult><Bucket>backups</Bucket>
		<Upload><Key>default/demo/a.db</Key><UploadId>1</UploadId></Upload>
		<Upload><Key>default/demo/a.db.json</Key><UploadId>2</UploadId></Upload></ListMultipartUploadsResult>`
	refuses := false
	var did []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		_, _ = io.Copy(io.Discard, r.Body)
		switch {
		case query.Has("uploads") && refuses:
			w.WriteHeader(http.StatusForbidden)
		case query.Has("uploads"):
			_, _ = w.Write([]byte(uploads))
		default:
			did = append(did, r.Method+" "+r.URL.Path+" "+query.Get("uploadId"))
			if r.Method == http.MethodDelete {
				w.WriteHeader(http.StatusNoContent)
			}
		}
	}))
	t.Cleanup(server.Close)
	store, err := OpenAnywhere(nodeconfig.BackupStore{Folder: "default/demo", S3: &nodeconfig.S3{
		Endpoint: server.URL, Bucket: "backups", Region: "us-east-1", AccessKeyID: "a", SecretAccessKey: "b",
	}})
	expect.NoError(t, err)
	file := filepath.Join(t.TempDir(), "file")
	expect.NoError(t, os.WriteFile(file, []byte("something"), 0o600))
	for name, test := range map[string]struct {
		do   func() error
		want string
	}{
		"Put":    {func() error { return store.Put(t.Context(), "a.db", file) }, "PUT /backups/default/demo/a.db "},
		"Remove": {func() error { return store.Remove(t.Context(), "a.db") }, "DELETE /backups/default/demo/a.db "},
	} {
		for _, refuses = range []bool{false, true} {
			did = nil
			expect.NoError(t, test.do())
			want := []string{"DELETE /backups/default/demo/a.db 1", test.want}
			if refuses {
				want = want[1:]
			}
			if !slices.Equal(did, want) {
				t.Errorf("%s, refuses %v: %q, want %q", name, refuses, did, want)
			}
		}
	}
}

// TestStoreProblems: errors name the problem with a store and contain no secrets.
func TestStoreProblems(t *testing.T) {
	plain, secure := s3Server(t, false), s3Server(t, true)
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	change := func(c nodeconfig.S3, change func(*nodeconfig.S3)) nodeconfig.BackupStore {
		change(&c)
		return nodeconfig.BackupStore{S3: &c, Folder: "default/demo"}
	}
	for name, c := range map[string]struct {
		config nodeconfig.BackupStore
		want   string
	}{
		"missing directory":             {nodeconfig.BackupStore{Directory: "/does/not/exist", Folder: "a/b"}, "does not exist on this machine"},
		"relative directory":            {nodeconfig.BackupStore{Directory: "here", Folder: "a/b"}, "absolute"},
		"folder outside the store":      {nodeconfig.BackupStore{Directory: t.TempDir(), Folder: "../b"}, "a folder in the backup store"},
		"connection refused":            {change(plain, func(c *nodeconfig.S3) { c.Endpoint = closed.URL }), "refused"},
		"invalid URL":                   {change(plain, func(c *nodeconfig.S3) { c.Endpoint = "somewhere" }), "not a URL"},
		"missing bucket":                {change(plain, func(c *nodeconfig.S3) { c.Bucket = "nothing" }), "bucket does not exist"},
		"wrong key":                     {change(plain, func(c *nodeconfig.S3) { c.SecretAccessKey = "something-secret" }), "signature"},
		"unknown user":                  {change(plain, func(c *nodeconfig.S3) { c.AccessKeyID = "nobody" }), "Access Key"},
		"unknown certificate authority": {change(secure, func(c *nodeconfig.S3) { c.CA = "" }), "certificate"},
		"invalid certificate authority": {change(secure, func(c *nodeconfig.S3) { c.CA = "none" }), "no PEM certificate"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "file")
			expect.NoError(t, os.WriteFile(file, []byte("something"), 0o600))
			store, err := Open(c.config)
			if err == nil {
				err = store.Put(t.Context(), "a.db", file)
			}
			if err == nil || !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if err != nil && (strings.Contains(err.Error(), "something-secret") || strings.Contains(err.Error(), plain.SecretAccessKey)) {
				t.Errorf("the error contains a secret: %v", err)
			}
		})
	}
	insecure := change(secure, func(c *nodeconfig.S3) { c.CA, c.InsecureSkipTLSVerify = "", true })
	file := filepath.Join(t.TempDir(), "file")
	expect.NoError(t, os.WriteFile(file, []byte("something"), 0o600))
	store, err := Open(insecure)
	expect.NoError(t, err)
	expect.NoError(t, store.Put(t.Context(), "a.db", file))
}

// database is an etcd cluster with one member.
type database struct {
	client *clientv3.Client
	member Member
	peer   string
}

func startEtcd(t *testing.T, dataDir, name, peer string) *database {
	t.Helper()
	assets, err := testenv.Assets()
	expect.NoError(t, err)
	d := &database{member: Member{Endpoint: "http://" + ports.Address(t)}, peer: peer}
	start(t, dataDir+".log", filepath.Join(assets, "etcd"), "--name="+name, "--data-dir="+dataDir, "--listen-client-urls="+d.member.Endpoint,
		"--advertise-client-urls="+d.member.Endpoint, "--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer,
		"--initial-cluster="+name+"="+peer, "--unsafe-no-fsync", "--log-level=warn")
	d.client, err = clientv3.New(clientv3.Config{Endpoints: []string{d.member.Endpoint}, Logger: zap.NewNop()})
	expect.NoError(t, err)
	t.Cleanup(func() { _ = d.client.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), expect.Patience)
	defer cancel()
	_, err = d.client.Get(ctx, "x")
	expect.NoError(t, err)
	return d
}

func (d *database) put(t *testing.T, key string) {
	t.Helper()
	_, err := d.client.Put(t.Context(), key, "value")
	expect.NoError(t, err)
}

// save creates a backup.
func (d *database) save(t *testing.T, store Store, name string, keys map[string]string) Manifest {
	t.Helper()
	manifest := Manifest{Name: name, Keys: keys}
	file := filepath.Join(t.TempDir(), "x.db")
	expect.NoError(t, d.member.Snapshot(t.Context(), file, &manifest))
	expect.NoError(t, Save(t.Context(), store, file, manifest))
	return manifest
}

// withoutManifests is a store that becomes full after the snapshot.
type withoutManifests struct{ Store }

func (s withoutManifests) Put(ctx context.Context, name, file string) error {
	if strings.HasSuffix(name, ".json") {
		return syscall.ENOSPC
	}
	return s.Store.Put(ctx, name, file)
}

// TestHalfABackup: a snapshot whose manifest cannot be stored does not stay in the store.
func TestHalfABackup(t *testing.T) {
	dir := t.TempDir()
	store, err := Open(nodeconfig.BackupStore{Directory: dir, Folder: "default/demo"})
	expect.NoError(t, err)
	file := filepath.Join(dir, "snapshot")
	expect.NoError(t, os.WriteFile(file, []byte("x"), 0o600))
	if err := Save(t.Context(), withoutManifests{store}, file, Manifest{Name: "first"}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("got %v", err)
	}
	names, err := store.List(t.Context())
	expect.NoError(t, err)
	if len(names) > 0 {
		t.Errorf("the store has %q", names)
	}
}

// TestSaveAndRestore: a restore brings back the keys from before the backup and drops later keys. Watches from before the
// restore fail. A second run changes nothing.
func TestSaveAndRestore(t *testing.T) {
	dir := t.TempDir()
	old := startEtcd(t, filepath.Join(dir, "old"), "old", "http://"+ports.Address(t))
	config := nodeconfig.BackupStore{Directory: dir, Folder: "default/demo"}
	store, err := Open(config)
	expect.NoError(t, err)
	for n := range 50 {
		old.put(t, fmt.Sprintf("before-%02d", n))
	}
	keys := map[string]string{"encryption": "one", "ca": "two"}
	manifest := old.save(t, store, "first", keys)
	server, err := old.client.Status(t.Context(), old.member.Endpoint)
	expect.NoError(t, err)
	if manifest.Revision != 51 || manifest.SizeBytes < 1024 || len(manifest.SHA256) != 64 || manifest.EtcdVersion != server.Version {
		t.Errorf("%+v", manifest)
	}
	old.put(t, "after")

	assets, err := testenv.Assets()
	expect.NoError(t, err)
	peer := "http://" + ports.Address(t)
	r := Restoring{
		Restore: nodeconfig.Restore{Name: "first", Store: config, SHA256: manifest.SHA256, Keys: keys},
		Etcdutl: filepath.Join(assets, "etcdutl"), Member: "new", PeerURL: peer, Cluster: "demo", DataDir: filepath.Join(dir, "new"), Log: slog.New(slog.DiscardHandler),
	}
	// The restore removes the files of a run that was killed. The folder is that of a former machine.
	expect.NoError(t, os.MkdirAll(filepath.Join(r.DataDir, "restore", "data", "member"), 0o700))
	expect.NoError(t, os.CopyFS(filepath.Join(r.DataDir, "member"), os.DirFS(filepath.Join(dir, "old", "member"))))
	expect.NoError(t, r.Run(t.Context()))
	// A run that was killed while it removed its snapshot has restored the data. The next one removes the rest.
	expect.NoError(t, os.MkdirAll(filepath.Join(r.DataDir, "restore"), 0o700))
	expect.NoError(t, r.Run(t.Context()))
	if _, err := os.Stat(filepath.Join(r.DataDir, "restore")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the restore left its snapshot: %v", err)
	}
	if _, err := os.Stat(filepath.Join(r.DataDir, "member-before-new", "wal")); err != nil {
		t.Errorf("the data of the former machine: %v", err)
	}
	restored := startEtcd(t, r.DataDir, "new", peer)
	answer, err := restored.client.Get(t.Context(), "before-", clientv3.WithPrefix(), clientv3.WithCountOnly())
	expect.NoError(t, err)
	if answer.Count != 50 || answer.Header.Revision < revisionBump {
		t.Errorf("%d keys at revision %d", answer.Count, answer.Header.Revision)
	}
	if answer, err := restored.client.Get(t.Context(), "after"); err != nil || answer.Count != 0 {
		t.Errorf("a key from after the backup: %v, %v", answer, err)
	}
	if seen := <-restored.client.Watch(t.Context(), "before-", clientv3.WithPrefix(), clientv3.WithRev(manifest.Revision+1)); !errors.Is(seen.Err(), rpctypes.ErrCompacted) {
		t.Errorf("a watch from before the restore: %v", seen.Err())
	}
	oldMembers, err := old.client.MemberList(t.Context())
	expect.NoError(t, err)
	newMembers, err := restored.client.MemberList(t.Context())
	expect.NoError(t, err)
	if oldMembers.Header.ClusterId == newMembers.Header.ClusterId || len(newMembers.Members) != 1 || newMembers.Members[0].Name != "new" {
		t.Errorf("the restored cluster has the id or the members of the old one: %v", newMembers.Members)
	}
	// A second run changes nothing and does not read the backup.
	restored.put(t, "newer")
	expect.NoError(t, Remove(t.Context(), store, "first"))
	expect.NoError(t, r.Run(t.Context()))
	if answer, err := restored.client.Get(t.Context(), "newer"); err != nil || answer.Count != 1 {
		t.Errorf("the second run replaced newer data: %v, %v", answer, err)
	}
}

// TestRestoreRefused: a restore refuses incomplete backups, other backups than the requested one, and backups for other keys.
// It creates no data directory then.
func TestRestoreRefused(t *testing.T) {
	dir := t.TempDir()
	source := startEtcd(t, filepath.Join(dir, "etcd"), "etcd", "http://"+ports.Address(t))
	source.put(t, "something")
	config := nodeconfig.BackupStore{Directory: dir, Folder: "default/demo"}
	store, err := Open(config)
	expect.NoError(t, err)
	keys := map[string]string{"encryption": "one", "ca": "two"}
	source.save(t, store, "good", keys)
	source.save(t, store, "short", keys)
	source.save(t, store, "damaged", keys)
	source.save(t, store, "half", keys)
	file := func(name string) string { return filepath.Join(dir, "default/demo", name) }
	expect.NoError(t, os.Truncate(file("short.db"), 4096))
	expect.NoError(t, os.Remove(file("half.json")))
	f, err := os.OpenFile(file("damaged.db"), os.O_WRONLY, 0)
	expect.NoError(t, err)
	_, err = f.WriteAt([]byte("garbage"), 5000)
	expect.NoError(t, errors.Join(err, f.Close()))
	assets, err := testenv.Assets()
	expect.NoError(t, err)
	for what, c := range map[string]struct {
		name, sum string
		has       map[string]string
		other     bool
		want      string
	}{
		"missing backup":                  {name: "nothing", has: keys, want: "there is no backup"},
		"missing manifest":                {name: "half", has: keys, want: "there is no backup"},
		"incomplete snapshot":             {name: "short", has: keys, want: "is incomplete: expected"},
		"damaged snapshot":                {name: "damaged", has: keys, want: "checksum"},
		"another checksum":                {name: "good", sum: "0000", has: keys, want: "a different one"},
		"another encryption key":          {name: "good", has: map[string]string{"encryption": "x", "ca": "two"}, want: "it needs the key encryption with the SHA-256 one, and found x"},
		"another encryption key, allowed": {name: "good", has: map[string]string{"encryption": "x", "ca": "two"}, other: true, want: "it needs the key encryption"},
		"missing authority":               {name: "good", has: map[string]string{"encryption": "one"}, want: "it needs the key ca with the SHA-256 two, and this cluster has none"},
		"another authority, allowed":      {name: "good", has: map[string]string{"encryption": "one", "ca": "x"}, other: true},
	} {
		t.Run(what, func(t *testing.T) {
			data := filepath.Join(t.TempDir(), "data")
			err := Restoring{
				Restore: nodeconfig.Restore{Name: c.name, Store: config, SHA256: c.sum, Keys: c.has, OtherAuthorities: c.other},
				Etcdutl: filepath.Join(assets, "etcdutl"), Member: "new", PeerURL: "http://127.0.0.1:1", Cluster: "demo", DataDir: data, Log: slog.New(slog.DiscardHandler),
			}.Run(t.Context())
			_, made := os.Stat(filepath.Join(data, "member"))
			if c.want == "" {
				expect.NoError(t, errors.Join(err, made))
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) || made == nil {
				t.Errorf("got %v, data %v, want %q", err, made, c.want)
			}
		})
	}
}

// TestManifest: the manifest describes a backup for people and other programs.
func TestManifest(t *testing.T) {
	data, err := json.Marshal(Manifest{Name: "etcd-1", Folder: "default/demo", SHA256: "abc", Keys: map[string]string{"ca": "x"}})
	expect.NoError(t, err)
	for _, want := range []string{`"name":"etcd-1"`, `"folder":"default/demo"`, `"sha256":"abc"`, `"keys":{"ca":"x"}`} {
		if !strings.Contains(string(data), want) {
			t.Errorf("no %s in %s", want, data)
		}
	}
}

// slowMount is a file whose cache takes all bytes at once. Its sync lasts until the end of ctx from the second one on.
type slowMount struct {
	end            func()
	written, syncs int
}

func (m *slowMount) Write(p []byte) (int, error) {
	m.written += len(p)
	return len(p), nil
}

func (m *slowMount) Sync() error {
	if m.syncs++; m.syncs == 2 {
		m.end()
	}
	return nil
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// A copy to a mount that is slower than its cache ends with its context: at most one block is on the way then.
func TestCopyEndsBetweenSyncs(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	m := &slowMount{end: end}
	err := copySynced(ctx, m, io.LimitReader(zeros{}, 5*syncedBlock))
	if !errors.Is(err, context.Canceled) || m.written != 2*syncedBlock || m.syncs != 2 {
		t.Errorf("%d bytes and %d syncs: %v", m.written, m.syncs, err)
	}
	m = &slowMount{end: func() {}}
	if err := copySynced(t.Context(), m, io.LimitReader(zeros{}, 2*syncedBlock+1)); err != nil || m.written != 2*syncedBlock+1 || m.syncs != 3 {
		t.Errorf("a whole copy: %d bytes and %d syncs: %v", m.written, m.syncs, err)
	}
}

// A copy to or from a directory ends with its limit, and leaves no part.
func TestDirectoryEndsWithContext(t *testing.T) {
	d := directory{root: t.TempDir(), folder: "demo"}
	from := filepath.Join(t.TempDir(), "db")
	if err := os.WriteFile(from, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Put(ended, "etcd-1", from); !errors.Is(err, context.Canceled) {
		t.Errorf("put: %v", err)
	}
	if entries, err := os.ReadDir(filepath.Join(d.root, d.folder)); err != nil || len(entries) > 0 {
		t.Errorf("left %v, %v", entries, err)
	}
	if err := d.Put(t.Context(), "etcd-1", from); err != nil {
		t.Fatal(err)
	}
	if err := d.Get(ended, "etcd-1", filepath.Join(t.TempDir(), "db")); !errors.Is(err, context.Canceled) {
		t.Errorf("get: %v", err)
	}
}
