package embedded

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/embedded/archive"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/version"
)

func testKubernetes(t *testing.T) (assets, version string) {
	t.Helper()
	assets = filepath.Join(testenv.Root(), "bin")
	version, err := newestKubernetes(Assets{assets})
	expect.NoError(t, err)
	return assets, version
}

// plain is a plane that runs only etcd.
type plain struct {
	t      *testing.T
	layout Layout
	state  State
	etcd   *process
	// etcdArgs are additional arguments of etcd.
	etcdArgs []string
}

// newRoot returns a folder that the system user can enter.
func newRoot(t *testing.T) string {
	t.Helper()
	parent := t.TempDir()
	expect.NoError(t, errors.Join(os.Chmod(parent, 0o755), os.Chmod(filepath.Dir(parent), 0o755)))
	return filepath.Join(parent, "root")
}

func newPlain(t *testing.T) *plain {
	t.Helper()
	p := &plain{t: t, layout: Layout{Root: newRoot(t)}}
	assets, version := testKubernetes(t)
	p.state = State{ID: "abcd1234", Assets: assets, Settings: Settings{KubernetesVersion: version, Hosts: []string{"local"}}}
	var release func()
	var err error
	p.state.PortBase, release, err = takePorts(t.Context(), 0, claimPorts, componentPortFree)
	expect.NoError(t, err)
	t.Cleanup(release)
	lock, err := lockRoot(t.Context(), p.layout, ignored)
	expect.NoError(t, err)
	expect.NoError(t, lock.Close())
	expect.NoError(t, p.state.save(p.layout))
	p.start()
	return p
}

// start creates missing files, as the daemon does, and runs etcd.
func (p *plain) start() {
	p.t.Helper()
	owner, err := ensureUser()
	expect.NoError(p.t, err)
	expect.NoError(p.t, endRestore(p.layout))
	p.state, err = LoadState(p.layout)
	expect.NoError(p.t, err)
	expect.NoError(p.t, errors.Join(ensurePKI(p.layout, p.state, owner, time.Now()), stageOne(staged(p.state)["etcd"], filepath.Join(p.layout.Bin(), "etcd"))))
	database := etcdComponent(p.layout, p.state)
	database.args = append(database.args, p.etcdArgs...)
	p.etcd = newProcess(database, p.layout.Log(etcd), owner, newSpawner(), func(ProcessStatus) {})
	p.etcd.begin()
	p.t.Cleanup(p.etcd.Stop)
	ctx, cancel := context.WithTimeout(p.t.Context(), expect.Patience)
	defer cancel()
	if err := p.etcd.waitReady(ctx); err != nil {
		log, _ := os.ReadFile(p.layout.Log(etcd))
		p.t.Fatalf("%v: %s", err, log)
	}
}

func (p *plain) do(use func(context.Context, *clientv3.Client)) {
	p.t.Helper()
	config, err := etcdTLS(p.layout)
	expect.NoError(p.t, err)
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{loopback("https", p.state.port(portEtcd))}, TLS: config, Logger: zap.NewNop()})
	expect.NoError(p.t, err)
	defer func() { expect.NoError(p.t, c.Close()) }()
	ctx, cancel := context.WithTimeout(p.t.Context(), expect.Patience)
	defer cancel()
	use(ctx, c)
}

func (p *plain) put(key, value string) {
	p.t.Helper()
	p.do(func(ctx context.Context, c *clientv3.Client) {
		_, err := c.Put(ctx, key, value)
		expect.NoError(p.t, err)
	})
}

func (p *plain) get(key string) (value string) {
	p.t.Helper()
	p.do(func(ctx context.Context, c *clientv3.Client) {
		answer, err := c.Get(ctx, key)
		expect.NoError(p.t, err)
		if len(answer.Kvs) > 0 {
			value = string(answer.Kvs[0].Value)
		}
	})
	return value
}

// content returns the content of all files below a folder.
func content(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	expect.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		out[strings.TrimPrefix(path, dir)] = string(data)
		return err
	}))
	return out
}

func toFile(path string) BackupTarget { return BackupTarget{To: path, Exact: true} }

// A running plane is backed up, lost, and restored in another folder.
func TestBackupAndRestore(t *testing.T) {
	p := newPlain(t)
	p.put("/registry/a", "before")
	dir := t.TempDir()
	foreign := filepath.Join(dir, "capstan-abcd1234x-20260101-000000.tar.gz") // The id of another plane has the same prefix.
	expect.NoError(t, os.WriteFile(foreign, nil, 0o600))
	first, err := MakeBackup(t.Context(), p.layout, BackupTarget{To: dir, Keep: 1})
	expect.NoError(t, err)
	time.Sleep(time.Until(first.Time.Add(time.Second))) // File names contain the time in seconds.
	second, err := MakeBackup(t.Context(), p.layout, BackupTarget{To: dir, Keep: 1})
	expect.NoError(t, err)
	p.put("/registry/a", "after")
	if names := content(t, dir); len(names) != 2 || len(second.Removed) != 1 || !strings.HasSuffix(first.Location, second.Removed[0]) {
		t.Errorf("want one backup and that of the other plane to be kept: %v, removed %v", len(names), second.Removed)
	}
	if info, err := os.Stat(second.Location); err != nil || info.Mode().Perm() != 0o600 || info.Size() != second.SizeBytes {
		t.Errorf("the backup: %v, %v", info, err)
	}
	if _, err := os.Stat(p.layout.backupScratch()); err == nil {
		t.Error("a complete backup leaves files in the root")
	}
	if atomicfile.Exists(p.layout.interrupted(BackupTarget{To: dir})) {
		t.Error("a complete backup counts as interrupted")
	}
	checkArchive(t, second.Location, p)
	if _, err := MakeBackup(t.Context(), p.layout, toFile(second.Location)); err == nil || !strings.Contains(err.Error(), "choose another name") {
		t.Errorf("over an existing file: %v", err)
	}
	if _, err := MakeBackup(t.Context(), p.layout, BackupTarget{To: dir + "/missing"}); err == nil || !strings.Contains(err.Error(), "create it, or mount it") {
		t.Errorf("to a missing folder: %v", err)
	}
	p.etcd.Stop()
	if _, err := MakeBackup(t.Context(), p.layout, BackupTarget{To: dir}); err == nil || !strings.Contains(err.Error(), "start it with `capstan up`") {
		t.Errorf("of a stopped plane: %v", err)
	}
	keys := content(t, p.layout.PKI())
	expect.NoError(t, os.RemoveAll(p.layout.Root))
	restoreElsewhere(t, p, second.Location, keys)
}

// checkArchive: a backup contains only files that cannot be created again.
func checkArchive(t *testing.T, path string, p *plain) {
	t.Helper()
	m, err := archive.Read(path)
	expect.NoError(t, err)
	var names []string
	for _, f := range m.Files {
		names = append(names, f.Name)
	}
	slices.Sort(names)
	want := []string{
		"etcd.db", "pki/ca.crt", "pki/ca.key", "pki/etcd-ca.crt", "pki/etcd-ca.key", "pki/front-proxy-ca.crt", "pki/front-proxy-ca.key",
		"pki/kube-apiserver/encryption.yaml", "pki/kube-apiserver/service-account.key", "state.json",
	}
	if !slices.Equal(names, want) || m.Installation != p.state.ID || m.KubernetesVersion != p.state.KubernetesVersion || m.EtcdVersion == "" || m.Revision == 0 || m.CapstanVersion != version.Version {
		t.Errorf("the manifest is %+v", m)
	}
}

func restoreElsewhere(t *testing.T, p *plain, location string, keys map[string]string) {
	t.Helper()
	there := &plain{t: t, layout: Layout{Root: newRoot(t)}}
	o := RestoreOptions{Options: Options{Root: there.layout.Root, Assets: p.state.Assets}, Archive: toFile(location)}
	for range 2 { // The second call is that of a client that has not seen the result of the first one.
		restored, err := Restore(t.Context(), o)
		expect.NoError(t, err)
		if restored.Kept != "" || restored.Installation != p.state.ID || restored.PlaneKubernetesVersion != p.state.KubernetesVersion {
			t.Errorf("restored %+v", restored)
		}
	}
	there.start()
	if value := there.get("/registry/a"); value != "before" {
		t.Errorf("etcd has %q", value)
	}
	have := content(t, there.layout.PKI())
	for _, path := range keyFiles(Layout{Root: "/"}) {
		if name := strings.TrimPrefix(path, "/pki"); have[name] == "" || have[name] != keys[name] {
			t.Errorf("%s is different", name)
		}
	}
	if there.state.ID != p.state.ID || !slices.Equal(there.state.Hosts, p.state.Hosts) {
		t.Errorf("the state is %+v", there.state)
	}
	there.put("/registry/a", "later")
	lock, err := lockPlane(there.layout)
	expect.NoError(t, err)
	if _, err := Restore(t.Context(), o); !errors.Is(err, errRunning) || !strings.Contains(err.Error(), "capstan down --keep-state") {
		t.Errorf("over a running plane: %v", err)
	}
	expect.NoError(t, lock.Close())
	there.etcd.Stop()
	if _, err := Restore(t.Context(), o); err == nil || !strings.Contains(err.Error(), "--replace") {
		t.Errorf("over a stopped plane: %v", err)
	}
	o.Replace = true
	restored, err := Restore(t.Context(), o)
	expect.NoError(t, err)
	if info, err := os.Stat(filepath.Join(restored.Kept, "etcd", "member")); err != nil || !info.IsDir() {
		t.Errorf("the previous content: %v", err)
	}
	there.start()
	if value := there.get("/registry/a"); value != "before" {
		t.Errorf("after the replacement, etcd has %q", value)
	}
}

// Backups are written to a bucket and restored from it. Backups of other planes stay in the bucket. No error contains a
// secret.
func TestBackupToS3(t *testing.T) {
	p := newPlain(t)
	p.put("/registry/a", "before")
	endpoint := "http://" + testenv.S3Server(t, "someone", "knows-it-well", "us-east-1")
	file := filepath.Join(t.TempDir(), "credentials")
	write := func(secret string) {
		expect.NoError(t, os.WriteFile(file, []byte("[default]\naws_access_key_id = someone\naws_secret_access_key = "+secret+"\n"), 0o600))
	}
	write("knows-it-well")
	s3 := S3{Endpoint: endpoint, Region: "us-east-1", CredentialsFile: file}
	own := BackupTarget{To: "s3://" + testenv.S3Bucket + "/planes/a", Keep: 1, S3: s3}
	near := BackupTarget{To: "s3://" + testenv.S3Bucket + "/planes/a-2", Keep: 1, S3: s3}
	other, err := MakeBackup(t.Context(), p.layout, near)
	expect.NoError(t, err)
	_, err = MakeBackup(t.Context(), p.layout, own)
	expect.NoError(t, err)
	time.Sleep(time.Until(other.Time.Add(2 * time.Second))) // File names contain the time in seconds.
	last, err := MakeBackup(t.Context(), p.layout, own)
	expect.NoError(t, err)
	for target, want := range map[BackupTarget]string{own: last.Location, near: other.Location} {
		store, err := target.open()
		expect.NoError(t, err)
		if names, err := store.List(t.Context()); err != nil || len(names) != 1 || store.Location(names[0]) != want {
			t.Errorf("%s has %v, %v, want %s", target.To, names, err, want)
		}
	}
	write("guesses-badly")
	if _, err := MakeBackup(t.Context(), p.layout, own); err == nil || strings.Contains(err.Error(), "guesses-badly") {
		t.Errorf("with a wrong secret: %v", err)
	}
	write("knows-it-well")
	p.etcd.Stop()
	there := &plain{t: t, layout: Layout{Root: newRoot(t)}}
	from := BackupTarget{To: own.To + "/" + filepath.Base(last.Location), Exact: true, S3: s3}
	_, err = Restore(t.Context(), RestoreOptions{Options: Options{Root: there.layout.Root, Assets: p.state.Assets}, Archive: from})
	expect.NoError(t, err)
	there.start()
	if value := there.get("/registry/a"); value != "before" {
		t.Errorf("etcd has %q", value)
	}
	from.To += "x"
	if _, err := Restore(t.Context(), RestoreOptions{Options: Options{Root: newRoot(t), Assets: p.state.Assets}, Archive: from}); err == nil || !strings.Contains(err.Error(), "does not exist") {
		t.Errorf("of a key that does not exist: %v", err)
	}
}

// A damaged or unusable backup does not change the plane.
func TestRestoreRefused(t *testing.T) {
	p := newPlain(t)
	whole := filepath.Join(t.TempDir(), "whole")
	_, err := MakeBackup(t.Context(), p.layout, toFile(whole))
	expect.NoError(t, err)
	p.etcd.Stop()
	data, err := os.ReadFile(whole)
	expect.NoError(t, err)
	damaged := filepath.Join(t.TempDir(), "damaged")
	data[len(data)*2/3] ^= 1
	expect.NoError(t, os.WriteFile(damaged, data, 0o600))

	repack := func(change func(dir string, m *archive.Manifest) []string) string {
		dir := t.TempDir()
		m, err := archive.Extract(whole, dir)
		expect.NoError(t, err)
		path := filepath.Join(t.TempDir(), "archive")
		expect.NoError(t, archive.Write(path, m, dir, change(dir, &m)))
		return path
	}
	repackWith := func(change func(dir string, m *archive.Manifest)) string {
		dir := t.TempDir()
		m, err := archive.Extract(whole, dir)
		expect.NoError(t, err)
		var names []string
		for _, f := range m.Files {
			names = append(names, f.Name)
		}
		change(dir, &m)
		path := filepath.Join(t.TempDir(), "archive")
		expect.NoError(t, archive.Write(path, m, dir, names))
		return path
	}
	before := content(t, p.layout.Root)
	for name, test := range map[string]struct{ path, want string }{
		"damaged":          {damaged, "expected a complete backup"},
		"no such file":     {whole + "x", "no such file"},
		"without a key":    {repack(func(string, *archive.Manifest) []string { return []string{snapshotName, stateName} }), "expected a backup with all keys"},
		"newer Capstan":    {repackWith(func(_ string, m *archive.Manifest) { m.CapstanVersion = "v99.0.0" }), "expected a backup of Capstan"},
		"newer Kubernetes": {repackWith(func(_ string, m *archive.Manifest) { m.KubernetesVersion = "v1.99.0" }), "expected Kubernetes v1.99.0"},
		"damaged snapshot": {repackWith(func(dir string, _ *archive.Manifest) {
			file := filepath.Join(dir, snapshotName)
			snapshot, err := os.ReadFile(file)
			expect.NoError(t, err)
			snapshot[len(snapshot)/2] ^= 1
			expect.NoError(t, os.WriteFile(file, snapshot, 0o600))
		}), "etcdutl snapshot restore"},
	} {
		_, err := Restore(t.Context(), RestoreOptions{Options: Options{Root: p.layout.Root, Assets: p.state.Assets}, Archive: toFile(test.path), Replace: true})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
		after := content(t, p.layout.Root)
		delete(after, "/plane.lock")
		for path := range before {
			if after[path] != before[path] {
				t.Errorf("%s: %s has changed", name, path)
			}
		}
		if len(after) != len(before) {
			t.Errorf("%s: %d files, then %d", name, len(before), len(after))
		}
	}
}

// TestStateOfBackup: a restore takes the Kubernetes version by the rules of `capstan up`, and keeps the hosts of the box that are newer than
// the backup.
func TestStateOfBackup(t *testing.T) {
	for name, test := range map[string]struct {
		installed        []string
		workersOnly      string // a version without etcd
		have             []string
		folders, hosts   []string
		version, refusal string
	}{
		"as in the backup":        {[]string{"v1.35.4", "v1.36.3"}, "", []string{"local"}, nil, []string{"local"}, "v1.35.4", ""},
		"the next minor version":  {[]string{"v1.36.3", "v1.37.1"}, "", []string{"local"}, []string{"local"}, []string{"local"}, "v1.36.3", ""},
		"without etcd":            {[]string{"v1.35.9"}, "v1.35.4", nil, nil, nil, "v1.35.9", ""},
		"only versions too new":   {[]string{"v1.37.1"}, "", nil, nil, nil, "", "at most the next minor version"},
		"a host after the backup": {[]string{"v1.35.4"}, "", []string{"local"}, []string{"local", "local-2"}, []string{"local", "local-2"}, "v1.35.4", ""},
		"fewer hosts on the box":  {[]string{"v1.35.4"}, "", []string{"local", "local-2", "local-3"}, []string{"local"}, []string{"local", "local-2", "local-3"}, "v1.35.4", ""},
	} {
		t.Run(name, func(t *testing.T) {
			here, from, to := Layout{Root: t.TempDir()}, Layout{Root: t.TempDir()}, Layout{Root: t.TempDir()}
			assets := testAssets(t, test.installed...)
			if test.workersOnly != "" {
				expect.NoError(t, os.MkdirAll(filepath.Join(assets, "kubernetes", test.workersOnly), 0o755))
			}
			for _, host := range test.folders {
				expect.NoError(t, os.MkdirAll(here.HostRoot(host), 0o711))
			}
			expect.NoError(t, State{ID: "abcd1234", StoppedUnit: "capstan.service", Settings: Settings{KubernetesVersion: "v1.35.4", Hosts: test.have}}.save(from))
			err := unpackState(here, from, to, assets, archive.Manifest{KubernetesVersion: "v1.35.4"})
			if test.refusal != "" {
				if err == nil || !strings.Contains(err.Error(), test.refusal) {
					t.Errorf("got %v", err)
				}
				return
			}
			expect.NoError(t, err)
			restored, err := to.restored(archive.Manifest{})
			expect.NoError(t, err)
			state, err := LoadState(to)
			expect.NoError(t, err)
			if state.StoppedUnit != "" {
				t.Errorf("a unit of the other box: %s", state.StoppedUnit)
			}
			if state.KubernetesVersion != test.version || restored.PlaneKubernetesVersion != test.version || !slices.Equal(state.Hosts, test.hosts) {
				t.Errorf("got %s, %s and the hosts %v, want %s and %v", state.KubernetesVersion, restored.PlaneKubernetesVersion, state.Hosts, test.version, test.hosts)
			}
		})
	}
}

// restorable is the manifest of a complete backup.
func restorable() archive.Manifest {
	m := archive.Manifest{KubernetesVersion: "v1.35.4", CapstanVersion: version.Version, Files: []archive.File{{Name: snapshotName}, {Name: stateName}}}
	for _, key := range keyFiles(Layout{}) {
		m.Files = append(m.Files, archive.File{Name: key})
	}
	return m
}

// TestMayReplace: a restore moves the existing files away, which is impossible for a mount point and useless for a link. It is refused before
// it changes anything.
func TestMayReplace(t *testing.T) {
	assets := testAssets(t, "v1.35.4")
	m := restorable()
	for name, test := range map[string]struct {
		make func(path string) error
		want string
	}{
		"nothing": {func(string) error { return nil }, ""},
		"folder":  {func(path string) error { return os.Mkdir(path, 0o700) }, ""},
		"link":    {func(path string) error { return os.Symlink(t.TempDir(), path) }, "found a symbolic link "},
		"mount": {func(path string) error {
			t.Cleanup(func() { expect.NoError(t, unix.Unmount(path, unix.MNT_DETACH)) })
			return errors.Join(os.Mkdir(path, 0o700), unix.Mount("tmpfs", path, "tmpfs", 0, ""))
		}, "found a mount point "},
	} {
		for _, part := range []string{pkiName, "etcd"} {
			l := Layout{Root: t.TempDir()}
			path := filepath.Join(l.Root, part)
			expect.NoError(t, test.make(path))
			err := mayRestore(l, assets, m, true)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want+path) {
				t.Errorf("%s as %s: %v", part, name, err)
			}
		}
	}
}

// A restore beside machines of a newer release is refused before it changes anything: capstand of this release would not start with them.
func TestRestoreBesideNewerMachines(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	for writer, refused := range map[string]bool{"": false, version.Version: false, "v99.0.0": true} {
		folder := l.HostRoot(hostName(1))
		expect.NoError(t, errors.Join(os.MkdirAll(folder, 0o700), os.WriteFile(filepath.Join(folder, version.HostFile), []byte(writer+"\n"), 0o644)))
		for _, replace := range []bool{false, true} {
			err := mayRestore(l, testAssets(t, "v1.35.4"), restorable(), replace)
			if refused != (err != nil) || refused && !strings.Contains(err.Error(), "expected Capstan v99.0 or newer for the machines in "+folder) {
				t.Errorf("machines of %q, replace %v: %v", writer, replace, err)
			}
		}
	}
}

// The next start completes a restore that was killed between two renames.
func TestFinishRestore(t *testing.T) {
	m := archive.Manifest{Installation: "x", Time: time.Unix(0, 0), Files: []archive.File{{Name: "a"}}}
	for steps := range 2*len(restoredParts) + 1 {
		l := Layout{Root: t.TempDir()}
		expect.NoError(t, os.MkdirAll(l.restoreReady(), 0o700))
		write := func(dir, what string) {
			expect.NoError(t, os.MkdirAll(dir, 0o700))
			for _, part := range restoredParts {
				expect.NoError(t, os.WriteFile(filepath.Join(dir, part), []byte(what), 0o600))
			}
		}
		write(l.Root, "old")
		write(l.restoreReady(), "new")
		expect.NoError(t, State{}.save(Layout{Root: t.TempDir()}))
		data := []byte(`{"installation":"x","time":"1970-01-01T00:00:00Z","files":[{"name":"a"}]}`)
		expect.NoError(t, os.WriteFile(filepath.Join(l.restoreReady(), restoreManifest), data, 0o600))
		expect.NoError(t, os.MkdirAll(l.before(m), 0o700))
		// The state after a process was killed after the given number of renames.
		for n := range steps {
			part := restoredParts[n/2]
			from, to := filepath.Join(l.Root, part), filepath.Join(l.before(m), part)
			if n%2 == 1 {
				from, to = filepath.Join(l.restoreReady(), part), filepath.Join(l.Root, part)
			}
			expect.NoError(t, os.Rename(from, to))
		}
		if done, err := finishSame(l, m); !done || err != nil {
			t.Errorf("after %d renames: %v, %v", steps, done, err)
		}
		for dir, want := range map[string]string{l.Root: "new", l.before(m): "old"} {
			for _, part := range restoredParts {
				if have, _ := os.ReadFile(filepath.Join(dir, part)); string(have) != want {
					t.Errorf("after %d renames: %s in %s is %q", steps, part, dir, have)
				}
			}
		}
		expect.NoError(t, endRestore(l))
		if _, err := os.Stat(l.restoreReady()); err == nil {
			t.Error("the folder of the restore remains after the start of the plane")
		}
	}
}

// killed runs this test binary as another process and kills it as soon as when returns true. It returns false if the
// process had ended before.
func killed(t *testing.T, test string, when func() bool, env ...string) bool {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^"+test+"$")
	cmd.Env = append(os.Environ(), env...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	expect.NoError(t, cmd.Start())
	ended := make(chan struct{})
	killer := make(chan struct{})
	go func() {
		defer close(killer)
		for !when() {
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
		_ = cmd.Process.Kill()
	}()
	err := cmd.Wait()
	close(ended)
	<-killer
	if err != nil && cmd.ProcessState.Exited() {
		t.Fatalf("the other process failed before it was killed: %s", out.String())
	}
	return err != nil
}

// after is true once the given time has passed.
func after(pause time.Duration) func() bool {
	end := time.Now().Add(pause)
	return func() bool { return time.Now().After(end) }
}

const (
	childRoot    = "CAPSTAN_TEST_ROOT"
	childArchive = "CAPSTAN_TEST_ARCHIVE"
)

// A backup that is killed at any time leaves no incomplete archive under its name. The next backup removes its temporary
// files.
func TestKilledBackup(t *testing.T) {
	if root := os.Getenv(childRoot); root != "" { // This part runs in the process that is killed.
		_, err := MakeBackup(t.Context(), Layout{Root: root}, BackupTarget{To: os.Getenv(childArchive)})
		expect.NoError(t, err)
		return
	}
	p := newPlain(t)
	for n := range 32 { // enough data for the copy to take some time
		value := make([]byte, 1<<20)
		_, _ = rand.Read(value)
		p.put("/registry/"+strconv.Itoa(n), string(value))
	}
	dir := t.TempDir()
	kills := 0
	for pause := 10 * time.Millisecond; killed(t, "TestKilledBackup", after(pause), childRoot+"="+p.layout.Root, childArchive+"="+dir); pause = pause*5/4 + 1 {
		kills++
		checkComplete(t, dir)
	}
	if kills < 5 {
		t.Errorf("only %d kills", kills)
	}
	// The kill is during the copy to the folder. On a slow box the copy may end before the kill: then the next copy is killed.
	for tries := 1; ; tries++ {
		complete := content(t, dir)
		begun := func() bool { entries, _ := os.ReadDir(dir); return len(entries) > len(complete) }
		if killed(t, "TestKilledBackup", begun, childRoot+"="+p.layout.Root, childArchive+"="+dir) {
			break
		}
		if tries == 10 {
			t.Fatalf("%d backups were complete before they were killed: the test proves nothing", tries)
		}
	}
	checkComplete(t, dir)
	_, err := MakeBackup(t.Context(), p.layout, BackupTarget{To: dir})
	expect.NoError(t, err)
	checkComplete(t, dir)
	entries, err := os.ReadDir(dir)
	expect.NoError(t, err)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			t.Errorf("%s remains", e.Name())
		}
	}
}

// TestClearInterrupted: a backup to another store does not forget the files of an interrupted one. The next backup to the same folder removes
// them, and nothing if the backup was complete.
func TestClearInterrupted(t *testing.T) {
	l, dir := Layout{Root: t.TempDir()}, t.TempDir()
	part, complete := filepath.Join(dir, ".killed.part"), filepath.Join(dir, "complete")
	expect.NoError(t, errors.Join(os.WriteFile(part, nil, 0o600), os.WriteFile(complete, nil, 0o600)))
	interrupt := func(target BackupTarget, name string) {
		t.Helper()
		expect.NoError(t, atomicfile.WriteJSON(l.interrupted(target), interrupted{name}, 0o600))
	}
	clean := func(target BackupTarget) {
		t.Helper()
		store, err := target.open()
		expect.NoError(t, err)
		expect.NoError(t, clearInterrupted(t.Context(), l, store, target))
	}
	same := BackupTarget{To: dir}
	interrupt(same, "killed")
	clean(BackupTarget{To: t.TempDir()})
	if !atomicfile.Exists(part) || !atomicfile.Exists(l.interrupted(same)) {
		t.Error("a backup to another folder forgets the interrupted one")
	}
	clean(toFile(filepath.Join(dir, "other")))
	if atomicfile.Exists(part) || atomicfile.Exists(l.interrupted(same)) {
		t.Error("a backup to the same folder leaves the files of the interrupted one")
	}
	interrupt(toFile(complete), "complete")
	clean(same)
	if !atomicfile.Exists(complete) || atomicfile.Exists(l.interrupted(same)) {
		t.Error("a complete backup was removed")
	}
}

// Several backups within one second are separate files.
func TestBackupsOfOneSecond(t *testing.T) {
	p := newPlain(t)
	dir := t.TempDir()
	for want := 1; want <= 5; want++ {
		made, err := MakeBackup(t.Context(), p.layout, BackupTarget{To: dir})
		expect.NoError(t, err)
		if files := content(t, dir); len(files) != want {
			t.Fatalf("%d backups, the last one %s, are %d files", want, made.Location, len(files))
		}
		checkComplete(t, dir)
	}
}

// TestRemoveOld: the newest backups stay, and the one that was just made is one of them.
func TestRemoveOld(t *testing.T) {
	const other = "capstan-zzzzzzzz-20200101-000000.tar.gz"
	at := func(year int) string { return archiveName("abcd1234", time.Date(year, 1, 1, 0, 0, 0, 0, time.UTC)) }
	for name, test := range map[string]struct {
		have    []string
		keep    int
		made    string
		removed []string
	}{
		"few":                         {[]string{at(2025), at(2026)}, 2, at(2026), nil},
		"the oldest":                  {[]string{at(2023), at(2024), at(2025), at(2026)}, 2, at(2026), []string{at(2023), at(2024)}},
		"one":                         {[]string{at(2025), at(2026)}, 1, at(2026), []string{at(2025)}},
		"later times of a fast clock": {[]string{at(2025), at(2026), at(2040), at(2041)}, 2, at(2026), []string{at(2025), at(2040)}},
		"a later time, and one stays": {[]string{at(2026), at(2040)}, 1, at(2026), []string{at(2040)}},
	} {
		dir := t.TempDir()
		for _, file := range append(test.have, other) {
			expect.NoError(t, os.WriteFile(filepath.Join(dir, file), nil, 0o600))
		}
		store, err := BackupTarget{To: dir}.open()
		expect.NoError(t, err)
		removed, err := removeOld(t.Context(), store, "abcd1234", test.keep, test.made)
		if err != nil || !slices.Equal(removed, test.removed) {
			t.Errorf("%s: removed %v, want %v: %v", name, removed, test.removed, err)
		}
	}
}

// checkComplete checks that each backup in a folder is complete.
func checkComplete(t *testing.T, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "capstan-*"))
	expect.NoError(t, err)
	for _, file := range files {
		scratch := t.TempDir()
		if _, err := archive.Extract(file, scratch); err != nil {
			t.Error(err)
		}
		expect.NoError(t, os.RemoveAll(scratch))
	}
}

// A restore that was killed at any time can be repeated: it either has had no effect, or is complete.
func TestKilledRestore(t *testing.T) {
	if root := os.Getenv(childRoot); root != "" { // This part runs in the process that is killed.
		_, err := Restore(t.Context(), RestoreOptions{Options: Options{Root: root, Assets: filepath.Join(testenv.Root(), "bin")}, Archive: toFile(os.Getenv(childArchive))})
		expect.NoError(t, err)
		return
	}
	p := newPlain(t)
	p.put("/registry/a", "before")
	file := filepath.Join(t.TempDir(), "archive")
	_, err := MakeBackup(t.Context(), p.layout, toFile(file))
	expect.NoError(t, err)
	p.etcd.Stop()
	there := &plain{t: t, layout: Layout{Root: newRoot(t)}}
	kills := 0
	for pause := 10 * time.Millisecond; killed(t, "TestKilledRestore", after(pause), childRoot+"="+there.layout.Root, childArchive+"="+file); pause = pause*5/4 + 1 {
		kills++
		_, state := os.Stat(there.layout.State())
		_, ready := os.Stat(there.layout.restoreReady())
		if state == nil && ready != nil {
			t.Error("the state exists before the restore is complete")
		}
	}
	if kills < 5 {
		t.Errorf("only %d kills", kills)
	}
	there.start()
	if value := there.get("/registry/a"); value != "before" {
		t.Errorf("etcd has %q", value)
	}
}

// TestRestoreKeepsItsLock: etcdutl outlives a killed restore, and keeps the lock of the commands. Otherwise the next restore would remove the
// folder while etcdutl writes to it.
func TestRestoreKeepsItsLock(t *testing.T) {
	l, from, to := Layout{Root: newRoot(t)}, Layout{Root: t.TempDir()}, Layout{Root: t.TempDir()}
	assets, seen := testAssets(t, "v1.36.3"), filepath.Join(from.Root, "seen")
	lock, err := lockRoot(t.Context(), l, ignored)
	expect.NoError(t, err)
	defer lock.Close()
	script := fmt.Sprintf("#!/bin/sh\nreadlink /proc/self/fd/3 >%s\nmkdir %s\n", seen, to.Etcd())
	expect.NoError(t, errors.Join(State{}.save(from), os.WriteFile(filepath.Join(assets, "kubernetes/v1.36.3/etcdutl"), []byte(script), 0o755)))
	manifest := archive.Manifest{KubernetesVersion: "v1.36.3"}
	expect.NoError(t, unpackData(t.Context(), from, to, assets, manifest, user{os.Getuid(), os.Getgid()}, lock))
	if file, err := os.ReadFile(seen); strings.TrimSpace(string(file)) != l.commandLock() {
		t.Errorf("etcdutl has the file %q, %v", file, err)
	}
}

func TestScheduleOf(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	dir := t.TempDir()
	every := func(d time.Duration) metav1.Duration { return metav1.Duration{Duration: d} }
	have := &BackupSchedule{BackupTarget: BackupTarget{To: dir, Keep: 3}, Every: every(time.Hour)}
	ask := func(change func(*BackupSchedule)) BackupSchedule {
		s := BackupSchedule{}
		change(&s)
		return s
	}
	for name, test := range map[string]struct {
		have  *BackupSchedule
		asked BackupSchedule
		want  *BackupSchedule
		fails string
	}{
		"no flags, no schedule": {},
		"no flags":              {have: have, want: have},
		"ended":                 {have: have, asked: ask(func(s *BackupSchedule) { s.To = "none" })},
		"new schedule": {
			asked: ask(func(s *BackupSchedule) { s.To, s.Every = dir, every(6*time.Hour) }),
			want:  &BackupSchedule{BackupTarget: BackupTarget{To: dir, Keep: DefaultBackupKeep}, Every: every(6 * time.Hour)},
		},
		"more backups are kept": {
			have: have, asked: ask(func(s *BackupSchedule) { s.Keep = 5 }),
			want: &BackupSchedule{BackupTarget: BackupTarget{To: dir, Keep: 5}, Every: every(time.Hour)},
		},
		"no target":           {asked: ask(func(s *BackupSchedule) { s.Every = every(time.Hour) }), fails: "--backup-to"},
		"no interval":         {asked: ask(func(s *BackupSchedule) { s.To = dir }), fails: "--backup-every"},
		"interval too short":  {asked: ask(func(s *BackupSchedule) { s.To, s.Every = dir, every(time.Second) }), fails: "at least 1m0s"},
		"negative":            {have: have, asked: ask(func(s *BackupSchedule) { s.Keep = -1 }), fails: "expected a number"},
		"folder in the root":  {have: have, asked: ask(func(s *BackupSchedule) { s.To = l.Root + "/backups" }), fails: "outside of"},
		"no such folder":      {have: have, asked: ask(func(s *BackupSchedule) { s.To = dir + "/no" }), fails: "create it, or mount it"},
		"no bucket":           {have: have, asked: ask(func(s *BackupSchedule) { s.To = "s3://" }), fails: "s3://BUCKET/PREFIX"},
		"unsupported service": {have: have, asked: ask(func(s *BackupSchedule) { s.To = "gs://bucket" }), fails: "absolute folder or s3://"},
		"key in the URL":      {have: have, asked: ask(func(s *BackupSchedule) { s.To, s.S3.Endpoint = "s3://b", "https://key:secret@host" }), fails: "http(s)://HOST[:PORT]"},
		"no credentials":      {have: have, asked: ask(func(s *BackupSchedule) { s.To = "s3://bucket" }), fails: "expected --backup-s3-credentials"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("AWS_ACCESS_KEY_ID", "me") // The daemon does not have the environment of the command.
			t.Setenv("AWS_SECRET_ACCESS_KEY", "hush")
			got, err := scheduleOf(test.have, test.asked, l)
			switch {
			case test.fails != "":
				if err == nil || !strings.Contains(err.Error(), test.fails) {
					t.Errorf("got %v", err)
				}
			case err != nil:
				t.Error(err)
			case (got == nil) != (test.want == nil) || got != nil && *got != *test.want:
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestBackupsBeside(t *testing.T) {
	root, mounted := t.TempDir(), t.TempDir()
	expect.NoError(t, unix.Mount("tmpfs", mounted, "tmpfs", 0, ""))
	t.Cleanup(func() { expect.NoError(t, unix.Unmount(mounted, unix.MNT_DETACH)) })
	for to, want := range map[string]bool{t.TempDir(): true, mounted: false, root + "/missing": false, "s3://bucket": false} {
		if got := (BackupTarget{To: to}).Beside(Layout{Root: root}); got != want {
			t.Errorf("%s: %v", to, got)
		}
	}
}

func TestS3Credentials(t *testing.T) {
	file := filepath.Join(t.TempDir(), "credentials")
	write := func(text string, mode os.FileMode) {
		expect.NoError(t, errors.Join(os.WriteFile(file, []byte(text), 0o600), os.Chmod(file, mode)))
	}
	s := S3{CredentialsFile: file}
	write("[default]\naws_access_key_id = me\naws_secret_access_key = hush\n", 0o644)
	if _, err := s.credentials(); err == nil || !strings.Contains(err.Error(), "chmod 600") || strings.Contains(err.Error(), "hush") {
		t.Errorf("a file that all users can read: %v", err)
	}
	expect.NoError(t, os.Chmod(file, 0o600))
	if value, err := s.credentials(); err != nil || value.AccessKeyID != "me" || value.SecretAccessKey != "hush" {
		t.Errorf("%+v, %v", value, err)
	}
	write("[default]\naws_access_key_id = me\n", 0o600)
	if _, err := s.credentials(); err == nil || !strings.Contains(err.Error(), "aws_secret_access_key") {
		t.Errorf("a file without the secret key: %v", err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "other")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "hush")
	if value, err := (S3{}).credentials(); err != nil || value.AccessKeyID != "other" {
		t.Errorf("from the environment: %+v, %v", value, err)
	}
}

func TestNextScheduledBackup(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	at := func(minutes int) time.Time { return now.Add(time.Duration(minutes) * time.Minute) }
	for name, test := range map[string]struct {
		status BackupStatus
		every  time.Duration
		want   time.Time
	}{
		"first backup":                   {BackupStatus{}, time.Hour, now},
		"one hour after the last backup": {BackupStatus{Last: &Backup{Time: at(-20)}}, time.Hour, at(40)},
		"missed":                         {BackupStatus{Last: &Backup{Time: at(-200)}}, time.Hour, at(-140)},
		"last backup in the future":      {BackupStatus{Last: &Backup{Time: at(600)}}, time.Hour, now},
		"failed":                         {BackupStatus{Last: &Backup{Time: at(-200)}, Failures: 1, Tried: now}, time.Hour, at(1)},
		"failed four times":              {BackupStatus{Failures: 4, Tried: now}, 6 * time.Hour, at(8)},
		"failed for days":                {BackupStatus{Failures: 400, Tried: now}, 6 * time.Hour, at(60)},
		"failed in the future":           {BackupStatus{Last: &Backup{Time: at(-200)}, Failures: 1, Tried: at(600)}, time.Hour, now},
		"failed, with a short interval":  {BackupStatus{Failures: 9, Tried: now}, 10 * time.Minute, at(10)},
	} {
		if got := test.status.next(test.every, now); !got.Equal(test.want) {
			t.Errorf("%s: got %s, want %s", name, got, test.want)
		}
	}
}

// An earlier build did not record the place of its backups. Its status stays after an upgrade.
func TestBackupStatusOfEarlierBuild(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	place := BackupTarget{To: "/mnt/backups", Keep: 2}
	expect.NoError(t, atomicfile.WriteJSON(l.backupStatus(), BackupStatus{Last: &Backup{Location: "/mnt/backups/one"}, Failures: 1}, 0o600))
	got := lastStatus(l, place)
	if got.Last == nil || got.Failures != 1 || got.Target.To != place.To {
		t.Errorf("got %+v", got)
	}
}

// The daemon creates backups and shows them. It shows the reason of a failure. A new daemon continues the schedule of
// the previous one. A backup to a new place is due at once.
func TestScheduledBackups(t *testing.T) {
	p := newPlain(t)
	dir := t.TempDir()
	p.state.Backup = &BackupSchedule{BackupTarget: BackupTarget{To: filepath.Join(dir, "mount"), Keep: 2}, Every: metav1.Duration{Duration: time.Hour}}
	daemon := func(until func(Status) bool) Status {
		t.Helper()
		d := &plane{layout: p.layout, state: p.state, board: newBoard(Status{Installed: true})}
		ctx, cancel := context.WithTimeout(t.Context(), expect.Patience)
		defer cancel()
		done := make(chan struct{})
		go func() { d.backUp(ctx); close(done) }()
		if !d.board.await(ctx, until) {
			t.Fatal("timed out")
		}
		cancel()
		<-done
		status, _ := d.board.get()
		return status
	}
	failed := daemon(func(s Status) bool { return s.BackupStatus.Error != "" }).BackupStatus
	if !strings.Contains(failed.Error, "create it, or mount it") || failed.Failures != 1 || !failed.Next.Equal(failed.Tried.Add(backupRetry)) {
		t.Errorf("without the folder: %+v", failed)
	}
	expect.NoError(t, errors.Join(os.Mkdir(filepath.Join(dir, "mount"), 0o700), os.Remove(p.layout.backupStatus())))
	made := daemon(func(s Status) bool { return s.BackupStatus.Last != nil }).BackupStatus
	if made.Error != "" || made.Failures != 0 || !made.Next.Equal(made.Last.Time.Add(time.Hour)) {
		t.Errorf("with the folder: %+v", made)
	}
	again := daemon(func(s Status) bool { return !s.BackupStatus.Next.IsZero() }).BackupStatus
	if !again.Last.Time.Equal(made.Last.Time) || !again.Next.Equal(made.Next) {
		t.Errorf("another daemon starts a new schedule: %+v", again)
	}
	p.state.Backup.Keep = 3
	if kept := daemon(func(s Status) bool { return !s.BackupStatus.Next.IsZero() }).BackupStatus; !kept.Next.Equal(made.Next) {
		t.Errorf("another number of backups starts a new schedule: %+v", kept)
	}
	p.state.Backup.To = filepath.Join(dir, "other")
	wrong := daemon(func(s Status) bool { return s.BackupStatus.Error != "" }).BackupStatus
	if wrong.Last != nil || wrong.Failures != 1 {
		t.Errorf("with a missing folder as the new place: %+v", wrong)
	}
	p.state.Backup.To = t.TempDir()
	if corrected := daemon(func(s Status) bool { return s.BackupStatus.Last != nil }).BackupStatus; corrected.Error != "" || !strings.HasPrefix(corrected.Last.Location, p.state.Backup.To) {
		t.Errorf("with a corrected place: %+v", corrected)
	}
}
