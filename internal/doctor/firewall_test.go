package doctor

import (
	"os"
	"os/exec"
	"path/filepath"
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
		want  []Chain
	}{
		"no rules": {"", nil},
		"a policy": {"table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }", []Chain{{Family: "ip", Table: "filter", Name: "FORWARD", Hook: "forward"}}},
		"the last rule of firewalld": {`table inet firewalld {
			chain policies { }
			chain filter_FORWARD { type filter hook forward priority 10; policy accept; ct state established accept; jump policies; ct state invalid drop; reject with icmpx type admin-prohibited; }
			chain filter_OUTPUT { type filter hook output priority 10; policy accept; drop; }
		}`, []Chain{{Family: "inet", Table: "firewalld", Name: "filter_FORWARD", Hook: "forward"}}},
		"a last rule with a counter and a log": {`table inet a { chain c { type filter hook forward priority 0; log prefix "x" counter drop; }; }`, []Chain{{Family: "inet", Table: "a", Name: "c", Hook: "forward"}}},
		"packets to the host": {"table inet filter { chain input { type filter hook input priority 0; policy drop; ct state established accept; tcp dport 22 accept; }; }",
			[]Chain{{Family: "inet", Table: "filter", Name: "input", Hook: "input"}}},
		"ufw": {`table ip filter {
			chain ufw-before-input { }
			chain INPUT { type filter hook input priority 0; policy drop; jump ufw-before-input; }
		}
		table ip6 filter { chain INPUT { type filter hook input priority 0; policy drop; }; }`,
			[]Chain{{Family: "ip", Table: "filter", Name: "INPUT", Hook: "input", UFW: true}, {Family: "ip6", Table: "filter", Name: "INPUT", Hook: "input"}}},
		"a condition":                     {"table inet a { chain c { type filter hook forward priority 0; ip saddr 10.0.0.1 drop; }; }", nil},
		"a rule that is not the last one": {"table inet a { chain c { type filter hook forward priority 0; drop; accept; }; }", nil},
		"a chain without a hook":          {"table inet a { chain c { drop; }; }", nil},
		"a network of Capstan":            {"table inet capstan-net { chain forward { type filter hook forward priority 0; policy drop; drop; }; }", nil},
		"the same names in two families":  {"table ip a { chain c { type filter hook forward priority 0; }; }; table ip6 a { chain c { drop; }; }", nil},
	} {
		if got := refusingNFT(inNetns(t, test.rules, "nft --json list ruleset")); !slices.Equal(got, test.want) {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
	const xt = `{"nftables": [{"chain": {"family": "ip", "table": "filter", "name": "FORWARD", "hook": "forward", "policy": "accept"}},
		{"rule": {"family": "ip", "table": "filter", "chain": "FORWARD", "expr": [{"counter": {}}, {"xt": {"type": "target", "name": "REJECT"}}]}}]}`
	if got := refusingNFT([]byte(xt)); len(got) != 1 {
		t.Errorf("a rule of iptables: %+v", got)
	}
}

// inNetns loads rules in a network namespace of their own, and returns the output of a script there.
func inNetns(t *testing.T, rules, script string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "unshare", "--net", "sh", "-euc", "nft --file -\n"+script)
	cmd.Stdin, cmd.Stderr = strings.NewReader(rules), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return out
}

// TestMendOfNFT: nft accepts the printed commands, and their rules come before the rule that refuses.
func TestMendOfNFT(t *testing.T) {
	for _, family := range []string{"ip", "ip6", "inet", "bridge"} {
		for hook, allowed := range map[string]int{"forward": 2, "input": 1} {
			chain := Chain{Family: family, Table: "filter", Name: "c", Hook: hook}
			var script string
			for _, command := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(chain.mend(), -1) {
				script += command[1] + "\n"
			}
			rules := "table " + family + " filter { chain c { type filter hook " + hook + " priority 0; drop; }; }"
			before, _, _ := strings.Cut(string(inNetns(t, rules, script+"nft list ruleset")), "\t\tdrop")
			if n := strings.Count(before, `*" accept`); n != allowed {
				t.Errorf("%s %s: %d rules before the refusing one, want %d: %s", family, hook, n, allowed, before)
			}
		}
	}
}

// TestCheckFirewall: the commands are those of the program that owns the chain.
func TestCheckFirewall(t *testing.T) {
	if mend := (Chain{Name: "INPUT", Hook: "input", Family: "ip", Table: "filter", Legacy: true}).mend(); strings.Contains(mend, "netfilter-persistent") {
		t.Errorf("netfilter-persistent may not save rules of iptables-legacy: %s", mend)
	}
	for name, test := range map[string]struct {
		chain Chain
		found string
		mend  []string
	}{
		"iptables":       {Chain{Family: "ip", Table: "filter", Name: "FORWARD", Hook: "forward"}, "nftables chain ip filter FORWARD", []string{"`iptables -I FORWARD -i cap+ -j ACCEPT`", "`iptables -I FORWARD -o cap+ -j ACCEPT`", "netfilter-persistent"}},
		"iptables input": {Chain{Family: "ip6", Table: "filter", Name: "INPUT", Hook: "input"}, "load balancer", []string{"`ip6tables -I INPUT -i cap+ -j ACCEPT`", "netfilter-persistent"}},
		"legacy":         {Chain{Family: "ip", Table: "filter", Name: "INPUT", Hook: "input", Legacy: true}, "iptables-legacy chain INPUT", []string{"`iptables-legacy -I INPUT -i cap+ -j ACCEPT`"}},
		"Debian":         {Chain{Family: "inet", Table: "filter", Name: "forward", Hook: "forward"}, "inet filter forward", []string{`iifname "cap*" accept`, `oifname "cap*" accept`, "/etc/nftables.conf"}},
		"ufw":            {Chain{Family: "ip", Table: "filter", Name: "FORWARD", Hook: "forward", UFW: true}, "FORWARD", []string{"`ufw route allow in on cap+`", "`ufw route allow out on cap+`"}},
		"ufw input":      {Chain{Family: "ip", Table: "filter", Name: "INPUT", Hook: "input", UFW: true}, "INPUT", []string{"`ufw allow in on cap+`"}},
		"firewalld":      {Chain{Family: "inet", Table: "firewalld", Name: "filter_INPUT", Hook: "input"}, "firewalld filter_INPUT", []string{"firewall-cmd --permanent --zone=trusted --add-source=10.200.0.0/13"}},
	} {
		for _, r := range checkFirewall(Facts{Refusing: []Chain{test.chain}}) {
			concerned := (r.Name == "input") == (test.chain.Hook == "input")
			if concerned != (r.Level == Warn) {
				t.Errorf("%s: %+v", name, r)
			}
			for _, part := range test.mend {
				if concerned && (!strings.Contains(r.Mend, part) || !strings.Contains(r.Found, test.found)) {
					t.Errorf("%s: %+v lacks %q or %q", name, r, test.found, part)
				}
			}
		}
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
		for _, chain := range []string{"FORWARD", "INPUT"} {
			if got := refusesLegacy(chain, []byte(strings.ReplaceAll(out, "FORWARD", chain))); got != want {
				t.Errorf("%s: %q: %v", chain, out, got)
			}
		}
	}
}

// TestRefusingLegacy: a check does not create the tables of iptables-legacy.
func TestRefusingLegacy(t *testing.T) {
	programs := t.TempDir()
	for _, name := range []string{"iptables-legacy", "ip6tables-legacy"} {
		if err := os.WriteFile(filepath.Join(programs, name), []byte("#!/bin/sh\necho \"-P $2 DROP\"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", programs)
	for name, test := range map[string]struct {
		files map[string]string
		want  string
	}{
		"no module":     {nil, ""},
		"other tables":  {map[string]string{"ip_tables_names": "nat\nraw\n", "ip6_tables_names": ""}, ""},
		"IPv4":          {map[string]string{"ip_tables_names": "nat\nfilter\n"}, "ip FORWARD ip INPUT"},
		"both families": {map[string]string{"ip_tables_names": "filter\n", "ip6_tables_names": "filter\n"}, "ip FORWARD ip INPUT ip6 FORWARD ip6 INPUT"},
	} {
		net := t.TempDir()
		for file, tables := range test.files {
			if err := os.WriteFile(filepath.Join(net, file), []byte(tables), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		var got []string
		for _, c := range refusingLegacy(t.Context(), net) {
			got = append(got, c.Family, c.Name)
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("%s: found %q, want %q", name, got, test.want)
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
