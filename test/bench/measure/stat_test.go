package measure

import (
	"os"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	const rest = " S 7 4321 4321 0 -1 4194560 100 200 0 0 150 50 900 800 20 0 9 0 12345 5000000 33 18446744073709551615 1 1"
	for _, name := range []string{"manager", "two words", "a) S 9 (b"} {
		p, err := parseStat("4321 (" + name + ")" + rest)
		if want := (Stat{Parent: 7, CPU: 2 * time.Second, RSS: 33 * int64(os.Getpagesize())}); err != nil || p != want {
			t.Errorf("%s: got %+v, %v, want %+v", name, p, err, want)
		}
	}
	for _, bad := range []string{"", "4321 (short) S 7 1", "4321 (letters) S x" + rest[4:]} {
		if p, err := parseStat(bad); err == nil {
			t.Errorf("%q: got %+v and no error", bad, p)
		}
	}
}

func TestReadStat(t *testing.T) {
	p, err := ReadStat("/proc/self")
	if err != nil || p.Parent != os.Getppid() || p.RSS == 0 {
		t.Errorf("got %+v, %v, want the parent %d and some memory", p, err, os.Getppid())
	}
	if _, err := ReadStat("/proc/0"); err == nil {
		t.Error("no error for a process that does not exist")
	}
}
