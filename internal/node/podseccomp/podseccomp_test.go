package podseccomp

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestPrefixes: each number is in exactly one prefix, and the excepted ones are in none.
func TestPrefixes(t *testing.T) {
	all := prefixes(commands)
	in := func(n uint32) (count int) {
		for _, p := range all {
			if n&p.mask == p.value {
				count++
			}
		}
		return count
	}
	for _, n := range commands {
		if in(n) != 0 {
			t.Errorf("%#x is allowed", n)
		}
		for bit := range 32 {
			if other := n ^ 1<<bit; !slices.Contains(commands, other) && in(other) != 1 {
				t.Errorf("%#x is in %d prefixes", other, in(other))
			}
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 100_000 {
		if n := random.Uint32(); !slices.Contains(commands, n) && in(n) != 1 {
			t.Fatalf("%#x is in %d prefixes", n, in(n))
		}
	}
	if len(all) > 96 {
		t.Errorf("%d rules for one system call", len(all))
	}
	if whole := prefixes(nil); len(whole) != 1 || whole[0] != (prefix{}) {
		t.Errorf("without exceptions: %v", whole)
	}
}

// TestRestrict: a profile does not allow the commands, and keeps all else.
func TestRestrict(t *testing.T) {
	for _, c := range []struct {
		name, in string
		commands bool     // the result has the rules of others
		keeps    []string // parts of the result
		lacks    []string
	}{
		{"all system calls of a list",
			`{"ociVersion":"1.2","linux":{"namespaces":[],"seccomp":{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":1,"architectures":["SCMP_ARCH_X86_64","SCMP_ARCH_X32"],"syscalls":[{"names":["read","ioctl","write","file_setattr"],"action":"SCMP_ACT_ALLOW"},{"names":["clone3"],"action":"SCMP_ACT_ERRNO","errnoRet":38},{"names":["personality"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":18446744073709551615,"op":"SCMP_CMP_EQ"}]}]}}}`,
			true,
			[]string{`"names":["read","write"]`, `"errnoRet":38`, `"defaultErrnoRet":1`, `SCMP_ARCH_X32`, `"ociVersion":"1.2"`, `18446744073709551615`, `"namespaces":[]`},
			[]string{"file_setattr"}},
		{"only ioctl", `{"linux":{"seccomp":{"defaultAction":"SCMP_ACT_KILL","syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_LOG"}]}}}`,
			true, []string{"SCMP_ACT_LOG"}, []string{`"names":[]`, "SCMP_ACT_ALLOW"}},
		{"conditions of its own", `{"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":1,"value":21505,"op":"SCMP_CMP_EQ"}]}]}}}`,
			false, []string{"21505"}, nil},
		{"ioctl is forbidden", `{"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["ioctl"],"action":"SCMP_ACT_ERRNO"}]}}}`,
			false, []string{`"names":["ioctl"]`}, nil},
		{"all is allowed", `{"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mount"],"action":"SCMP_ACT_ERRNO"}]}}}`,
			false, []string{"mount"}, nil},
		{"no profile", `{"linux":{"maskedPaths":["/proc/kcore"]}}`, false, []string{"/proc/kcore"}, []string{"seccomp", "syscalls"}},
		{"no linux", `{"process":{}}`, false, []string{"process"}, []string{"linux"}},
	} {
		data, err := Restrict([]byte(c.in))
		if err != nil || !json.Valid(data) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if strings.Contains(string(data), masked) != c.commands {
			t.Errorf("%s: the rules for ioctl: %s", c.name, data)
		}
		for _, part := range c.keeps {
			if !strings.Contains(string(data), part) {
				t.Errorf("%s: %s is gone: %s", c.name, part, data)
			}
		}
		for _, part := range c.lacks {
			if strings.Contains(string(data), part) {
				t.Errorf("%s: %s is there: %s", c.name, part, data)
			}
		}
		again, err := Restrict(data)
		if err != nil || len(again) != len(data) {
			t.Errorf("%s: a second time changes it to %s, %v", c.name, again, err)
		}
	}
	for _, bad := range []string{"", "[]", `{"linux":1}`, `{"linux":{"seccomp":{"defaultAction":"x","syscalls":1}}}`} {
		if _, err := Restrict([]byte(bad)); err == nil {
			t.Errorf("%q is a specification", bad)
		}
	}
}
