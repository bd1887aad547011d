package network

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/knftables"
)

// ruleset is the nftables table of a network, with its rules by chain.
type ruleset struct {
	family          knftables.Family
	networkID, cidr string
	chains          []knftables.Chain
	rules           map[string][]string
}

// ruleset returns the rules of a network.
func (b Box) ruleset(n Network, subnets []Subnet) (ruleset, error) {
	if n.LAN != nil {
		return b.lanFilter(n)
	}
	f, err := b.firewall(n, subnets)
	if err != nil {
		return ruleset{}, err
	}
	return f.ruleset(), nil
}

func (r ruleset) write(ctx context.Context) error {
	nft, err := nftTable(r.family, r.networkID)
	if err != nil {
		return err
	}
	tx := nft.NewTransaction()
	table := &knftables.Table{Comment: knftables.PtrTo("capstan network " + r.cidr)}
	tx.Add(table)
	tx.Delete(&knftables.Table{}) // In one transaction, so that the network always has rules.
	tx.Add(table)
	for _, chain := range r.chains { // All of them first, because rules refer to chains.
		tx.Add(&chain)
	}
	for _, chain := range r.chains {
		for _, rule := range r.rules[chain.Name] {
			tx.Add(&knftables.Rule{Chain: chain.Name, Rule: rule})
		}
	}
	if err := nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("writing the nftables rules of network %s: %w", r.networkID, err)
	}
	return nil
}

// exists returns whether each chain of the network has the expected number of rules. It does not compare the rules,
// because programs that flush the firewall remove all rules of a chain, a table or the box.
func (r ruleset) exists() (bool, error) {
	for chain, want := range r.rules {
		have, err := countRules(r.family, TableName(r.networkID), chain)
		if err != nil {
			return false, fmt.Errorf("reading nftables rules of network %s: %w", r.networkID, err)
		}
		if have != len(want) {
			return false, nil
		}
	}
	return true, nil
}

// countRules asks the kernel for the number of rules of a chain. A missing chain or table has none. It does not parse the rules: package
// nftables cannot parse `ct original`, whose direction has one byte.
func countRules(family knftables.Family, table, chain string) (int, error) {
	number := uint8(unix.NFPROTO_INET)
	if family == knftables.BridgeFamily {
		number = unix.NFPROTO_BRIDGE
	}
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: number, Version: nl.NFNETLINK_V0})
	request.AddData(nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(table)))
	request.AddData(nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(chain)))
	rules, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, nl.ErrDumpInterrupted) {
		err = nil // Another program changes rules. This is an event, after which the rules are counted again.
	}
	return len(rules), err
}

// deleteTable removes the rules of a network in a family, if there are any.
func deleteTable(ctx context.Context, family knftables.Family, networkID string) error {
	nft, err := nftTable(family, networkID)
	if err != nil {
		return err
	}
	tx := nft.NewTransaction()
	tx.Add(&knftables.Table{}) // Adding the table first makes the deletion of a missing table succeed.
	tx.Delete(&knftables.Table{})
	return nft.Run(ctx, tx)
}

func nftTable(family knftables.Family, networkID string) (knftables.Interface, error) {
	nft, err := knftables.New(family, TableName(networkID))
	if err != nil {
		return nil, fmt.Errorf("starting nft: %w; install the nftables package", err)
	}
	return nft, nil
}
