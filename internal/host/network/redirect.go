package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"capstan.dev/capstan/internal/atomicfile"
)

// Redirect sends the connections of a network's machines to an endpoint on another box to a load balancer of this box, so
// that no machine depends on another box.
type Redirect struct {
	// Balancer is the id of the load balancer.
	Balancer string         `json:"balancer,omitempty"`
	Endpoint netip.AddrPort `json:"endpoint,omitzero"`
	To       netip.AddrPort `json:"to,omitzero"`
	// Virtual: the address of the endpoint is virtual, so it can be this box's own.
	Virtual bool `json:"virtual,omitempty"`
	// Host is the id of the load balancer's capstand. Box.Redirect sets it.
	Host string `json:"host,omitempty"`
}

// ChooseRedirect returns the redirection of connections to an endpoint. It leads to the first listen address (host:port) of
// the same address family in the network. An empty endpoint has none.
func ChooseRedirect(balancerID, endpoint string, listen []string, subnets []Subnet) (Redirect, error) {
	r := Redirect{Balancer: balancerID}
	if endpoint == "" {
		return r, nil
	}
	var err error
	if r.Endpoint, err = netip.ParseAddrPort(endpoint); err != nil {
		return r, err
	}
	for _, l := range listen {
		to, err := netip.ParseAddrPort(l)
		if err != nil || to.Addr().Is4() != r.Endpoint.Addr().Is4() {
			continue
		}
		for _, subnet := range subnets {
			if subnet.Prefix.Contains(to.Addr()) {
				r.To = to
				return r, nil
			}
		}
	}
	return r, fmt.Errorf("endpoint %s has no listen address of its address family in the machine network to lead to: expected one, for example %s",
		endpoint, net.JoinHostPort(subnets[len(subnets)-1].Gateway.String(), "6443"))
}

// Redirect records and applies the redirection for a load balancer. One without an endpoint ends the redirection for that
// load balancer, unless the load balancer moved to another capstand of the box.
func (b Box) Redirect(ctx context.Context, networkID string, want Redirect) error {
	return b.locked(func() error { return b.setRedirect(ctx, networkID, want, !want.Endpoint.IsValid()) })
}

// RedirectAgain is Redirect for a load balancer with a record on this capstand. It changes nothing if the load balancer moved to another
// capstand of the box.
func (b Box) RedirectAgain(ctx context.Context, networkID string, want Redirect) error {
	return b.locked(func() error { return b.setRedirect(ctx, networkID, want, true) })
}

func (b Box) setRedirect(ctx context.Context, networkID string, want Redirect, yields bool) error {
	want.Host = b.HostID
	have, err := b.redirect(networkID)
	if err == nil && (have == want || !want.Endpoint.IsValid() && have.Balancer != want.Balancer) {
		return nil
	}
	if yields {
		if moved, err := b.moved(networkID, have, want); err != nil || moved {
			return err
		}
	}
	n, ok := b.Network(networkID)
	if !ok {
		return nil // It has no rules. Ensure writes those of the record.
	}
	restore := former(b.redirectFile(networkID))
	if !want.Endpoint.IsValid() {
		err = atomicfile.Remove(b.redirectFile(networkID))
	} else {
		err = atomicfile.WriteJSON(b.redirectFile(networkID), want, 0o644)
	}
	if err != nil {
		return err
	}
	if err := b.rewriteFirewall(ctx, n); err != nil {
		return errors.Join(err, restore())
	}
	return nil
}

// moved reports whether the redirection leads to the same load balancer of another capstand that uses the network.
func (b Box) moved(networkID string, have, want Redirect) (bool, error) {
	if have.Balancer != want.Balancer || have.Host == b.HostID {
		return false, nil
	}
	users, err := b.users(networkID)
	return slices.ContainsFunc(users, func(o owner) bool { return o.Host == have.Host }), err
}

// former reads a record that is about to change. restore restores it after an error of the effect of the change, so that another attempt does
// not find the change done.
func former(path string) (restore func() error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return func() error { return atomicfile.Remove(path) }
	}
	return func() error { return atomicfile.WriteFile(path, data, 0o644) }
}

// KeepRedirect ends the redirection to a load balancer of this capstand that is not in the given list. A crash can leave a
// redirection without its load balancer.
func (b Box) KeepRedirect(ctx context.Context, networkID string, ids []string) error {
	have, err := b.redirect(networkID)
	if err != nil || have.Host != b.HostID || slices.Contains(ids, have.Balancer) {
		return err
	}
	return b.Redirect(ctx, networkID, Redirect{Balancer: have.Balancer})
}

func (b Box) redirectFile(networkID string) string {
	return filepath.Join(b.dir(networkID), "redirect.json")
}

func (b Box) redirect(networkID string) (r Redirect, err error) {
	if err := atomicfile.ReadJSON(b.redirectFile(networkID), &r); !errors.Is(err, fs.ErrNotExist) {
		return r, err
	}
	return Redirect{}, nil
}
