package fencing

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/host/proc"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testnetns"
)

// TestMain runs the guard, as capstand does: KeepGuard starts its own program.
func TestMain(m *testing.M) {
	if len(os.Args) > 3 && os.Args[1] == "guard" {
		_ = Guard(context.Background(), os.Args[3], slog.New(slog.DiscardHandler))
		return
	}
	os.Exit(m.Run())
}

func TestDeadline(t *testing.T) {
	for _, tc := range []struct{ stopAfter, manager, host, want time.Duration }{
		{60, 0, 0, 0}, // no contact in this boot
		{60, 100, 0, 160},
		{60, 0, 100, 160},
		{60, 100, 200, 260},
		{60, 200, 100, 260},
	} {
		if got := expiresAt(tc.stopAfter, tc.manager, tc.host); got != tc.want {
			t.Errorf("%v: %d", tc, got)
		}
	}
	if got := Expired([]Lease{{"a", 10}, {"b", 11}, {"c", 9}}, 10); !slices.Equal(got, []string{"a", "c"}) {
		t.Errorf("expired: %v", got)
	}
}

func TestValid(t *testing.T) {
	many := Settings{}
	for i := range maxSettings + 1 {
		many[strings.Repeat("x", i)] = 60
	}
	nonce := strings.Repeat("n", 26)
	for name, tc := range map[string]struct {
		m    message
		want bool
	}{
		"a probe":         {message{Nonce: nonce, Settings: Settings{"plane": 60}}, true},
		"no nonce":        {message{Settings: Settings{"plane": 60}}, false},
		"a long nonce":    {message{Nonce: strings.Repeat("n", 65)}, false},
		"too many":        {message{Nonce: nonce, Settings: many}, false},
		"never":           {message{Nonce: nonce, Settings: Settings{"plane": 0}}, false},
		"later than ever": {message{Nonce: nonce, Settings: Settings{"plane": 3601}}, false},
		"a long id":       {message{Nonce: nonce, Settings: Settings{strings.Repeat("x", 129): 60}}, false},
	} {
		if got := tc.m.valid(); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestForget(t *testing.T) {
	m := Memory{
		Probed:  map[string]map[string]Probed{"n": {"peer": {At: 1}, "left": {At: 1}, "lately": {At: probedLife}}},
		Reached: map[string]time.Duration{"n": 1, "gone": 1},
	}
	m.forget(2*probedLife, map[string][]string{"n": {"peer"}})
	if len(m.Probed["n"]) != 2 || m.Probed["n"]["left"].At != 0 || len(m.Reached) != 1 {
		t.Errorf("left: %+v", m)
	}
}

// open returns the fence of a host in its own folder.
func open(t *testing.T, dir string) *Fence {
	t.Helper()
	f, err := Open(filepath.Join(dir, "fencing.json"), filepath.Join(dir, "run", "memory.json"), dir, "/none/", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return f
}

// Two hosts probe each other on addresses of the loopback device. A contact of either extends the lease, one that is forged does
// not, and the memory survives capstand.
func TestProbes(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	lo, err := testnetns.LoopbackUp()
	if err != nil {
		t.Fatal(err)
	}
	for _, address := range []string{"fd00::2/128", "fd00::3/128"} {
		parsed, err := netlink.ParseAddr(address)
		if err == nil {
			err = netlink.AddrAdd(lo, parsed)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Run("IPv4", func(t *testing.T) {
		probeEachOther(t, netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.3"))
	})
	t.Run("IPv6", func(t *testing.T) { probeEachOther(t, netip.MustParseAddr("fd00::2"), netip.MustParseAddr("fd00::3")) })
}

func probeEachOther(t *testing.T, a, b netip.Addr) {
	tunnelA, tunnelB := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	dir := t.TempDir()
	fa, fb := open(t, dir), open(t, t.TempDir())
	m := Machine{ID: "m", Network: "n", ManagementCluster: "plane"}
	if _, err := fa.Set("plane", 60); err != nil {
		t.Fatal(err)
	}
	if _, bound := fa.Deadline(m); bound {
		t.Error("the machine of a network on one host can be stopped")
	}
	toB, toA := Network{"n", a, map[netip.Addr]netip.Addr{b: tunnelB}}, Network{"n", b, map[netip.Addr]netip.Addr{a: tunnelA}}
	fa.SetNetworks([]Network{toB})
	before, bound := fa.Deadline(m)
	if !bound {
		t.Fatal("the machine is never stopped")
	}
	fa.Step([]Machine{m})
	if now, _ := fa.Deadline(m); now != before {
		t.Error("a contact without another host")
	}
	if ctx, cancel := context.WithTimeout(t.Context(), time.Minute); !Reachable(ctx, a, b) {
		t.Error("the kernel of a box without capstand does not answer")
		cancel()
	} else {
		cancel()
	}
	fa.probers["n"].answered(message{Nonce: "forged", Answer: true}, b)
	if now, _ := fa.Deadline(m); now != before {
		t.Error("an answer with another number counts")
	}
	start := time.Now()
	fb.SetNetworks([]Network{toA})
	expect.True(t, "a contact extends the lease", func() bool {
		fa.Step([]Machine{m})
		now, _ := fa.Deadline(m)
		return now > before
	})
	contacts, recorded := fb.Contacts("n", &toA)
	if len(contacts) != 1 || contacts[0].Host != tunnelA.String() || contacts[0].Settings["plane"] != 60 || contacts[0].Age > time.Since(start) || recorded < contacts[0].Age {
		t.Errorf("contacts of b: %+v", contacts)
	}

	fb.mu.Lock()
	fb.saved = false // The disk is full: an answer without a record could be forgotten.
	fb.mu.Unlock()
	expect.True(t, "a probe without an answer, as it is not recorded", func() bool { // Earlier answers can be under way.
		before, _ = fa.Deadline(m)
		fa.Step([]Machine{m})
		return !waitFor(100*time.Millisecond, func() bool { now, _ := fa.Deadline(m); return now > before })
	})
	fa.Close()
	if next := open(t, dir); next.memory.Reached["n"] != fa.memory.Reached["n"] || next.settings["plane"] != 60 || len(next.memory.Leases) != 1 {
		t.Errorf("after a restart: %+v", next.memory)
	}
}

// Two capstands of a box have one address in the overlay. Both reach other hosts, so neither stops machines when only the management plane
// is lost. One of them answers other hosts: the second one as soon as the first one has ended.
func TestTwoCapstandsOnOneBox(t *testing.T) {
	if !testnetns.Run(t) {
		return
	}
	if _, err := testnetns.LoopbackUp(); err != nil {
		t.Fatal(err)
	}
	box, other := netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.3")
	tunnel := netip.MustParseAddr("192.0.2.1")
	first, second, far := open(t, t.TempDir()), open(t, t.TempDir()), open(t, t.TempDir())
	toOther := []Network{{"n", box, map[netip.Addr]netip.Addr{other: netip.MustParseAddr("192.0.2.2")}}}
	toBox := []Network{{"n", other, map[netip.Addr]netip.Addr{box: tunnel}}}
	m := Machine{ID: "m", Network: "n", ManagementCluster: "plane"}
	for _, f := range []*Fence{first, second, far} {
		if _, err := f.Set("plane", 60); err != nil {
			t.Fatal(err)
		}
	}
	first.SetNetworks(toOther)
	second.SetNetworks(toOther)
	far.SetNetworks(toBox)
	extended := func(f *Fence) func() bool {
		before, _ := f.Deadline(m)
		return func() bool {
			f.Step([]Machine{m})
			now, _ := f.Deadline(m)
			return now > before
		}
	}
	expect.True(t, "the first capstand reaches the other host", extended(first))
	expect.True(t, "the second capstand reaches the other host", extended(second))
	expect.True(t, "the other host reaches the box", extended(far))
	answered := func() bool {
		contacts, _ := second.Contacts("n", &toOther[0])
		return len(contacts) == 1 && contacts[0].Settings["plane"] == 60
	}
	second.probers["n"].handle(message{Nonce: strings.Repeat("n", 26), Settings: Settings{"plane": 60}}, netip.AddrPortFrom(other, Port))
	if answered() {
		t.Error("the second capstand accepts probes at a port that no firewall protects")
	}
	first.Close()
	second.SetNetworks(toOther)
	expect.True(t, "the second capstand answers after the end of the first one", func() bool { far.Step([]Machine{m}); return answered() })
	expect.True(t, "the second capstand still reaches the other host", extended(second))
}

// waitFor returns whether f becomes true in time.
func waitFor(d time.Duration, f func() bool) bool {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if f() {
			return true
		}
	}
	return false
}

// A connected manager renews the lease, and its end does not.
func TestManagerRenewsTheLease(t *testing.T) {
	f := open(t, t.TempDir())
	f.settings["plane"], f.hosts["n"] = 1, 1
	f.memory.Since = 1
	m := Machine{ID: "m", Network: "n", ManagementCluster: "plane"}
	if got := f.Step([]Machine{m}); !slices.Equal(got, []string{"m"}) {
		t.Errorf("without contact %v expired", got)
	}
	f.Begin("n")
	if got := f.Step([]Machine{m}); got != nil {
		t.Errorf("%v expired when its network got another host", got)
	}
	end := f.Connected("plane")
	if got := f.Step([]Machine{m}); got != nil {
		t.Errorf("with a manager %v expired", got)
	}
	end()
	expect.True(t, "the lease expires", func() bool { return len(f.Step([]Machine{m})) == 1 })
	f.Connected("other")
	if got := f.Step([]Machine{m}); got == nil {
		t.Error("the manager of another management cluster renews the lease")
	}
}

// The settings are on a disk that can hang. Leases do not wait for it.
func TestStepWhileSettingsAreWritten(t *testing.T) {
	f := open(t, t.TempDir())
	f.setting.Lock() // As a write.
	set := make(chan error)
	go func() { _, err := f.Set("plane", 60); set <- err }()
	expect.True(t, "the manager is known", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.memory.Managers["plane"] > 0
	})
	f.Step(nil)
	f.setting.Unlock()
	if err := <-set; err != nil || f.Settings()["plane"] != 60 {
		t.Errorf("the settings are %v, %v", f.Settings(), err)
	}
}

// TestLeasesOnAFullDisk: the leases of a host that has contact are renewed for the guard although the folder with the memory is full.
func TestLeasesOnAFullDisk(t *testing.T) {
	dir := t.TempDir()
	run := filepath.Join(dir, "run")
	expect.NoError(t, os.Mkdir(run, 0o700))
	expect.NoError(t, unix.Mount("tmpfs", run, "tmpfs", 0, "size=16k"))
	t.Cleanup(func() { expect.NoError(t, unix.Unmount(run, 0)) })
	f := open(t, dir)
	f.settings["plane"], f.hosts["n"] = 60, 1
	f.Step([]Machine{{ID: "m", Network: "n", ManagementCluster: "plane"}})
	first, fresh := ReadMemory(f.path)
	if err := os.WriteFile(filepath.Join(run, "filler"), make([]byte, 1<<20), 0o600); fresh || !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("no memory: %v, or the disk is not full: %v", fresh, err)
	}
	f.Begin("n")
	f.Step([]Machine{{ID: "m", Network: "n", ManagementCluster: "plane"}})
	if now, fresh := ReadMemory(f.path); fresh || len(now.Leases) != 1 || now.Leases[0].Deadline <= first.Leases[0].Deadline || !f.saved {
		t.Errorf("the guard reads %+v (fresh: %v), the first deadline was %s", now, fresh, first.Leases[0].Deadline)
	}
}

// The guard marks and ends without leases.
func TestGuard(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "memory.json")
	m, _ := ReadMemory(path)
	m.Root, m.Cgroup, m.Leases = root, "/none", []Lease{{"m", boottime.Now() - time.Hour}, {"gone", 1}, {"stays", boottime.Now() + time.Hour}}
	for _, file := range []string{"machines/m/spec.json", "machines/stays/spec.json"} {
		if err := write(filepath.Join(root, file)); err != nil {
			t.Fatal(err)
		}
	}
	if err := atomicfile.WriteJSON(path, m, 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- Guard(t.Context(), path, slog.New(slog.DiscardHandler)) }()
	on := marks(root, path)
	expect.True(t, "the machine is marked", func() bool { return atomicfile.Exists(on.onDisk("m")) })
	if on.marked("stays") || atomicfile.Exists(filepath.Join(root, "machines/gone")) {
		t.Error("another machine is marked")
	}
	m.Leases = nil
	if err := atomicfile.WriteJSON(path, m, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// After an upgrade of capstand, the guard of the earlier version is replaced. A capstand that starts again keeps the guard of its version.
func TestGuardIsReplaced(t *testing.T) {
	f := open(t, t.TempDir())
	f.settings["plane"], f.hosts["n"] = 60, 1
	f.Step([]Machine{{ID: "m", Network: "n", ManagementCluster: "plane"}})
	old, err := proc.Start(exec.Command("sleep", "600"))
	expect.NoError(t, err)
	expect.NoError(t, atomicfile.WriteJSON(f.path+".guard", old, 0o600))
	f.KeepGuard(nil)
	guard := f.guard
	process, err := guard.Open()
	expect.NoError(t, err)
	t.Cleanup(func() { expect.NoError(t, errors.Join(process.Signal(unix.SIGKILL), process.Close())) })
	expect.True(t, "the old guard ends", func() bool { return !old.Alive() })
	expect.True(t, "the new guard runs the program of capstand", func() bool { return guard.Alive() && !guard.Outdated() })
	f.guard = nil // As in another capstand.
	if f.KeepGuard(nil); *f.guard != *guard {
		t.Errorf("the guard %v is replaced by %v", guard, f.guard)
	}
}

func write(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return os.WriteFile(path, nil, 0o600)
}
