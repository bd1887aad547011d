package machine

import "testing"

// The kubelet's eviction threshold follows the size of the machine's disk.
func TestEvictionSpace(t *testing.T) {
	const mebi = 1 << 20
	for disk, want := range map[int64]int64{0: 1024 * mebi, 2 << 30: 204 * mebi, 10 << 30: 1024 * mebi, 64 << 40: 1024 * mebi} {
		if got := EvictionSpace(disk); got != want {
			t.Errorf("a machine with a disk of %d bytes evicts at %d bytes, want %d", disk, got, want)
		}
	}
}
