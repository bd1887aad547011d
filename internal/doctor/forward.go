package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"os/exec"
	"regexp"
	"strings"
)

// forwardDrop returns the names of the firewall chains that drop or reject forwarded packets by default; none if they cannot be listed.
func forwardDrop(ctx context.Context) (names []string) {
	if out, err := exec.CommandContext(ctx, "nft", "--json", "list", "ruleset").Output(); err == nil {
		names = refusingChains(out)
	}
	if out, err := exec.CommandContext(ctx, "iptables-legacy", "-S", "FORWARD").Output(); err == nil && refusesLegacy(out) {
		names = append(names, "iptables-legacy chain FORWARD")
	}
	return names
}

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

// refusingChains returns the chains for forwarded packets whose policy or last rule refuses each packet that reaches it. It does not follow
// jumps. Capstan's own tables refuse only packets of its networks.
func refusingChains(data []byte) (names []string) {
	var all ruleset
	if json.Unmarshal(data, &all) != nil {
		return nil
	}
	last := map[chain]*rule{}
	for _, o := range all.Nftables {
		if o.Rule != nil {
			last[chain{Family: o.Rule.Family, Table: o.Rule.Table, Name: o.Rule.Chain}] = o.Rule
		}
	}
	for _, o := range all.Nftables {
		if o.Chain == nil || o.Chain.Hook != "forward" || strings.HasPrefix(o.Chain.Table, "capstan-") {
			continue
		}
		final := last[chain{Family: o.Chain.Family, Table: o.Chain.Table, Name: o.Chain.Name}]
		if o.Chain.Policy == "drop" || final != nil && final.refusesAll() {
			names = append(names, "nftables chain "+o.Chain.Table+" "+o.Chain.Name)
		}
	}
	return names
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
var legacyRefusal = regexp.MustCompile(`^-A FORWARD -j (DROP|REJECT)( --reject-with \S+)?$`)

// refusesLegacy reports whether the policy or the last rule of the chain in the output of iptables -S refuses each packet.
func refusesLegacy(out []byte) bool {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return bytes.Contains(out, []byte("-P FORWARD DROP")) || legacyRefusal.MatchString(lines[len(lines)-1])
}
