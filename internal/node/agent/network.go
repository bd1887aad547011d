package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/knftables"
)

const (
	cniPath = "/etc/cni/net.d/10-capstan.conflist"
	// cniState is in memory, because a machine that starts again has no pods.
	cniState = "/run/capstan-cni"
	// routeProtocol marks the agent's routes (see /etc/iproute2/rt_protos; 3 to 15 and some others are in use).
	routeProtocol = 102
)

// writeCNI writes the configuration of the pod network if it differs. ptp gives each pod a veth pair and a route, without a
// bridge, so bridge-nf-call-iptables is not needed.
func writeCNI(path string, podCIDRs []netip.Prefix) (changed bool, err error) {
	data, err := cniConfig(podCIDRs)
	if err != nil {
		return false, err
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return false, os.Chmod(path, 0o600) // An older version wrote the file with another mode.
	}
	// The temporary file is in the same folder, with a name that is not loaded: containerd reads the folder again after
	// a write or a rename in it, but not after a move into it. CIS 1.1.9: only root needs access.
	if err := os.WriteFile(path+".tmp", data, 0o600); err != nil {
		return false, err
	}
	return true, os.Rename(path+".tmp", path)
}

func cniConfig(podCIDRs []netip.Prefix) ([]byte, error) {
	type object = map[string]any
	var ranges [][]object
	var routes []object
	for _, prefix := range podCIDRs {
		ranges = append(ranges, []object{{"subnet": prefix.String()}})
		everything := "0.0.0.0/0"
		if prefix.Addr().Is6() {
			everything = "::/0"
		}
		routes = append(routes, object{"dst": everything})
	}
	data, err := json.MarshalIndent(object{
		"cniVersion": "1.0.0",
		"name":       "capstan",
		"plugins": []object{
			{"type": "ptp", "ipMasq": false, "ipam": object{
				"type": "host-local", "dataDir": cniState, "ranges": ranges, "routes": routes,
			}},
			{"type": "portmap", "capabilities": object{"portMappings": true}, "backend": "nftables", "snat": true},
		},
	}, "", "  ")
	return append(data, '\n'), err
}

// route to a node's pods.
type route struct {
	to  netip.Prefix
	via netip.Addr
}

// wantedRoutes returns the routes to the pods of all nodes except self, through the node's address of the same family.
func wantedRoutes(self string, nodes []node) []route {
	var routes []route
	for _, n := range nodes {
		if n.name == self {
			continue
		}
		for _, cidr := range n.podCIDRs {
			i := slices.IndexFunc(n.addresses, func(a netip.Addr) bool { return a.Is4() == cidr.Addr().Is4() })
			if i >= 0 {
				routes = append(routes, route{cidr.Masked(), n.addresses[i]})
			}
		}
	}
	slices.SortFunc(routes, func(a, b route) int { return a.to.Addr().Compare(b.to.Addr()) })
	return routes
}

// staleRoutes returns the agent's routes that are no longer wanted.
func staleRoutes(have, want []route) []route {
	return slices.DeleteFunc(slices.Clone(have), func(r route) bool {
		return slices.ContainsFunc(want, func(w route) bool { return w.to == r.to })
	})
}

// syncRoutes adds and removes the agent's routes and leaves other routes alone. A node that claims a network outside of the
// pod networks gets no route.
func syncRoutes(log *slog.Logger, want []route, podNetworks []netip.Prefix) error {
	want = slices.DeleteFunc(want, func(r route) bool {
		return !slices.ContainsFunc(podNetworks, func(p netip.Prefix) bool { return p.Contains(r.to.Addr()) && p.Bits() <= r.to.Bits() })
	})
	have, err := ownRoutes()
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range want {
		if slices.Contains(have, r) {
			continue
		}
		if err := netlink.RouteReplace(r.netlink()); err != nil {
			errs = append(errs, fmt.Errorf("adding the route to pods %s via %s: %w", r.to, r.via, err))
			continue
		}
		log.Info("route added", "pods", r.to, "via", r.via)
	}
	for _, r := range staleRoutes(have, want) {
		if err := netlink.RouteDel(r.netlink()); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("removing the route to pods %s via %s: %w", r.to, r.via, err))
			continue
		}
		log.Info("route removed", "pods", r.to, "via", r.via)
	}
	return errors.Join(errs...)
}

func (r route) netlink() *netlink.Route {
	return &netlink.Route{Dst: netipx.PrefixIPNet(r.to), Gw: r.via.AsSlice(), Protocol: routeProtocol}
}

func ownRoutes() ([]route, error) {
	var routes []route
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		found, err := netlink.RouteListFiltered(family, &netlink.Route{Protocol: routeProtocol}, netlink.RT_FILTER_PROTOCOL)
		if err != nil {
			return nil, err
		}
		for _, f := range found {
			to, ok1 := netipx.FromStdIPNet(orEmpty(f.Dst))
			via, ok2 := netip.AddrFromSlice(f.Gw)
			if ok1 && ok2 {
				routes = append(routes, route{to, via.Unmap()})
			}
		}
	}
	return routes, nil
}

func orEmpty(n *net.IPNet) *net.IPNet {
	if n == nil {
		return &net.IPNet{}
	}
	return n
}

// forward enables packet forwarding between the machine's pods and other machines.
func forward(ips []netip.Addr) error {
	paths := []string{"/proc/sys/net/ipv4/ip_forward"}
	if slices.ContainsFunc(ips, netip.Addr.Is6) {
		paths = append(paths, "/proc/sys/net/ipv6/conf/all/forwarding")
	}
	for _, path := range paths {
		if now, err := os.ReadFile(path); err == nil && string(now) == "1\n" {
			continue
		}
		if err := os.WriteFile(path, []byte("1"), 0); err != nil {
			return fmt.Errorf("enabling packet forwarding for pods: %w", err)
		}
	}
	return nil
}

// ownSources drops packets of pods whose source is not the address of the pod: the machine has no route to it through the link of the pod.
// NetworkPolicies compare sources, so a pod with NET_RAW could otherwise send as another one. ptp names the links. The chain is at the
// prerouting hook, because kernels before 5.19 refuse this comparison at the forward hook. Neighbour discovery passes the hook too, with
// sources that no router forwards.
var ownSources = []string{
	`iifname "veth*" ip6 saddr { ::, fe80::/10 } accept`,
	`iifname "veth*" fib saddr . iif oif missing drop`,
}

// masquerade hides the addresses of pods behind their machine for destinations outside of the pod networks, and drops forged packets. It
// replaces the table in one transaction.
func masquerade(ctx context.Context, podNetworks []netip.Prefix) error {
	nft, err := knftables.New(knftables.InetFamily, "capstan")
	if err != nil {
		return fmt.Errorf("starting nft: %w", err)
	}
	tx := nft.NewTransaction()
	tx.Add(&knftables.Table{})
	tx.Delete(&knftables.Table{})
	tx.Add(&knftables.Table{Comment: knftables.PtrTo("masquerade of pods")})
	tx.Add(&knftables.Chain{
		Name: "postrouting", Type: knftables.PtrTo(knftables.NATType),
		Hook: knftables.PtrTo(knftables.PostroutingHook), Priority: knftables.PtrTo(knftables.SNATPriority),
	})
	tx.Add(&knftables.Chain{
		Name: "prerouting", Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(knftables.PreroutingHook), Priority: knftables.PtrTo(knftables.FilterPriority),
	})
	for _, rule := range ownSources {
		tx.Add(&knftables.Rule{Chain: "prerouting", Rule: rule})
	}
	for _, rule := range masqueradeRules(podNetworks) {
		tx.Add(&knftables.Rule{Chain: "postrouting", Rule: rule})
	}
	if err := nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("writing the nftables rules that masquerade pods: %w", err)
	}
	return nil
}

func masqueradeRules(podNetworks []netip.Prefix) []string {
	var rules []string
	for _, family := range []struct {
		ip, multicast string
		is6           bool
	}{{"ip", "224.0.0.0/4", false}, {"ip6", "ff00::/8", true}} {
		for _, from := range podNetworks {
			if from.Addr().Is6() != family.is6 {
				continue
			}
			for _, to := range podNetworks {
				if to.Addr().Is6() == family.is6 {
					rules = append(rules, fmt.Sprintf("%s saddr %s %s daddr != { %s, %s } masquerade fully-random", family.ip, from, family.ip, to, family.multicast))
				}
			}
		}
	}
	return rules
}
