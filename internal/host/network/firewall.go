package network

import (
	"context"
	"fmt"
	"net"

	"github.com/google/nftables"
	"sigs.k8s.io/knftables"
)

// rules of a network, a chain each. They hold with bridge-nf-call-iptables on (frames that stay on the
// bridge then pass through prerouting and forward, with the bridge as their interface) and off.
//
// The box itself reaches machines, since its packets are not forwarded. The load balancer listens on
// the box and is meant to be reached by whoever has a route to the box.
func rules(bridge string, mac net.HardwareAddr, subnets []Subnet) map[string][]string {
	var masquerade []string
	for _, subnet := range subnets {
		ip := "ip"
		if subnet.Prefix.Addr().Is6() {
			ip = "ip6"
		}
		// Connections of the box to its own load balancer have a source in the subnet, too, and leave by lo. Masquerading would
		// give them the address of another link, and the kernel drops them when that address goes.
		masquerade = append(masquerade, fmt.Sprintf("%s saddr %s oifname != { %s, lo } masquerade", ip, subnet.Prefix, bridge))
	}
	return map[string][]string{
		// Frames between machines are not the box's to track: two clusters may have equal Pod networks,
		// whose connections would be mistaken for each other.
		"prerouting": {
			fmt.Sprintf("iifname %s ether daddr != %s notrack", bridge, mac),
		},
		"forward": {
			fmt.Sprintf("iifname %s oifname %s accept", bridge, bridge),
			fmt.Sprintf("oifname %s ct state established,related accept", bridge),
			fmt.Sprintf("oifname %s drop", bridge),
		},
		"postrouting": masquerade,
	}
}

var chains = []knftables.Chain{
	{Name: "prerouting", Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(knftables.PreroutingHook), Priority: knftables.PtrTo(knftables.RawPriority)},
	{Name: "forward", Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(knftables.ForwardHook), Priority: knftables.PtrTo(knftables.FilterPriority)},
	{Name: "postrouting", Type: knftables.PtrTo(knftables.NATType), Hook: knftables.PtrTo(knftables.PostroutingHook), Priority: knftables.PtrTo(knftables.SNATPriority)},
}

func ensureFirewall(ctx context.Context, networkID string, mac net.HardwareAddr, subnets []Subnet) error {
	nft, err := knftables.New(knftables.InetFamily, TableName(networkID))
	if err != nil {
		return fmt.Errorf("nftables: %w; install the nft program", err)
	}
	tx := nft.NewTransaction()
	comment := knftables.PtrTo("capstan network " + subnets[0].Prefix.String())
	tx.Add(&knftables.Table{Comment: comment})
	tx.Delete(&knftables.Table{}) // one transaction: never without rules
	tx.Add(&knftables.Table{Comment: comment})
	all := rules(BridgeName(networkID), mac, subnets)
	for _, chain := range chains {
		tx.Add(&chain)
		for _, rule := range all[chain.Name] {
			tx.Add(&knftables.Rule{Chain: chain.Name, Rule: rule})
		}
	}
	if err := nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("nftables rules of network %s: %w", networkID, err)
	}
	return nil
}

// hasFirewall says whether the network has as many rules in each chain as it should: whoever removes rules that he does not
// know removes all of a chain, of a table, or of the box.
func hasFirewall(networkID string, subnets []Subnet) (bool, error) {
	nft, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("nftables: %w", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: TableName(networkID)}
	for chain, want := range rules(BridgeName(networkID), nil, subnets) {
		have, err := nft.GetRules(table, &nftables.Chain{Table: table, Name: chain}) // none when there is no such table
		if err != nil {
			return false, fmt.Errorf("reading nftables rules of network %s: %w", networkID, err)
		}
		if len(have) != len(want) {
			return false, nil
		}
	}
	return true, nil
}

func deleteFirewall(ctx context.Context, networkID string) error {
	nft, err := knftables.New(knftables.InetFamily, TableName(networkID))
	if err != nil {
		return fmt.Errorf("nftables: %w; install the nft program", err)
	}
	tx := nft.NewTransaction()
	tx.Add(&knftables.Table{}) // so that a missing one is fine
	tx.Delete(&knftables.Table{})
	return nft.Run(ctx, tx)
}
