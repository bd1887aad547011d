package networkpolicy

import (
	"context"
	"fmt"

	"sigs.k8s.io/knftables"
)

// Apply replaces all rules in one transaction, so that no packet passes without rules. Without chains there is no table.
func Apply(ctx context.Context, chains []Chain) error {
	nft, err := knftables.New(knftables.InetFamily, "capstan-network-policy")
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	tx := nft.NewTransaction()
	tx.Add(&knftables.Table{}) // so that the next step finds one
	tx.Delete(&knftables.Table{})
	if len(chains) > 0 {
		tx.Add(&knftables.Table{Comment: knftables.PtrTo("NetworkPolicies of the pods on this node")})
	}
	for _, chain := range chains {
		object := &knftables.Chain{Name: chain.Name}
		if chain.Name == Ingress || chain.Name == Egress {
			object.Type = knftables.PtrTo(knftables.FilterType)
			object.Hook = knftables.PtrTo(knftables.ForwardHook)
			object.Priority = knftables.PtrTo(knftables.FilterPriority)
		}
		tx.Add(object)
	}
	for _, chain := range chains {
		for _, rule := range chain.Rules {
			tx.Add(&knftables.Rule{Chain: chain.Name, Rule: rule})
		}
	}
	if err := nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("enforcing NetworkPolicies: %w", err)
	}
	return nil
}
