package versions

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	godiff "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"capstan.dev/capstan/internal/testenv/expect"
)

// killAt selects the step before which the process kills itself.
const killAt = "CAPSTAN_TEST_KILL_AT"

// The tests do not run in parallel: a program cannot be started while another test starts one and has its file open for writing.
func TestMain(m *testing.M) {
	if at := os.Getenv(killAt); at != "" {
		os.Exit(killed(at))
	}
	os.Exit(m.Run())
}

// program returns a small program, in machine code, that prints a version: write(1, text, length), exit(0).
func program(t *testing.T, version string) []byte {
	t.Helper()
	const address, start = 0x400000, 64 + 56 // the two headers
	text := "Kubernetes " + version + "\n"
	le := binary.LittleEndian
	var code []byte
	switch runtime.GOARCH {
	case "amd64":
		code = append(code, 0xb8, 1, 0, 0, 0, 0xbf, 1, 0, 0, 0, 0x48, 0x8d, 0x35, 16, 0, 0, 0, 0xba)
		code = le.AppendUint32(code, uint32(len(text)))
		code = append(code, 0x0f, 0x05, 0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05)
	case "arm64":
		for _, instruction := range []uint32{0xd2800020, 0x100000e1, 0xd2800002 | uint32(len(text))<<5, 0xd2800808, 0xd4000001, 0xd2800000, 0xd2800ba8, 0xd4000001} {
			code = le.AppendUint32(code, instruction)
		}
	default:
		t.Fatalf("expected amd64 or arm64, for which there is a test program, found %s", runtime.GOARCH)
	}
	size := uint64(start + len(code) + len(text))
	var out bytes.Buffer
	header := elf.Header64{Ident: [16]byte{0x7f, 'E', 'L', 'F', 2, 1, 1}, Type: uint16(elf.ET_EXEC), Machine: uint16(elfMachines[runtime.GOARCH]), Version: 1,
		Entry: address + start, Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64}
	segment := elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Vaddr: address, Paddr: address, Filesz: size, Memsz: size, Align: 4096}
	expect.NoError(t, errors.Join(binary.Write(&out, le, header), binary.Write(&out, le, segment)))
	return append(append(out.Bytes(), code...), text...)
}

// folder creates a folder of programs as in a release of Capstan: one program, and links to it.
func folder(t *testing.T, version string, names ...string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), version)
	expect.NoError(t, os.MkdirAll(dir, 0o755))
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "all"), program(t, version), 0o755))
	for _, name := range names {
		expect.NoError(t, os.Symlink("all", filepath.Join(dir, name)))
	}
	return dir
}

func all() []string { return slices.Concat(WorkerPrograms, ControlPlanePrograms) }

// item is an entry of a test archive. A nil content is that of an empty file.
type item struct {
	tar.Header
	content []byte
}

func file(name string, content []byte) item {
	return item{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755}, content}
}

func symlink(name, target string) item {
	return item{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}, nil}
}

func archive(t *testing.T, items ...item) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "archive.tar.gz")
	out, err := os.Create(name)
	expect.NoError(t, err)
	compressed, err := gzip.NewWriterLevel(out, gzip.BestSpeed)
	expect.NoError(t, err)
	w := tar.NewWriter(compressed)
	for _, i := range items {
		i.Size = int64(len(i.content))
		expect.NoError(t, w.WriteHeader(&i.Header))
		_, err := w.Write(i.content)
		expect.NoError(t, err)
	}
	expect.NoError(t, errors.Join(w.Close(), compressed.Close(), out.Close()))
	return name
}

// version returns the entries of a version in a folder of an archive.
func version(t *testing.T, dir, version string, names ...string) (items []item) {
	t.Helper()
	items = append(items, file(path.Join(dir, "all"), program(t, version)))
	for _, name := range names {
		items = append(items, symlink(path.Join(dir, name), "all"))
	}
	return items
}

func newStore(t *testing.T) *Store {
	t.Helper()
	return &Store{Dir: filepath.Join(t.TempDir(), "kubernetes")}
}

func (s *Store) mustAdd(t *testing.T, locations ...string) Version {
	t.Helper()
	v, added, err := s.Add(t.Context(), Request{Sources: sources(locations...)})
	expect.NoError(t, err)
	if !added {
		t.Error("the version was not added")
	}
	return v
}

func sources(locations ...string) (out []Source) {
	for _, l := range locations {
		out = append(out, Source{Location: l})
	}
	return out
}

// names returns all names in the folder of the store.
func (s *Store) names(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(s.Dir)
	if !errors.Is(err, os.ErrNotExist) {
		expect.NoError(t, err)
	}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func sumOf(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	expect.NoError(t, err)
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// A version can come from a folder, Capstan's archives, and upstream's archives with or without those of etcd.
func TestAdd(t *testing.T) {
	etcd := []string{"etcd", "etcdctl", "etcdutl"}
	upstream := func() string {
		items := []item{file("kubernetes/LICENSES", nil), file("kubernetes/server/bin/kube-proxy.tar", []byte("image")), file("kubernetes/server/bin/kubeadm", []byte("x"))}
		for _, name := range all() {
			if !slices.Contains(etcd, name) {
				items = append(items, file("kubernetes/server/bin/"+name, program(t, "v1.99.1")))
			}
		}
		return archive(t, items...)
	}
	etcdArchive := func() string { return archive(t, version(t, "etcd-v3.6.16-linux-amd64", "3.6.16", etcd...)...) }
	capstan := func() string {
		return archive(t, slices.Concat([]item{file("capstand", []byte("x"))}, version(t, "kubernetes/v1.98.0", "v1.98.0", all()...), version(t, "kubernetes/v1.99.1", "v1.99.1", all()...))...)
	}
	for name, c := range map[string]struct {
		sources []string
		version string
		want    Version
	}{
		"folder":            {sources: []string{folder(t, "v1.99.1", all()...)}, want: Version{Name: "v1.99.1"}},
		"folder of workers": {sources: []string{folder(t, "v1.99.1", WorkerPrograms...)}, want: Version{Name: "v1.99.1", Missing: ControlPlanePrograms}},
		"capstan":           {sources: []string{capstan()}, version: "v1.98.0", want: Version{Name: "v1.98.0"}},
		"upstream":          {sources: []string{upstream()}, want: Version{Name: "v1.99.1", Missing: etcd}},
		"upstream and etcd": {sources: []string{upstream(), etcdArchive()}, want: Version{Name: "v1.99.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			got, added, err := s.Add(t.Context(), Request{Sources: sources(c.sources...), Version: c.version})
			expect.NoError(t, err)
			if diff := godiff.Diff(c.want, got, cmpopts.IgnoreFields(Version{}, "Bytes")); diff != "" || !added || got.Bytes == 0 {
				t.Errorf("added %v, %d bytes, %s", added, got.Bytes, diff)
			}
			if diff := godiff.Diff([]string{got.Name}, s.names(t)); diff != "" {
				t.Errorf("the folder: %s", diff)
			}
			if info, err := os.Stat(filepath.Join(s.Dir, got.Name)); err != nil || info.Mode().Perm() != 0o755 {
				t.Errorf("the folder has mode %v, %v", info.Mode(), err)
			}
			if _, err := os.Lstat(filepath.Join(s.Dir, got.Name, "kubeadm")); err == nil {
				t.Error("a program that machines do not need was copied")
			}
			// The command can be repeated. Other content is refused.
			if _, added, err := s.Add(t.Context(), Request{Sources: sources(c.sources...), Version: c.version}); err != nil || added {
				t.Errorf("again: added %v, %v", added, err)
			}
			expect.NoError(t, os.WriteFile(filepath.Join(s.Dir, got.Name, "other"), nil, 0o644))
			if _, _, err := s.Add(t.Context(), Request{Sources: sources(c.sources...), Version: c.version}); err == nil || !strings.Contains(err.Error(), "other content") {
				t.Errorf("other content: %v", err)
			}
		})
	}
}

// Sources that are hostile or wrong change nothing.
func TestRefused(t *testing.T) {
	good := func() []item { return version(t, "v1.99.1", "v1.99.1", all()...) }
	with := func(extra ...item) string { return archive(t, slices.Concat(good(), extra)...) }
	special := func(kind byte) string {
		return with(item{tar.Header{Name: "v1.99.1/evil", Typeflag: kind, Linkname: "v1.99.1/all", Mode: 0o755}, nil})
	}
	without := func(names ...string) (rest []string) {
		return slices.DeleteFunc(all(), func(name string) bool { return slices.Contains(names, name) })
	}
	changed := func(change func(dir string) error) string {
		dir := folder(t, "v1.99.1", without("kube-proxy")...)
		expect.NoError(t, change(dir))
		return dir
	}
	outside := filepath.Join(t.TempDir(), "kube-proxy")
	expect.NoError(t, os.WriteFile(outside, program(t, "v1.99.1"), 0o755))
	other := program(t, "v1.99.1")
	binary.LittleEndian.PutUint16(other[18:], 8) // e_machine: MIPS
	cut, err := os.ReadFile(archive(t, good()...))
	expect.NoError(t, err)
	truncated := filepath.Join(t.TempDir(), "truncated.tar.gz")
	expect.NoError(t, os.WriteFile(truncated, cut[:len(cut)-20], 0o644))

	for name, c := range map[string]struct {
		source, sum, version, want string
		limits                     Limits
	}{
		"parent folder":      {source: with(file("v1.99.1/../../evil", nil)), want: "leads out"},
		"parent in the name": {source: with(file("v1.99.1/../evil", nil)), want: "leads out"},
		"absolute":           {source: with(file("/evil", nil)), want: "leads out"},
		"hard link":          {source: special(tar.TypeLink), want: "an entry of type '1'"},
		"device":             {source: special(tar.TypeChar), want: "an entry of type '3'"},
		"block device":       {source: special(tar.TypeBlock), want: "an entry of type '4'"},
		"fifo":               {source: special(tar.TypeFifo), want: "an entry of type '6'"},
		"twice":              {source: with(file("./v1.99.1/kubelet", nil)), want: "found it twice"},
		"link out":           {source: archive(t, append(version(t, "v", "v1.99.1", without("kube-proxy")...), symlink("v/kube-proxy", outside))...), want: "found a link to"},
		"link to the parent": {source: archive(t, append(version(t, "v", "v1.99.1", without("kube-proxy")...), symlink("v/kube-proxy", ".."))...), want: "found a link to"},
		"link to a link":     {source: archive(t, append(version(t, "v", "v1.99.1", without("kube-proxy")...), symlink("v/kube-proxy", "kubelet"))...), want: "found a link to"},
		"many entries":       {source: with(), limits: Limits{1 << 30, 1 << 30, 1 << 30, 5}, want: "at most 5 entries"},
		"bomb":               {source: with(file("zeros", make([]byte, 1<<20))), limits: Limits{1 << 30, 1 << 19, 1 << 30, 100}, want: "content of at most"},
		"large program":      {source: with(), limits: Limits{1 << 30, 1 << 30, 1 << 7, 100}, want: "programs of at most"},
		"large archive":      {source: with(), limits: Limits{1 << 7, 1 << 30, 1 << 30, 100}, want: "archive of at most"},
		"truncated":          {source: truncated, want: "unexpected EOF"},
		"no archive":         {source: outside, want: "that tar and gzip made"},
		"nothing":            {source: archive(t, file("README", nil)), want: "contains kubelet or etcd"},
		"two versions":       {source: archive(t, append(good(), version(t, "v1.98.0", "v1.98.0", all()...)...)...), want: "choose one with --version"},
		"checksum":           {source: with(), sum: strings.Repeat("0", 64), want: "expected an archive with the SHA-256"},
		"bad checksum":       {source: with(), sum: "ABC", want: "64 lower case"},
		"missing file":       {source: filepath.Join(t.TempDir(), "none"), want: "no such file"},
		"device as source":   {source: "/dev/null", want: "expected a folder"},

		"checksum of a folder": {source: folder(t, "v1.99.1", all()...), sum: strings.Repeat("0", 64), want: "found a folder"},
		"folder: link out":     {source: changed(func(dir string) error { return os.Symlink(outside, filepath.Join(dir, "kube-proxy")) }), want: "found a link to"},
		"folder: fifo":         {source: changed(func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, "kube-proxy"), 0o755) }), want: "no kube-proxy"},
		"folder: absent":       {source: changed(func(string) error { return nil }), want: "no kube-proxy"},
		"not executable": {source: changed(func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "kube-proxy"), program(t, "v1.99.1"), 0o644)
		}), want: "expected an executable file"},
		"script": {source: changed(func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "kube-proxy"), []byte("#!/bin/sh\n"), 0o755)
		}), want: "ELF"},
		"architecture": {source: changed(func(dir string) error { return os.WriteFile(filepath.Join(dir, "kube-proxy"), other, 0o755) }), want: "found one for EM_MIPS"},
		"mixed versions": {source: changed(func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "kube-proxy"), program(t, "v1.99.2"), 0o755)
		}), want: `kube-proxy prints the version "v1.99.2"`},
		"other version":    {source: folder(t, "v1.99.1", all()...), version: "v1.99.2", want: `kubelet prints the version "v1.99.1"`},
		"hostile version":  {source: folder(t, "v1.99.1", all()...), version: "../../etc", want: "such as v1.36.3"},
		"no version":       {source: folder(t, "v1", all()...), want: `prints the version "v1"`},
		"escaping version": {source: archive(t, version(t, "v", "../../v1.99.1", all()...)...), want: "prints the version"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			s.Limits = c.limits
			_, _, err := s.Add(t.Context(), Request{Sources: []Source{{Location: c.source, SHA256: c.sum}}, Version: c.version})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("expected %q, got %v", c.want, err)
			}
			if left := s.names(t); len(left) > 0 {
				t.Errorf("left %v", left)
			}
			if _, err := os.Lstat(filepath.Join(filepath.Dir(s.Dir), "evil")); err == nil {
				t.Error("a file was written outside")
			}
		})
	}
}

// Archives come from servers only with their checksum, and over TLS with the named authority.
func TestDownload(t *testing.T) {
	source := archive(t, version(t, "kubernetes/v1.99.1", "v1.99.1", all()...)...)
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/good" {
			http.NotFound(w, r)
			return
		}
		http.ServeFile(w, r, source)
	}))
	t.Cleanup(server.Close)
	ca := filepath.Join(t.TempDir(), "ca.crt")
	expect.NoError(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o644))
	sum := sumOf(t, source)
	for name, c := range map[string]struct{ path, sum, ca, want string }{
		"good":            {path: "/good", sum: sum, ca: ca},
		"no checksum":     {path: "/good", ca: ca, want: "add --sha256"},
		"other checksum":  {path: "/good", sum: strings.Repeat("1", 64), ca: ca, want: "expected an archive with the SHA-256"},
		"other authority": {path: "/good", sum: sum, want: "certificate"},
		"no authority":    {path: "/good", sum: sum, ca: source, want: "expected certificates in PEM"},
		"not found":       {path: "/none", sum: sum, ca: ca, want: "found 404"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			_, _, err := s.Add(t.Context(), Request{Sources: []Source{{Location: server.URL + c.path, SHA256: c.sum, CAFile: c.ca}}})
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("expected %q, got %v", c.want, err)
			}
			if (len(s.names(t)) == 1) != (c.want == "") {
				t.Errorf("left %v", s.names(t))
			}
		})
	}
}

// killed changes a store and kills its process before step N: "add---N" or "removeN". It ends without a kill if there are fewer steps.
func killed(at string) int {
	var operation string
	var n int
	if _, err := fmt.Sscanf(at, "%6s%d", &operation, &n); err != nil {
		panic(err)
	}
	s := &Store{Dir: os.Args[1]}
	s.step = func(string) {
		if n--; n == 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
	}
	var err error
	if operation == "add---" {
		_, _, err = s.Add(context.Background(), Request{Sources: sources(os.Args[2])})
	} else {
		err = s.Remove("v1.99.1", func() ([]string, error) { return nil, nil }, false)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// A kill at any step leaves the old state or the new one. The next command cleans up.
func TestKilled(t *testing.T) {
	source := archive(t, version(t, "v1.99.1", "v1.99.1", all()...)...)
	self, err := os.Executable()
	expect.NoError(t, err)
	for operation, steps := range map[string]int{"add---": 5, "remove": 4} {
		t.Run(operation, func(t *testing.T) {
			for n := 1; ; n++ {
				s := newStore(t)
				s.mustAdd(t, folder(t, "v1.98.0", WorkerPrograms...))
				if operation == "remove" {
					s.mustAdd(t, source)
				}
				command := exec.Command(self, s.Dir, source)
				command.Env = append(os.Environ(), fmt.Sprint(killAt, "=", operation, n))
				out, err := command.CombinedOutput()
				if err == nil {
					if n-1 != steps {
						t.Errorf("%d steps, expected %d", n-1, steps)
					}
					return
				}
				if command.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
					t.Fatalf("step %d: %v: %s", n, err, out)
				}
				s.checkWhole(t, n)
				// The next command, which fails, cleans up.
				if err := s.Remove("v1.0.0", nil, true); !errors.Is(err, ErrNotInstalled) {
					t.Errorf("step %d: the next command: %v", n, err)
				}
				list, err := s.List()
				expect.NoError(t, err)
				if left := s.names(t); len(left) != len(list) {
					t.Errorf("step %d: left %v", n, left)
				}
			}
		})
	}
}

// checkWhole checks that each listed version is complete.
func (s *Store) checkWhole(t *testing.T, step int) {
	t.Helper()
	list, err := s.List()
	expect.NoError(t, err)
	if len(list) == 0 || list[0].Name != "v1.98.0" {
		t.Errorf("step %d: the other version was lost: %v", step, list)
	}
	for _, v := range list {
		if _, err := check(t.Context(), filepath.Join(s.Dir, v.Name), v.Name); err != nil || v.Name == "v1.99.1" && len(v.Missing) > 0 {
			t.Errorf("step %d: %s is not complete: %v, without %v", step, v.Name, err, v.Missing)
		}
	}
}

// One command at a time changes the folder.
func TestOneCommand(t *testing.T) {
	s := newStore(t)
	source := folder(t, "v1.99.1", all()...)
	s.step = func(string) {
		second := &Store{Dir: s.Dir}
		if _, _, err := second.Add(t.Context(), Request{Sources: sources(source)}); err == nil || !strings.Contains(err.Error(), "found another one") {
			t.Errorf("a second command: %v", err)
		}
	}
	s.mustAdd(t, source)
}

// A removal that is killed before it has looked for users twice leaves a version that the next command, or capstand, makes usable again.
func TestKilledRemovalIsUndone(t *testing.T) {
	source := folder(t, "v1.99.1", all()...)
	for name, restore := range map[string]func(*Store) error{
		"command": func(s *Store) error {
			if err := s.Remove("v1.0.0", nil, true); !errors.Is(err, ErrNotInstalled) {
				return err
			}
			return nil
		},
		"capstand": func(s *Store) error { return Restore(s.Dir) },
	} {
		for step, want := range map[string]int{"found unused": 1, "hidden": 1, "found unused again": 1, "renamed": 0} {
			t.Run(name+" "+step, func(t *testing.T) {
				s := newStore(t)
				s.mustAdd(t, source)
				s.step = func(at string) {
					if at == step {
						expect.NoError(t, Restore(s.Dir)) // A capstand changes nothing while the command runs.
						panic(step)
					}
				}
				func() {
					defer func() { _ = recover() }()
					_ = s.Remove("v1.99.1", func() ([]string, error) { return nil, nil }, false)
				}()
				s.step = nil
				expect.NoError(t, restore(s))
				if list, err := s.List(); err != nil || len(list) != want {
					t.Errorf("%v, %v", list, err)
				}
			})
		}
	}
}

// A version that an administrator added by hand meanwhile stays.
func TestRestoreKeepsTheVersion(t *testing.T) {
	s := newStore(t)
	s.mustAdd(t, folder(t, "v1.99.1", all()...))
	expect.NoError(t, os.Mkdir(filepath.Join(s.Dir, hidden+"v1.99.1"), 0o755))
	expect.NoError(t, Restore(s.Dir))
	if list, err := s.List(); err != nil || len(list) != 1 || len(s.names(t)) != 1 {
		t.Errorf("%v, %v, folders %v", list, err, s.names(t))
	}
}

// Remove refuses a version that is used, also by a machine that appears meanwhile.
func TestRemove(t *testing.T) {
	source := folder(t, "v1.99.1", all()...)
	for name, c := range map[string]struct {
		users   [][]string
		force   bool
		version string
		want    string
	}{
		"unused":         {users: [][]string{nil, nil}},
		"used":           {users: [][]string{{"machine a/b"}}, want: "used by machine a/b"},
		"used meanwhile": {users: [][]string{nil, {"machine a/b"}}, want: "used by machine a/b"},
		"force":          {users: [][]string{{"machine a/b"}}, force: true},
		"other":          {version: "v1.99.2", want: "does not have the version"},
		"no version":     {version: "..", want: "such as v1.36.3"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			s.mustAdd(t, source)
			calls := 0
			err := s.Remove(cmp.Or(c.version, "v1.99.1"), func() ([]string, error) { calls++; return c.users[calls-1], nil }, c.force)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("expected %q, got %v", c.want, err)
			}
			if left := s.names(t); (len(left) == 0) != (c.want == "") {
				t.Errorf("left %v", left)
			}
		})
	}
}

// A machine uses the version of its spec; during an update in place, both versions.
func TestMachines(t *testing.T) {
	spec := func(version string) string {
		return `{"namespace":"a","name":"b","kubernetesVersion":"` + version + `"}`
	}
	update := func(phase int) string {
		data, err := json.Marshal(map[string]any{"phase": phase, "from": json.RawMessage(spec("v1.35.4")), "to": json.RawMessage(spec("v1.36.3"))})
		expect.NoError(t, err)
		return string(data)
	}
	one, damaged := []string{"machine a/b"}, []string{"machine id (its record is damaged)"}
	for name, c := range map[string]struct {
		spec, update string
		older, newer []string
	}{
		"no update":      {spec: spec("v1.35.4"), older: one},
		"update pending": {spec: spec("v1.35.4"), update: update(1), older: one, newer: one},
		"update runs":    {spec: spec("v1.35.4"), update: update(2), older: one, newer: one},
		"updated":        {spec: spec("v1.35.4"), update: update(3), newer: one},
		"update undone":  {spec: spec("v1.35.4"), update: update(4), older: one},
		"damaged spec":   {spec: "{", older: damaged, newer: damaged},
		"damaged update": {spec: spec("v1.35.4"), update: "{", older: damaged, newer: damaged},
		"lost spec":      {older: damaged, newer: damaged},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			dir := filepath.Join(root, "machines", "id")
			expect.NoError(t, os.MkdirAll(dir, 0o755))
			for name, content := range map[string]string{"spec.json": c.spec, "update.json": c.update} {
				if content != "" {
					expect.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
				}
			}
			for version, want := range map[string][]string{"v1.35.4": c.older, "v1.36.3": c.newer, "v1.37.0": onlyDamaged(c.older)} {
				got, err := Machines(version, filepath.Join(root, "none"), root)
				if diff := godiff.Diff(want, got); diff != "" || err != nil {
					t.Errorf("%s: %v %s", version, err, diff)
				}
			}
		})
	}
}

// A machine whose folder is gone uses no version: it was deleted after the folders were listed.
func TestUserIsDeleted(t *testing.T) {
	if user := userOf(filepath.Join(t.TempDir(), "id"), "v1.36.3"); user != "" {
		t.Errorf("a user: %s", user)
	}
}

// onlyDamaged returns users of every version.
func onlyDamaged(users []string) []string {
	if len(users) == 1 && strings.Contains(users[0], "damaged") {
		return users
	}
	return nil
}
