package embedded

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/tracing/collector"
	"capstan.dev/capstan/internal/version"
)

func testAssets(t *testing.T, versions ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, v := range versions {
		for _, program := range []string{"kube-apiserver", "kube-controller-manager", "etcd"} {
			path := filepath.Join(dir, "kubernetes", v, program)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o755)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

func TestDecideState(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	assets := testAssets(t, "v1.35.9", "v1.36.3", "v1.9.1", "other")
	workersOnly := filepath.Join(assets, "kubernetes", "v1.37.0", "kube-apiserver") // without etcd
	if err := errors.Join(os.MkdirAll(filepath.Dir(workersOnly), 0o755), os.WriteFile(workersOnly, nil, 0o755)); err != nil {
		t.Fatal(err)
	}
	first, err := decideState(l, assets, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if first.KubernetesVersion != "v1.36.3" || !reflect.DeepEqual(first.Hosts, []string{"local"}) || first.PortBase != 0 || len(first.ID) != 8 {
		t.Errorf("got the state %+v", first)
	}
	if err := first.save(l); err != nil {
		t.Fatal(err)
	}
	again, err := decideState(l, assets, Options{Hosts: 1})
	if err != nil || !reflect.DeepEqual(again, first) {
		t.Errorf("the second call returned a different state: %+v, %v", again, err)
	}
	more, err := decideState(l, testAssets(t, "v1.36.3", "v1.37.0"), Options{Hosts: 3})
	if err != nil || !reflect.DeepEqual(more.Hosts, []string{"local", "local-2", "local-3"}) || more.KubernetesVersion != "v1.36.3" {
		t.Errorf("with more hosts and a newer version: %+v, %v", more, err)
	}
	if err := more.save(l); err != nil {
		t.Fatal(err)
	}
	for _, hosts := range []int{1, 2, -1} {
		if _, err := decideState(l, assets, Options{Hosts: hosts}); !errors.As(err, &InvalidOptions{}) || !strings.Contains(err.Error(), "of at least 3") {
			t.Errorf("%d hosts: expected a refusal, because a host can have machines, found %v", hosts, err)
		}
	}
	for hosts, want := range map[int]bool{-1: false, 0: true, 1: false, 3: true, 4: false} {
		running := Status{Settings: more.Settings, Assets: more.Assets, Build: buildOf(more)}
		if got := (Options{Hosts: hosts}).served(running, more.Assets, l); got != want {
			t.Errorf("%d hosts: a plane with three hosts is accepted: %v", hosts, got)
		}
	}
	// A `capstan up` was interrupted after it had stored three hosts.
	if running := (Status{Settings: first.Settings, Assets: more.Assets, Build: buildOf(more)}); (Options{}).served(running, more.Assets, l) {
		t.Error("a plane without the stored settings is accepted")
	}
}

// TestStateOfNewerRelease: an older release does not start the plane of a newer minor one, and leaves its state as it is.
func TestStateOfNewerRelease(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	assets := testAssets(t, "v1.36.3")
	state, err := decideState(l, assets, Options{})
	if err != nil || state.Capstan != version.Version {
		t.Fatalf("%+v, %v", state, err)
	}
	for writer, refused := range map[string]bool{"": false, "v0.0.9": false, "v99.0.0": true} {
		state.Capstan = writer
		if err := state.save(l); err != nil {
			t.Fatal(err)
		}
		before, _ := os.ReadFile(l.State())
		again, err := decideState(l, assets, Options{})
		if refused != (err != nil) || !refused && again.Capstan != version.Version {
			t.Errorf("capstan up, %q: %+v, %v", writer, again, err)
		}
		if !refused {
			begun := state
			if err := begun.begun(l); err != nil || begun.Capstan != version.Version {
				t.Errorf("start, %q: %+v, %v", writer, begun, err)
			}
			continue
		}
		if err := Run(t.Context(), l, Supervisor{}); err == nil || !strings.Contains(err.Error(), "expected Capstan v99.0 or newer for the management plane in "+l.Root) || strings.Contains(err.Error(), "--replace") {
			t.Errorf("start, %q: %v", writer, err)
		}
		if after, _ := os.ReadFile(l.State()); !bytes.Equal(after, before) {
			t.Errorf("the state was changed to %s", after)
		}
	}
}

// TestKubernetesVersion: the version of a plane changes only on request, and only to one whose API server can read the stored objects.
func TestKubernetesVersion(t *testing.T) {
	a := Assets{testAssets(t, "v1.34.2", "v1.35.4", "v1.36.3", "v1.36.5", "v1.37.1", "v1.38.0")}
	for _, test := range []struct{ have, asked, want, refusal string }{
		{"", "", "v1.38.0", ""},
		{"", "v1.35.4", "v1.35.4", ""},
		{"v1.36.3", "", "v1.36.3", ""},
		{"v1.36.3", "v1.36.3", "v1.36.3", ""},
		{"v1.36.3", "v1.36.5", "v1.36.5", ""},
		{"v1.36.3", "v1.37.1", "v1.37.1", ""},
		{"v1.36.4", "v1.37.1", "v1.37.1", ""}, // its programs were removed
		{"v1.36.4", "", "v1.37.1", ""},
		{"v1.36.6", "", "v1.37.1", ""},
		{"v1.38.1", "", "", "v1.38.1, the version of the management plane, or a newer one"},
		{"v1.36.3", "v1.38.0", "", "one minor version above v1.36.3"},
		{"v1.36.5", "v1.36.3", "", "or a newer one"},
		{"v1.36.3", "v1.35.4", "", "or a newer one"},
		{"v1.36.3", "v1.37.0", "", "has v1.34.2, v1.35.4"},
		{"v1.36.3", "1.37.1", "", "an installed Kubernetes version"},
	} {
		got, err := kubernetesOf(a, test.have, test.asked)
		if got != test.want || (err == nil) != (test.refusal == "") || err != nil && (!errors.As(err, &InvalidOptions{}) || !strings.Contains(err.Error(), test.refusal)) {
			t.Errorf("from %q to %q: %q, %v", test.have, test.asked, got, err)
		}
	}
	s := State{Assets: a.Dir, Settings: Settings{KubernetesVersion: "v1.36.3"}}
	for asked, want := range map[string]bool{"": true, "v1.36.3": true, "v1.36.5": false} {
		if got := (Options{KubernetesVersion: asked}).served(Status{Settings: s.Settings, Assets: s.Assets, Build: buildOf(s)}, s.Assets, Layout{}); got != want {
			t.Errorf("%q is served by a plane of v1.36.3: %v", asked, got)
		}
	}
	failed := errors.New("failed")
	for before, want := range map[string]bool{"": false, "v1.36.3": false, "v1.35.4": true} {
		err := afterUpgrade(before, "v1.36.3", failed)
		if !errors.Is(err, failed) || strings.Contains(err.Error(), "capstan restore --replace") != want {
			t.Errorf("from %q: %v", before, err)
		}
	}
}

// TestMakeCleanKeepsUsedFiles: `make clean` reads from the state which build an installation runs from.
func TestMakeCleanKeepsUsedFiles(t *testing.T) {
	l, used := Layout{Root: t.TempDir()}, filepath.Join(t.TempDir(), "bin")
	if err := (State{Assets: used}).save(l); err != nil {
		t.Fatal(err)
	}
	clean := func(folder string) (string, error) {
		out, err := exec.CommandContext(t.Context(), filepath.Join("..", "..", "hack", "unused.sh"), folder, l.State()).CombinedOutput()
		return string(out), err
	}
	if out, err := clean(used); err == nil || !strings.Contains(out, l.Root+" runs from "+used) || !strings.Contains(out, used+"/capstan down") {
		t.Errorf("a used build: %v, %s", err, out)
	}
	if out, err := clean(used + "-2"); err != nil {
		t.Errorf("an unused build: %v, %s", err, out)
	}
}

// TestListen: the value of --listen stays until another value is given. The plane does not start with a value that it
// cannot serve.
func TestListen(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	assets := testAssets(t, "v1.36.3")
	decide := func(hosts int, listen string) (State, error) {
		s, err := decideState(l, assets, Options{Hosts: hosts, Listen: listen})
		if err == nil {
			err = s.save(l)
		}
		return s, err
	}
	if _, err := decide(1, ":7443"); err == nil || !strings.Contains(err.Error(), "capstan host credentials local --address HOST:PORT --dir "+l.HostRoot("local")+"/tls") {
		t.Errorf("without certificates: %v", err)
	}
	tls := filepath.Join(l.HostRoot("local"), "tls")
	if err := errors.Join(os.MkdirAll(tls, 0o700), os.WriteFile(filepath.Join(tls, "server.crt"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ asked, want string }{{"", ""}, {":7443", ":7443"}, {"", ":7443"}, {"none", ""}, {"10.0.0.5:7443", "10.0.0.5:7443"}} {
		s, err := decide(1, test.asked)
		if err != nil || s.Listen != test.want {
			t.Fatalf("--listen %q: %q, %v", test.asked, s.Listen, err)
		}
		without := Status{Settings: s.Settings, Assets: assets, Build: buildOf(s)}
		without.Listen = ""
		served := Options{Listen: test.asked}.served(without, assets, Layout{})
		if served != (test.asked == "" || test.asked == "none") {
			t.Errorf("--listen %q is accepted by a plane without listeners: %v", test.asked, served)
		}
		args := strings.Join(capstandComponent(l, s, "local", user{}, 1<<30).args, " ")
		if strings.Contains(args, "--listen="+test.want) != (test.want != "") {
			t.Errorf("--listen %q: arguments of capstand: %s", test.asked, args)
		}
	}
	for asked, want := range map[string]string{":7444": "", "10.0.0.5:7444": "", "none": "", "7444": "host:port", ":444": "from 1024", ":x": "from 1 to 65535"} {
		s, err := decideState(l, assets, Options{Hosts: 1, HostListenAddress: asked})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("--host-listen-address %q: %v", asked, err)
			continue
		}
		if args := strings.Join(managerComponent(l, s).args, " "); err == nil && strings.Contains(args, "--host-listen-address="+asked) != (asked != "none") {
			t.Errorf("--host-listen-address %q: arguments of the manager: %s", asked, args)
		}
	}
	if _, err := decide(1, "7443"); err == nil || !strings.Contains(err.Error(), "host:port") {
		t.Errorf("no address: %v", err)
	}
	if _, err := decide(2, ""); err == nil || !strings.Contains(err.Error(), "found 2") {
		t.Errorf("one address for two hosts: %v", err)
	}
}

// A plane whose hosts run elsewhere has no hosts of its own until the user adds some.
func TestDecideStateWithoutHosts(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	assets := testAssets(t, "v1.36.3")
	for _, test := range []struct{ hosts, want int }{{-1, 0}, {0, 0}, {-1, 0}, {2, 2}, {0, 2}} {
		s, err := decideState(l, assets, Options{Hosts: test.hosts})
		if err != nil || len(s.Hosts) != test.want {
			t.Fatalf("hosts %d: %+v, %v", test.hosts, s, err)
		}
		if err := s.save(l); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDecideStateWithoutAssets(t *testing.T) {
	_, err := decideState(Layout{Root: t.TempDir()}, t.TempDir(), Options{Hosts: 1})
	if err == nil || !strings.Contains(err.Error(), "make build") {
		t.Errorf("got %v", err)
	}
}

func TestBrokenState(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	if err := os.WriteFile(l.State(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadState(l); err == nil || !strings.Contains(err.Error(), l.State()) {
		t.Errorf("got %v", err)
	}
}

func TestPrepareRootKeepsForeignFolders(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "photos.tar"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := prepareRoot(Layout{Root: dir}); err == nil || !strings.Contains(err.Error(), "choose another folder") {
		t.Errorf("got %v", err)
	}
	if err := Down(context.Background(), Options{Root: dir}, false, func(string) {}); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "photos.tar")); err != nil {
		t.Errorf("`capstan down` removed other files: %v", err)
	}
}

func TestEnterable(t *testing.T) {
	dir := t.TempDir()
	closed := filepath.Join(dir, "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Enterable(filepath.Join(closed, "root", "x")); err == nil || !strings.Contains(err.Error(), "chmod o+x "+closed) {
		t.Errorf("got %v", err)
	}
}

func TestCommandLock(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	var waited []string
	wait := func(holder string) { waited = append(waited, holder) }
	first, err := lockCommand(t.Context(), l, wait)
	expect.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := lockCommand(ctx, l, wait); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second command got the lock: %v", err)
	}
	// A holder that has not written its id, and one that ended and whose child has the lock.
	for _, content := range []string{"", "4194305   \n"} { // above the largest process id
		expect.NoError(t, errors.Join(first.Truncate(0), os.WriteFile(l.commandLock(), []byte(content), 0o600)))
		if _, err := lockCommand(ctx, l, wait); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("another command got the lock: %v", err)
		}
	}
	first.Close()
	second, err := lockCommand(t.Context(), l, ignored)
	expect.NoError(t, err)
	second.Close()
	self := fmt.Sprintf("process %d (%s", os.Getpid(), os.Args[0])
	if len(waited) != 3 || !strings.HasPrefix(waited[0], self) || !slices.Equal(waited[1:], []string{"another command", "another command"}) {
		t.Errorf("waited for %q, want %s first", waited, self)
	}
}

func ignored(string) {}

// TestPlaneLockAlwaysHasAProcess: a command that reads the lock of a plane while it starts finds a process id.
func TestPlaneLockAlwaysHasAProcess(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	expect.NoError(t, os.WriteFile(l.Lock(), []byte("       123\n"), 0o600))
	ctx, end := context.WithCancel(t.Context())
	read := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			data, err := os.ReadFile(l.Lock())
			if err == nil {
				_, err = strconv.Atoi(strings.TrimSpace(string(data)))
			}
			if err != nil {
				read <- err
				return
			}
		}
		read <- nil
	}()
	for range 10000 {
		lock, err := lockPlane(l)
		expect.NoError(t, err)
		expect.NoError(t, lock.Close())
	}
	end()
	expect.NoError(t, <-read)
	lock, err := lockPlane(l)
	expect.NoError(t, err)
	defer lock.Close()
	if pid, err := planeProcess(l); pid != os.Getpid() || err != nil {
		t.Errorf("the process is %d, %v", pid, err)
	}
}

// TestCommandLockOfRemovedRoot: `capstan down` removes the folder while `capstan up` and another `capstan down` wait for its lock.
func TestCommandLockOfRemovedRoot(t *testing.T) {
	l := Layout{Root: newRoot(t)}
	patient, end := context.WithTimeout(t.Context(), expect.Patience)
	defer end()
	first, err := lockRoot(patient, l, ignored)
	expect.NoError(t, err)
	inode := inodeOf(t, l.commandLock())
	up, down := make(chan error, 1), make(chan error, 1)
	var second *os.File
	var step string
	go func() {
		var err error
		second, err = lockRoot(patient, l, ignored)
		up <- err
	}()
	waitForLock(t, inode, 1)
	go func() { down <- Down(patient, Options{Root: l.Root}, false, func(s string) { step = s }) }()
	waitForLock(t, inode, 2)
	expect.NoError(t, removeRoot(l))
	first.Close()
	if err := <-down; err != nil || !strings.Contains(step, "nothing to do") {
		t.Errorf("down: %q, %v", step, err)
	}
	expect.NoError(t, <-up)
	defer second.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := lockCommand(ctx, l, ignored); !errors.Is(err, context.Canceled) {
		t.Errorf("a third command works at the same time: %v", err)
	}
}

func inodeOf(t *testing.T, path string) uint64 {
	t.Helper()
	var stat unix.Stat_t
	expect.NoError(t, unix.Stat(path, &stat))
	return stat.Ino
}

// waitForLock waits until a number of goroutines waits for the lock of a file.
func waitForLock(t *testing.T, inode uint64, waiting int) {
	t.Helper()
	wait := regexp.MustCompile(fmt.Sprintf(`-> FLOCK .*:%d 0 EOF`, inode))
	expect.Eventually(t, fmt.Sprintf("%d processes wait for the lock", waiting), func() error {
		locks, err := os.ReadFile("/proc/locks")
		expect.NoError(t, err)
		if found := len(wait.FindAll(locks, -1)); found < waiting {
			return fmt.Errorf("%d processes wait:\n%s", found, locks)
		}
		return nil
	})
}

func TestReserved(t *testing.T) {
	const gib = int64(1) << 30
	for hosts, want := range map[int]int64{1: gib, 3: 21 * gib} {
		if got := reserved(31*gib, hosts); got != want {
			t.Errorf("%d hosts reserve %d GiB each, want %d", hosts, got/gib, want/gib)
		}
	}
	if got := reserved(gib/2, 2); got != gib/2 {
		t.Errorf("a machine with too little memory reserves %d", got)
	}
}

func TestStatusIsWatched(t *testing.T) {
	l := Layout{Root: t.TempDir()}
	b := newBoard(Status{PID: 7})
	server, err := b.serve(l.StatusSocket())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = server.Close() }()
	var seen []bool
	err = watchStatus(context.Background(), l, func(s Status) bool {
		seen = append(seen, s.Ready)
		if len(seen) == 1 {
			b.component(ProcessStatus{Name: "etcd", State: ProcessReady})
			b.update(func(s *Status) { s.Ready = true })
		}
		return !s.Ready
	})
	if err != nil || seen[0] || !seen[len(seen)-1] {
		t.Errorf("observed %v, %v", seen, err)
	}
	status, err := GetStatus(context.Background(), l)
	if err != nil || status.PID != 7 || len(status.Components) != 1 || status.Components[0].State != ProcessReady {
		t.Errorf("got %+v, %v", status, err)
	}
}

func TestStage(t *testing.T) {
	dir := t.TempDir()
	source, target := filepath.Join(dir, "source"), filepath.Join(dir, "target")
	write := func(content string) {
		if err := errors.Join(os.WriteFile(source+".new", []byte(content), 0o755), os.Rename(source+".new", source)); err != nil {
			t.Fatal(err)
		}
	}
	for _, content := range []string{"one", "another"} { // The program is built twice.
		write(content)
		if err := stageOne(source, target); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(target); err != nil || string(got) != content {
			t.Errorf("staged %q, %v", got, err)
		}
	}
	info, _ := os.Stat(source)
	if err := copyFile(source, target+".copy", info); err != nil {
		t.Fatal(err)
	}
	before, _ := os.Stat(target + ".copy")
	if err := stageOne(source, target+".copy"); err != nil {
		t.Fatal(err)
	}
	if after, _ := os.Stat(target + ".copy"); !os.SameFile(before, after) {
		t.Error("an up-to-date copy was created again")
	}
	// A copy that other users cannot run, for example of a build without this check, is replaced.
	expect.NoError(t, os.Chmod(target+".copy", 0o700))
	expect.NoError(t, stageOne(source, target+".copy"))
	if after, _ := os.Stat(target + ".copy"); after.Mode() != 0o755 {
		t.Errorf("the program has mode %s", after.Mode())
	}
	// A program that only root can run is not linked, also if it was before.
	expect.NoError(t, os.Chmod(source, 0o700))
	expect.NoError(t, stageOne(source, target))
	if staged, _ := os.Stat(target); staged.Mode() != 0o755 {
		t.Errorf("the program of a build with a strict umask has mode %s", staged.Mode())
	}
}

// The umask of an administrator does not close a copied program, or the parents of a new root folder, for the system user.
func TestCopyWithUmask(t *testing.T) {
	source, target := filepath.Join(t.TempDir(), "source"), filepath.Join(t.TempDir(), "target")
	expect.NoError(t, os.WriteFile(source, nil, 0o755))
	info, err := os.Stat(source)
	expect.NoError(t, err)
	root := filepath.Join(t.TempDir(), "a", "b")
	before := syscall.Umask(0o077)
	err = errors.Join(copyFile(source, target, info), makeEnterable(root))
	syscall.Umask(before)
	expect.NoError(t, err)
	for _, dir := range []string{root, filepath.Dir(root)} {
		if made, err := os.Stat(dir); err != nil || made.Mode().Perm() != 0o711 {
			t.Errorf("%s: %v, %v", dir, made.Mode(), err)
		}
	}
	if copied, err := os.Stat(target); err != nil || copied.Mode() != 0o755 {
		t.Errorf("%v, %v", copied.Mode(), err)
	}
}

// TestStageOfBuilds: a program of another Kubernetes version, or of another release, is staged although its size and time are the same, and a
// plane of another release does not serve.
func TestStageOfBuilds(t *testing.T) {
	l, state := Layout{Root: t.TempDir()}, State{Assets: t.TempDir()}
	release := version.Version
	t.Cleanup(func() { version.Version = release })
	var before string
	for _, build := range []struct{ kubernetes, release string }{{"v1.35.9", "v0.1.0"}, {"v1.36.3", "v0.1.0"}, {"v1.35.9", "v0.1.0"}, {"v1.35.9", "v0.1.1"}} {
		state.KubernetesVersion, version.Version = build.kubernetes, build.release
		for name, source := range staged(state) {
			text := []byte(build.kubernetes + build.release + name)
			expect.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(source), 0o755), os.WriteFile(source+".new", text, 0o755), os.Chtimes(source+".new", time.Time{}, time.Unix(0, 0)), os.Rename(source+".new", source)))
		}
		for range 2 {
			expect.NoError(t, stage(l, state))
			for name := range staged(state) {
				if got, err := os.ReadFile(filepath.Join(l.Bin(), name)); err != nil || string(got) != build.kubernetes+build.release+name {
					t.Errorf("%s of %+v is %q, %v", name, build, got, err)
				}
			}
		}
		if buildOf(state) == before {
			t.Errorf("%+v and the build before it have the same identity", build)
		}
		before = buildOf(state)
	}
}

func TestTrimLogs(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "etcd.log")
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	for _, test := range []struct{ write, log, old string }{
		{"12345", "12345", ""},
		{"6", "", "123456"}, // above the limit
		{"abc", "abc", "123456"},
		{"def", "", "abcdef"},
	} {
		if _, err := log.WriteString(test.write); err != nil {
			t.Fatal(err)
		}
		if err := trimLogs(dir, 5); err != nil {
			t.Fatal(err)
		}
		now, _ := os.ReadFile(path)
		old, _ := os.ReadFile(path + ".1")
		if string(now) != test.log || string(old) != test.old {
			t.Errorf("after %q: %q and %q, want %q and %q", test.write, now, old, test.log, test.old)
		}
	}
	if _, err := log.WriteString("123456"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(path+".1"), os.Mkdir(path+".1", 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := trimLogs(dir, 5); err == nil {
		t.Error("a folder was replaced by a log")
	}
	if now, _ := os.ReadFile(path); string(now) != "123456" {
		t.Errorf("a log that could not be copied now contains %q", now)
	}
}

// Users can correct invalid options. They are distinguished from problems of the box.
func TestInvalidOptions(t *testing.T) {
	l, assets, dir := Layout{Root: t.TempDir()}, testAssets(t, "v1.36.3"), t.TempDir()
	for name, test := range map[string]struct {
		options Options
		invalid bool
	}{
		"hosts":                {Options{Hosts: maxHosts + 1}, true},
		"listen":               {Options{Listen: "foo"}, true},
		"port of listen":       {Options{Listen: ":foo"}, true},
		"no certificates":      {Options{Listen: ":7443"}, false},
		"host listen address":  {Options{HostListenAddress: ":80"}, true},
		"API address":          {Options{APIAddress: ":6443"}, true},
		"feature gate":         {Options{CoreFeatureGates: "Unheard=true"}, true},
		"collector":            {Options{Tracing: collector.Flags{Endpoint: "foo"}}, true},
		"backup without every": {Options{Backup: BackupSchedule{BackupTarget: BackupTarget{To: dir}}}, true},
		"every without place":  {Options{Backup: BackupSchedule{Every: metav1.Duration{Duration: time.Hour}}}, true},
		"no folder":            {Options{Backup: BackupSchedule{BackupTarget: BackupTarget{To: dir + "/no"}, Every: metav1.Duration{Duration: time.Hour}}}, false},
	} {
		if _, err := decideState(l, assets, test.options); err == nil || errors.As(err, &InvalidOptions{}) != test.invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := decideState(l, assets, Options{Hosts: maxHosts}); err != nil {
		t.Error(err)
	}
}

func TestCheckArchive(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plane.tar.gz")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for to, want := range map[string]string{
		file: "", "s3://bucket/key": "", filepath.Dir(file): "expected the file", file + "x": "found no file", "s3://bucket": "s3://BUCKET/KEY", "s3://": "s3://BUCKET/KEY",
	} {
		err := BackupTarget{To: to, Exact: true}.CheckArchive()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", to, err)
		}
		if missing := to == file+"x"; errors.Is(err, os.ErrNotExist) != missing || errors.As(err, &InvalidOptions{}) != (want != "" && !missing) {
			t.Errorf("%s: %v", to, err)
		}
	}
}
