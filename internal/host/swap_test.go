package host

import (
	"testing"

	"k8s.io/utils/ptr"
)

func TestSwapLimit(t *testing.T) {
	const meminfo = "MemTotal:       16777216 kB\nMemFree: 5 kB\nSwapTotal:       8388608 kB\nSwapFree:       8388608 kB\n"
	for name, test := range map[string]struct {
		version int
		meminfo string
		memory  int64
		want    int64 // -1 is no limit
		err     bool
	}{
		"cgroup v1":                {1, meminfo, 4 << 30, -1, false},
		"a quarter of the memory":  {2, meminfo, 4 << 30, 2 << 30, false},
		"more than the host has":   {2, meminfo, 64 << 30, 8 << 30, false},
		"whole MiB":                {2, "MemTotal: 3072 kB\nSwapTotal: 9999 kB\n", 1 << 20, 3 << 20, false},
		"a host without swap":      {2, "MemTotal: 1024 kB\nSwapTotal: 0 kB\n", 1 << 20, 0, false},
		"meminfo without a number": {2, "MemTotal: x kB\nSwapTotal: 0 kB\n", 1 << 20, 0, true},
		"meminfo without swap":     {2, "MemTotal: 1024 kB\n", 1 << 20, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := swapLimit(test.version, test.meminfo, test.memory)
			if (err != nil) != test.err {
				t.Fatal(err)
			}
			if value := ptr.Deref(got, -1); err == nil && value != test.want {
				t.Errorf("%d bytes, want %d", value, test.want)
			}
		})
	}
}
