// Package podseccomp keeps pods from leaving the project of their volume, which has the limit of its size. The owner of a file can change
// its project id, and whether new files of a folder inherit the id, without a capability. So the seccomp profile of a container
// must not allow the system calls for it.
//
// Layer: node. Allowed imports: api, library, contract.
package podseccomp

import (
	"encoding/json"
	"math/bits"
	"slices"

	"capstan.dev/capstan/internal/projectquota"
)

// commands are those of ioctl that change a project id (FS_IOC_FSSETXATTR), or whether files inherit it (FS_IOC_SETFLAGS, and the
// number that 32-bit programs have for it).
var commands = []uint32{projectquota.SetAttributes, 0x40086602, 0x40046602}

const (
	allow  = "SCMP_ACT_ALLOW"
	log    = "SCMP_ACT_LOG"
	ioctl  = "ioctl"
	newer  = "file_setattr" // does the same since Linux 6.17
	masked = "SCMP_CMP_MASKED_EQ"
)

// rule is a rule of a seccomp profile. Other fields are kept.
type rule struct {
	Names    []string        `json:"names"`
	Action   string          `json:"action"`
	ErrnoRet json.RawMessage `json:"errnoRet,omitempty"`
	Args     []arg           `json:"args,omitempty"`
}

type arg struct {
	Index    uint   `json:"index"`
	Value    uint64 `json:"value"`
	ValueTwo uint64 `json:"valueTwo"`
	Op       string `json:"op"`
}

func allows(action string) bool { return action == allow || action == log }

// Restrict returns the specification of a container whose profile does not allow the commands. It keeps all else. A container
// without a profile, and a profile that allows all calls that it does not name, stay as they are.
func Restrict(spec []byte) ([]byte, error) {
	var whole, linux, profile map[string]json.RawMessage
	if err := json.Unmarshal(spec, &whole); err != nil {
		return nil, err
	}
	if err := decode(whole["linux"], &linux); err != nil {
		return nil, err
	}
	if err := decode(linux["seccomp"], &profile); err != nil {
		return nil, err
	}
	var defaultAction string
	if err := decode(profile["defaultAction"], &defaultAction); err != nil {
		return nil, err
	}
	if profile == nil || allows(defaultAction) {
		return spec, nil
	}
	var rules []rule
	if err := decode(profile["syscalls"], &rules); err != nil {
		return nil, err
	}
	var err error
	if profile["syscalls"], err = json.Marshal(restrict(rules)); err != nil {
		return nil, err
	}
	if linux["seccomp"], err = json.Marshal(profile); err != nil {
		return nil, err
	}
	if whole["linux"], err = json.Marshal(linux); err != nil {
		return nil, err
	}
	return json.Marshal(whole)
}

func decode(data json.RawMessage, into any) error {
	if data == nil {
		return nil
	}
	return json.Unmarshal(data, into)
}

// restrict replaces each rule that allows all commands of ioctl. A rule with conditions of its own for ioctl stays: its author has
// selected the commands.
func restrict(rules []rule) []rule {
	var restricted []rule
	for _, r := range rules {
		if !allows(r.Action) {
			restricted = append(restricted, r)
			continue
		}
		all := slices.Contains(r.Names, ioctl) && len(r.Args) == 0
		r.Names = slices.DeleteFunc(slices.Clone(r.Names), func(name string) bool { return name == newer || all && name == ioctl })
		if len(r.Names) > 0 {
			restricted = append(restricted, r)
		}
		if all {
			restricted = append(restricted, others(r.Action)...)
		}
	}
	return restricted
}

// others returns rules for ioctl with all commands except those of this package. libseccomp has no condition for "another number than"
// that ignores the upper half of an argument, as the kernel does for a command. So each rule is for the numbers with one
// prefix of bits, as networks are, and together they contain all other numbers.
func others(action string) []rule {
	var rules []rule
	for _, p := range prefixes(commands) {
		rules = append(rules, rule{Names: []string{ioctl}, Action: action, Args: []arg{{Index: 1, Value: uint64(p.mask), ValueTwo: uint64(p.value), Op: masked}}})
	}
	return rules
}

// prefix is the set of all numbers n with n&mask == value.
type prefix struct{ mask, value uint32 }

// prefixes returns disjoint prefixes of all numbers except the given ones.
func prefixes(except []uint32) []prefix {
	var found []prefix
	var split func(p prefix)
	split = func(p prefix) {
		if !slices.ContainsFunc(except, func(n uint32) bool { return n&p.mask == p.value }) {
			found = append(found, p)
			return
		}
		if p.mask == ^uint32(0) {
			return
		}
		next := uint32(1) << (31 - bits.OnesCount32(p.mask))
		split(prefix{p.mask | next, p.value})
		split(prefix{p.mask | next, p.value | next})
	}
	split(prefix{})
	return found
}
