//go:build vm

// Package vm tests Capstan in guests with Debian 12: its own kernel, systemd, unified cgroup v2 and AppArmor. QEMU emulates
// the processor, so each test takes a quarter of an hour on an idle box, and longer beside other work.
//
// Layer: main. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package vm

import (
	"bufio"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv"
)

// silence is the longest time without a result of a step. Steps have their own limits.
const silence = 100 * time.Minute

// folder holds the base system between runs.
func folder() string { return filepath.Join(testenv.Root(), "bin", "vm") }

func command(t *testing.T, env []string, name string, args ...string) {
	t.Helper()
	c := exec.Command(name, args...)
	c.Dir, c.Env = testenv.Root(), append(os.Environ(), env...)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

// packages builds the packages of two versions.
func packages(t *testing.T) []string {
	t.Helper()
	var files []string
	for _, version := range []string{"v0.1.0-rc.1", "v0.1.0"} {
		out := filepath.Join(folder(), version)
		if err := os.RemoveAll(out); err != nil {
			t.Fatal(err)
		}
		command(t, nil, "make", "build-capstan", "VERSION="+version)
		command(t, []string{"COMPRESSION=none"}, "hack/packages.sh", version, out)
		built, err := filepath.Glob(filepath.Join(out, "*.deb"))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, built...)
	}
	return files
}

// archive builds the archive for other distributions.
func archive(t *testing.T) string {
	const version = "v0.1.0"
	out := filepath.Join(folder(), "archive")
	command(t, nil, "make", "build-capstan", "VERSION="+version)
	command(t, nil, "hack/release.sh", "plane", version, out)
	return filepath.Join(out, "assets", version, "capstan-linux-"+runtime.GOARCH+".tar.gz")
}

// TestDebian boots one guest and follows its serial port. The guest's script reports each step.
func TestDebian(t *testing.T) {
	command(t, nil, "test/vm/image.sh", append([]string{folder(), archive(t)}, packages(t)...)...)
	g := boot(t, "alone", "-nic", "none")
	for r := range g.reports {
		g.show(t, r)
	}
	g.passed(t)
}

// TestTwoGuests boots two guests with a virtual wire between them. The first one has the management plane and is a host too, and
// the second one joins. One cluster then has machines in both, behind WireGuard of the guests' kernels.
func TestTwoGuests(t *testing.T) {
	command(t, nil, "test/vm/image.sh", append([]string{folder()}, packages(t)...)...)
	wire := "addr.type=unix,addr.path=" + filepath.Join(t.TempDir(), "wire")
	plane := boot(t, "plane", nic("1", "server=on,"+wire)...)
	var host *guest
	for reports := plane.reports; reports != nil; {
		select {
		case r, more := <-reports:
			switch {
			case !more:
				reports = nil
			case r.kind == "token" && host == nil:
				// The second guest starts when it can join, because the two share the processors.
				token := filepath.Join(t.TempDir(), "token")
				if err := os.WriteFile(token, []byte(r.text), 0o600); err != nil {
					t.Fatal(err)
				}
				host = boot(t, "host", append(nic("2", wire), "-fw_cfg", "name=opt/capstan/token,file="+token)...)
			default:
				plane.show(t, r)
			}
		case r, more := <-host.next():
			if !more {
				t.Fatalf("the second guest ended; see %s", host.record.Name())
			}
			host.show(t, r)
		}
	}
	plane.passed(t)
}

// nic returns the arguments for a network device at the wire.
func nic(number, wire string) []string {
	return []string{"-netdev", "stream,id=wire," + wire, "-device", "virtio-net-pci,netdev=wire,mac=52:54:00:00:00:0" + number}
}

// guest is a running guest.
type guest struct {
	name     string
	record   *os.File
	reports  chan line
	complete bool
}

// line is a report of the guest's script.
type line struct{ kind, text string }

// boot starts a guest with a copy of the disk. It ends with the test, or after a long silence.
func boot(t *testing.T, role string, args ...string) *guest {
	record, err := os.OpenFile(filepath.Join(folder(), role+".log"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	process := exec.Command("qemu-system-x86_64", slices.Concat([]string{"-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "6144",
		"-nographic", "-monitor", "none", "-serial", "stdio",
		"-kernel", filepath.Join(folder(), "vmlinuz"), "-initrd", filepath.Join(folder(), "initrd.img"),
		"-drive", "if=virtio,format=raw,cache=unsafe,snapshot=on,file=" + filepath.Join(folder(), "disk.img")}, console(role), args)...)
	process.Stderr = os.Stderr
	process.Env = append(os.Environ(), "TMPDIR="+folder()) // of the changes to the disk
	serial, err := process.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if version, err := exec.Command(process.Path, "--version").Output(); err == nil {
		t.Logf("%s", version)
	}
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = process.Process.Kill()
		_ = process.Wait()
		_ = record.Close()
	})
	g := &guest{name: role, record: record, reports: make(chan line)}
	hung := time.AfterFunc(silence, func() { _ = process.Process.Kill() })
	t.Cleanup(func() { hung.Stop() })
	go g.follow(t.Context(), io.TeeReader(serial, record), func() { hung.Reset(silence) })
	return g
}

// next returns the reports of the guest. Without a guest there are none.
func (g *guest) next() <-chan line {
	if g == nil {
		return nil
	}
	return g.reports
}

// show prints a report.
func (g *guest) show(t *testing.T, r line) {
	switch t.Log(g.name+":", r.kind, r.text); r.kind {
	case "fail":
		t.Errorf("%s failed: %s", g.name, r.text)
	case "complete":
		g.complete = true
	}
}

// passed checks that a guest whose reports have ended has passed all steps.
func (g *guest) passed(t *testing.T) {
	if !g.complete {
		t.Errorf("the guest %s did not complete the steps; see %s", g.name, g.record.Name())
	}
}

// console returns the arguments for the guest's kernel. If CAPSTAN_VM_SHELL is set, bin/vm/ROLE.sock is a root shell in the
// guest, and a guest whose step failed stays up until it is examined. "systemctl poweroff" ends it.
func console(role string) []string {
	// An emulated clock and an emulated timer cost a switch to another thread for each access. So the guest reads the processor's
	// counter, and its timers have the resolution of a tick.
	kernel := "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=false tsc=reliable clocksource=tsc highres=off mitigations=off capstan.role=" + role
	if os.Getenv("CAPSTAN_VM_SHELL") == "" {
		return []string{"-append", kernel}
	}
	return []string{"-append", kernel + " capstan.shell", "-device", "virtio-serial", "-device", "virtserialport,chardev=shell,nr=1",
		"-chardev", "socket,id=shell,server=on,wait=off,path=" + filepath.Join(folder(), role+".sock")}
}

// report is a line of the guest's script, behind the prefix of systemd.
var report = regexp.MustCompile(`VM: (versions|start|pass|fail|log:|token|complete)\s?(.*)$`)

// follow reads the guest's reports until the guest ends.
func (g *guest) follow(ctx context.Context, serial io.Reader, alive func()) {
	defer close(g.reports)
	lines := bufio.NewScanner(serial)
	for lines.Scan() {
		found := report.FindStringSubmatch(strings.TrimRight(lines.Text(), "\r"))
		if found == nil {
			continue
		}
		alive()
		select {
		case g.reports <- line{found[1], found[2]}:
		case <-ctx.Done():
			return
		}
	}
}
