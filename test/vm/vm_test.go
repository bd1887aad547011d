//go:build vm

// Package vm tests Capstan in a guest with Debian 12: its own kernel, systemd, unified cgroup v2 and AppArmor. QEMU emulates
// the processor, so a run takes about an hour.
//
// Layer: main. Allowed imports: api, library, contract, reconciler, manager, host, node, tool.
package vm

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

// TestDebian boots the guest and follows its serial port. The guest's script reports each step.
func TestDebian(t *testing.T) {
	command(t, nil, "test/vm/image.sh", append([]string{folder()}, packages(t)...)...)
	guest := exec.Command("qemu-system-x86_64", append([]string{"-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "6144",
		"-nographic", "-nic", "none", "-monitor", "none", "-serial", "stdio",
		"-kernel", filepath.Join(folder(), "vmlinuz"), "-initrd", filepath.Join(folder(), "initrd.img"),
		"-drive", "if=virtio,format=raw,cache=unsafe,file=" + filepath.Join(folder(), "disk.img")}, console()...)...)
	guest.Stderr = os.Stderr
	serial, err := guest.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	record, err := os.Create(filepath.Join(folder(), "serial.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer record.Close()
	if err := guest.Start(); err != nil {
		t.Fatal(err)
	}
	hung := time.AfterFunc(silence, func() { _ = guest.Process.Kill() })
	complete := follow(t, io.TeeReader(serial, record), func() { hung.Reset(silence) })
	err = guest.Wait()
	hung.Stop()
	if err != nil {
		t.Errorf("the guest ended: %v", err)
	}
	if !complete {
		t.Errorf("the guest did not complete the steps; see %s", record.Name())
	}
}

// console returns the arguments for the guest's kernel. If CAPSTAN_VM_SHELL is set, bin/vm/shell.sock is a root shell in the
// guest, and a guest whose step failed stays up until it is examined. "systemctl poweroff" ends it.
func console() []string {
	// An emulated clock and an emulated timer cost a switch to another thread for each access. So the guest reads the processor's
	// counter, and its timers have the resolution of a tick.
	kernel := "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=false tsc=reliable clocksource=tsc highres=off mitigations=off"
	if os.Getenv("CAPSTAN_VM_SHELL") == "" {
		return []string{"-append", kernel}
	}
	return []string{"-append", kernel + " capstan.shell", "-device", "virtio-serial", "-device", "virtserialport,chardev=shell,nr=1",
		"-chardev", "socket,id=shell,server=on,wait=off,path=" + filepath.Join(folder(), "shell.sock")}
}

// report is a line of the guest's script, behind the prefix of systemd.
var report = regexp.MustCompile(`VM: (start|pass|fail|log:|complete)\s?(.*)$`)

// follow prints the guest's reports and returns whether all steps have passed.
func follow(t *testing.T, serial io.Reader, alive func()) (complete bool) {
	lines := bufio.NewScanner(serial)
	for lines.Scan() {
		found := report.FindStringSubmatch(strings.TrimRight(lines.Text(), "\r"))
		if found == nil {
			continue
		}
		alive()
		switch t.Log(found[1], found[2]); found[1] {
		case "fail":
			t.Errorf("failed: %s", found[2])
		case "complete":
			complete = true
		}
	}
	return complete
}
