package doctor

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/testenv"
)

// TestRefusingChains: nft loads rules in a network namespace of its own and lists them.
func TestRefusingChains(t *testing.T) {
	for name, test := range map[string]struct {
		rules string
		want  []string
	}{
		"no rules": {"", nil},
		"a policy": {"table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }", []string{"nftables chain filter FORWARD"}},
		"the last rule of firewalld": {`table inet firewalld {
			chain policies { }
			chain filter_FORWARD { type filter hook forward priority 10; policy accept; ct state established accept; jump policies; ct state invalid drop; reject with icmpx type admin-prohibited; }
			chain filter_INPUT { type filter hook input priority 10; policy accept; drop; }
		}`, []string{"nftables chain firewalld filter_FORWARD"}},
		"a last rule with a counter and a log": {`table inet a { chain c { type filter hook forward priority 0; log prefix "x" counter drop; }; }`, []string{"nftables chain a c"}},
		"a condition":                          {"table inet a { chain c { type filter hook forward priority 0; ip saddr 10.0.0.1 drop; }; }", nil},
		"a rule that is not the last one":      {"table inet a { chain c { type filter hook forward priority 0; drop; accept; }; }", nil},
		"a chain without a hook":               {"table inet a { chain c { drop; }; }", nil},
		"a network of Capstan":                 {"table inet capstan-net { chain forward { type filter hook forward priority 0; policy drop; drop; }; }", nil},
		"the same names in two families":       {"table ip a { chain c { type filter hook forward priority 0; }; }; table ip6 a { chain c { drop; }; }", nil},
	} {
		cmd := exec.CommandContext(t.Context(), "unshare", "--net", "sh", "-c", "nft --file - && nft --json list ruleset")
		cmd.Stdin = strings.NewReader(test.rules)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := refusingChains(out); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
	const xt = `{"nftables": [{"chain": {"family": "ip", "table": "filter", "name": "FORWARD", "hook": "forward", "policy": "accept"}},
		{"rule": {"family": "ip", "table": "filter", "chain": "FORWARD", "expr": [{"counter": {}}, {"xt": {"type": "target", "name": "REJECT"}}]}}]}`
	if got := refusingChains([]byte(xt)); len(got) != 1 {
		t.Errorf("a rule of iptables: %q", got)
	}
}

func TestRefusesLegacy(t *testing.T) {
	for out, want := range map[string]bool{
		"":                    false,
		"-P FORWARD ACCEPT\n": false,
		"-P FORWARD DROP\n-A FORWARD -s 10.200.0.0/13 -j ACCEPT\n":                     true,
		"-P FORWARD ACCEPT\n-A FORWARD -j REJECT --reject-with icmp-host-prohibited\n": true,
		"-P FORWARD ACCEPT\n-A FORWARD -j DROP\n":                                      true,
		"-P FORWARD ACCEPT\n-A FORWARD -s 10.0.0.1/32 -j DROP\n":                       false,
		"-P FORWARD ACCEPT\n-A FORWARD -j DROP\n-A FORWARD -j ACCEPT\n":                false,
	} {
		if got := refusesLegacy([]byte(out)); got != want {
			t.Errorf("%q: %v", out, got)
		}
	}
}

// TestToolsAreDocumented: docs/install.md lists the same programs as `capstan doctor`.
func TestToolsAreDocumented(t *testing.T) {
	data, err := os.ReadFile(testenv.Root() + "/docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	_, sentence, _ := strings.Cut(string(data), "install these programs from the distribution: ")
	sentence, _, _ = strings.Cut(sentence, ", and the")
	var documented, wanted []string
	for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(sentence, -1) {
		documented = append(documented, name[1])
	}
	for _, tool := range tools {
		wanted = append(wanted, tool.name)
	}
	if !slices.Equal(documented, wanted) {
		t.Errorf("docs/install.md lists %q, and the program checks %q", documented, wanted)
	}
}
