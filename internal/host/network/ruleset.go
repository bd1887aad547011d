package network

import "context"

// ruleset is the nftables table of a network.
type ruleset interface {
	write(ctx context.Context) error
	// exists returns whether each chain has the expected number of rules.
	exists() (bool, error)
}

// ruleset returns the rules of a network.
func (b Box) ruleset(n Network, subnets []Subnet) (ruleset, error) {
	if n.LAN != nil {
		return b.lanFilter(n)
	}
	return b.firewall(n, subnets)
}
