package machinedisk

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/projectquota"
	"capstan.dev/capstan/internal/testenv/expect"
)

// enforced returns whether the file system of a folder enforces limits of projects.
func enforced(t *testing.T, dir string) bool {
	t.Helper()
	err := projectquota.Own(dir, dir)
	if err != nil {
		t.Log(err)
	}
	return err == nil
}

// TestQuotas: what the probe says about the kernel is true for a disk, also after it was attached again. A kernel without project quotas
// says so, and its disks without them work. `make test-quota` runs this test with a kernel that has them.
func TestQuotas(t *testing.T) {
	dir := t.TempDir()
	expect.NoError(t, os.WriteFile(filepath.Join(dir, "quota-probe"), []byte("killed during a probe"), 0o600))
	problem := ProbeQuotas(ctx(t), dir)
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("the probe leaves %v, %v", entries, err)
	}
	d := newDisk(t)
	d.Quotas = true
	expect.NoError(t, d.Create(ctx(t), size))
	err := d.Attach(ctx(t))
	if problem != nil {
		if os.Getenv("CAPSTAN_KERNEL") != "" {
			t.Fatalf("the kernel of this guest has no project quotas: %v", problem)
		}
		if !strings.Contains(problem.Error(), "CONFIG_QFMT_V2") || err == nil || !strings.Contains(err.Error(), "CONFIG_QFMT_V2") {
			t.Errorf("the probe says %v, the disk %v; want both to name CONFIG_QFMT_V2", problem, err)
		}
	} else {
		expect.NoError(t, err)
		expect.NoError(t, d.Detach(ctx(t)))
		expect.NoError(t, d.Attach(ctx(t)))
		if !enforced(t, d.Dir) {
			t.Error("the disk does not enforce limits")
		}
	}
	plain := newDisk(t)
	plain.Quotas = false
	expect.NoError(t, plain.Create(ctx(t), size))
	expect.NoError(t, plain.Attach(ctx(t)))
	if enforced(t, plain.Dir) {
		t.Error("a disk without quotas enforces limits")
	}
}
