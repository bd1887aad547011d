package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Chain is a chain of the host's firewall that drops or rejects each packet that no earlier rule accepts.
type Chain struct {
	// Family as nft names it, for example inet. Hook is forward or input.
	Family, Table, Name, Hook string
	// Legacy: the chain belongs to iptables-legacy, and nft does not list it.
	Legacy bool
	// UFW: ufw writes the rules of the chain.
	UFW bool
}

func (c Chain) String() string {
	if c.Legacy {
		return "iptables-legacy chain " + c.Name
	}
	return fmt.Sprintf("nftables chain %s %s %s", c.Family, c.Table, c.Name)
}

// firewallHooks are the places of packets of machines, with the chain of iptables: to other networks, and to the load balancer, which is a
// process of the host.
var firewallHooks = []struct{ name, hook, chain, packets, consequence string }{
	{"forwarding", "forward", "FORWARD", "forwarded packets", "machines may not reach other networks"},
	{"input", "input", "INPUT", "packets to the host", "machines may not reach the load balancer of their cluster, so no cluster starts"},
}

func checkFirewall(f Facts) (results []Result) {
	for _, h := range firewallHooks {
		var names, mends []string
		for _, c := range f.Refusing {
			if c.Hook == h.hook {
				names, mends = append(names, c.String()), append(mends, c.mend())
			}
		}
		if len(names) == 0 {
			results = append(results, ok(h.name, "no firewall drops or rejects "+h.packets+" by default"))
			continue
		}
		slices.Sort(mends)
		results = append(results, Result{h.name, Warn, fmt.Sprintf("%s drops or rejects %s by default: %s", strings.Join(names, ", "), h.packets, h.consequence),
			"allow packets of the networks of clusters: " + strings.Join(slices.Compact(mends), "; ")})
	}
	return results
}

// mend returns the commands that allow the packets of machines in the chain. The names of the bridges match networks of both IP families.
func (c Chain) mend() string {
	switch {
	case c.Table == "firewalld":
		return "`firewall-cmd --permanent --zone=trusted --add-source=10.200.0.0/13` and `firewall-cmd --reload`"
	case c.UFW && c.Hook == "input":
		return "`ufw allow in on cap+`"
	case c.UFW:
		return "`ufw route allow in on cap+` and `ufw route allow out on cap+`"
	case c.ofIPTables():
		return c.iptablesMend()
	}
	return c.nftMend()
}

// ofIPTables reports whether iptables manages the chain, also through nftables.
func (c Chain) ofIPTables() bool {
	return (c.Family == "ip" || c.Family == "ip6") && c.Table == "filter" && (c.Name == "FORWARD" || c.Name == "INPUT")
}

func (c Chain) iptablesMend() string {
	program := "iptables"
	if c.Family == "ip6" {
		program = "ip6tables"
	}
	if c.Legacy {
		program += "-legacy"
	}
	last := ", and `netfilter-persistent save` to keep it after a reboot"
	if c.Legacy { // netfilter-persistent may save the rules of the other iptables.
		last = ""
	}
	if c.Hook == "input" {
		return fmt.Sprintf("`%s -I INPUT -i cap+ -j ACCEPT`", program) + last
	}
	return fmt.Sprintf("`%[1]s -I FORWARD -i cap+ -j ACCEPT` and `%[1]s -I FORWARD -o cap+ -j ACCEPT` (with Docker, in its chain DOCKER-USER)", program) + last
}

// nftMend matches the interfaces of packets. In the family bridge, these are the ports of a bridge: cables and tunnels.
func (c Chain) nftMend() string {
	keys, interfaces := []string{"iifname"}, "cap*"
	if c.Family == "bridge" {
		interfaces = "cp*"
	}
	if c.Hook == "forward" {
		keys = append(keys, "oifname")
	}
	var commands []string
	for _, key := range keys {
		commands = append(commands, fmt.Sprintf("`nft 'insert rule %s %s %s %s %q accept'`", c.Family, c.Table, c.Name, key, interfaces))
	}
	return strings.Join(commands, " and ") + ", and the same rules in the file of the chain, for example /etc/nftables.conf, to keep them after a reboot"
}

// refusingChains returns the chains of the firewall that refuse packets by default; none if they cannot be listed.
func refusingChains(ctx context.Context) (chains []Chain) {
	if out, err := exec.CommandContext(ctx, "nft", "--json", "list", "ruleset").Output(); err == nil {
		chains = refusingNFT(out)
	}
	return append(chains, refusingLegacy(ctx, "/proc/net")...)
}

// refusingLegacy returns the chains of iptables-legacy. It asks only for a table that the kernel lists in net, because the program would
// load the module of a missing one.
func refusingLegacy(ctx context.Context, net string) (chains []Chain) {
	for _, family := range []string{"ip", "ip6"} {
		tables, err := os.ReadFile(filepath.Join(net, family+"_tables_names"))
		if err != nil || !slices.Contains(strings.Fields(string(tables)), "filter") {
			continue
		}
		for _, h := range firewallHooks {
			out, err := exec.CommandContext(ctx, family+"tables-legacy", "-S", h.chain).Output()
			if err == nil && refusesLegacy(h.chain, out) {
				chains = append(chains, Chain{Family: family, Table: "filter", Name: h.chain, Hook: h.hook, Legacy: true, UFW: bytes.Contains(out, []byte(" "+ufwPrefix))})
			}
		}
	}
	return chains
}

// ufwPrefix begins the names of the chains of ufw, to which the chains of its table jump.
const ufwPrefix = "ufw"

// ruleset is what nft prints in JSON, as far as it is needed.
type ruleset struct {
	Nftables []struct {
		Chain *chain
		Rule  *rule
	}
}

type chain struct{ Family, Table, Name, Hook, Policy string }

type rule struct {
	Family, Table, Chain string
	Expr                 []map[string]json.RawMessage
}

// refusingNFT returns the chains for packets of machines whose policy or last rule refuses each packet that reaches it. It does not follow
// jumps. Capstan's own tables refuse only packets of its networks.
func refusingNFT(data []byte) (chains []Chain) {
	var all ruleset
	if json.Unmarshal(data, &all) != nil {
		return nil
	}
	last, ofUFW := map[chain]*rule{}, map[chain]bool{}
	for _, o := range all.Nftables {
		if o.Rule != nil {
			last[chain{Family: o.Rule.Family, Table: o.Rule.Table, Name: o.Rule.Chain}] = o.Rule
		}
		if o.Chain != nil && strings.HasPrefix(o.Chain.Name, ufwPrefix) {
			ofUFW[chain{Family: o.Chain.Family, Table: o.Chain.Table}] = true
		}
	}
	for _, o := range all.Nftables {
		if o.Chain == nil || o.Chain.Hook != "forward" && o.Chain.Hook != "input" || strings.HasPrefix(o.Chain.Table, "capstan-") {
			continue
		}
		c := *o.Chain
		final := last[chain{Family: c.Family, Table: c.Table, Name: c.Name}]
		if c.Policy == "drop" || final != nil && final.refusesAll() {
			chains = append(chains, Chain{Family: c.Family, Table: c.Table, Name: c.Name, Hook: c.Hook, UFW: ofUFW[chain{Family: c.Family, Table: c.Table}]})
		}
	}
	return chains
}

// refusesAll reports whether a rule drops or rejects each packet.
func (r *rule) refusesAll() bool {
	for _, statement := range r.Expr {
		for kind, value := range statement {
			switch kind {
			case "counter", "log":
			case "drop", "reject":
				return true
			case "xt": // an extension of iptables, which nft cannot print in its own words
				var target struct{ Type, Name string }
				return json.Unmarshal(value, &target) == nil && target.Type == "target" && target.Name == "REJECT"
			default:
				return false
			}
		}
	}
	return false
}

// legacyRefusal is a rule without a condition.
var legacyRefusal = regexp.MustCompile(`^-A (FORWARD|INPUT) -j (DROP|REJECT)( --reject-with \S+)?$`)

// refusesLegacy reports whether the policy or the last rule of the chain in the output of iptables -S refuses each packet.
func refusesLegacy(chain string, out []byte) bool {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return bytes.Contains(out, []byte("-P "+chain+" DROP")) || legacyRefusal.MatchString(lines[len(lines)-1])
}
