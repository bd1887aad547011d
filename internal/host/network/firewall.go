package network

import (
	"context"
	"fmt"
	"net"

	"github.com/google/nftables"
	"sigs.k8s.io/knftables"
)

// rules returns the rules of a network by chain. They work with bridge-nf-call-iptables on and off. If it is on, frames
// between ports of the bridge pass through prerouting and forward, with the bridge as their interface.
//
// The rules do not limit connections from the box to its machines, because the box does not forward these packets. They do
// not limit connections to the load balancer either, because it runs on the box and must be reachable from outside.
func rules(bridge string, mac net.HardwareAddr, subnets []Subnet) map[string][]string {
	var masquerade []string
	for _, subnet := range subnets {
		ip := "ip"
		if subnet.Prefix.Addr().Is6() {
			ip = "ip6"
		}
		// A connection from the box to its own load balancer has a source address in the subnet and leaves through lo.
		// Masquerading would replace the source by the address of another link, and the kernel drops the connection when
		// that address is removed.
		masquerade = append(masquerade, fmt.Sprintf("%s saddr %s oifname != { %s, lo } masquerade", ip, subnet.Prefix, bridge))
	}
	return map[string][]string{
		// The box must not track connections between machines. Two clusters may have equal Pod networks, and connection
		// tracking would confuse their connections.
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
		return fmt.Errorf("starting nft: %w; install the nftables package", err)
	}
	tx := nft.NewTransaction()
	comment := knftables.PtrTo("capstan network " + subnets[0].Prefix.String())
	tx.Add(&knftables.Table{Comment: comment})
	tx.Delete(&knftables.Table{}) // In one transaction, so that the network always has rules.
	tx.Add(&knftables.Table{Comment: comment})
	all := rules(BridgeName(networkID), mac, subnets)
	for _, chain := range chains {
		tx.Add(&chain)
		for _, rule := range all[chain.Name] {
			tx.Add(&knftables.Rule{Chain: chain.Name, Rule: rule})
		}
	}
	if err := nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("writing the nftables rules of network %s: %w", networkID, err)
	}
	return nil
}

// hasFirewall returns whether each chain of the network has the expected number of rules. It does not compare the rules,
// because programs that flush the firewall remove all rules of a chain, a table or the box.
func hasFirewall(networkID string, subnets []Subnet) (bool, error) {
	nft, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("nftables: %w", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: TableName(networkID)}
	for chain, want := range rules(BridgeName(networkID), nil, subnets) {
		have, err := nft.GetRules(table, &nftables.Chain{Table: table, Name: chain}) // A missing table has no rules.
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
		return fmt.Errorf("starting nft: %w; install the nftables package", err)
	}
	tx := nft.NewTransaction()
	tx.Add(&knftables.Table{}) // Adding the table first makes the deletion of a missing table succeed.
	tx.Delete(&knftables.Table{})
	return nft.Run(ctx, tx)
}
