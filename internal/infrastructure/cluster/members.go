package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/infrastructure/overlay"
	"capstan.dev/capstan/internal/reconciling"
)

// machinesOf returns the CapstanMachines of the cluster. The caller must not change them: they belong to the cache.
func (r *Reconciler) machinesOf(ctx context.Context, s *scope) ([]infrav1.CapstanMachine, error) {
	list := &infrav1.CapstanMachineList{}
	err := r.Client.List(ctx, list, reconciling.OfCluster(s.key()), client.UnsafeDisableDeepCopy)
	return list.Items, err
}

// hostsOf are the names of the hosts that shall have a part of the cluster's network.
func (r *Reconciler) hostsOf(ctx context.Context, s *scope) ([]string, error) {
	if !loadbalancer.Moves(s.capstan) {
		return []string{s.capstan.Spec.LoadBalancer.HostName}, nil
	}
	machines, err := r.machinesOf(ctx, s)
	return overlay.Hosts(s.capstan.Spec.LoadBalancer.HostName, machines), err
}

// overlayHosts are all hosts by name.
func (r *Reconciler) overlayHosts(ctx context.Context) (map[string]overlay.Host, error) {
	list := &infrav1.CapstanHostList{}
	if err := r.Client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	out, owners := map[string]overlay.Host{}, hostselection.KeyOwnersOf(list.Items)
	for i := range list.Items {
		h := &list.Items[i]
		key := owners.Admit(h, hostselection.OverlayKey(h, r.Pool))
		out[h.Name] = overlay.Host{Name: h.Name, Box: hostselection.Box(h, r.Pool), Tunnel: h.Spec.TunnelAddress, Key: key}
	}
	return out, nil
}

// member is a host that shall have a part of a cluster's network.
type member struct {
	overlay.Host
	conn *connections.Host
}

// members returns the hosts with machines of the cluster, and that of the load balancer, that can have a part of the cluster now, and a
// reason for each of the others. It leaves out hosts that may not have it.
func (r *Reconciler) members(s *scope, machines []infrav1.CapstanMachine, hosts map[string]overlay.Host, mayHave func(name string) bool) (out []member, trouble []string) {
	recorded, balancer := recordedHosts(s.capstan), hosts[s.capstan.Spec.LoadBalancer.HostName]
	for _, name := range overlay.Hosts(s.capstan.Spec.LoadBalancer.HostName, machines) {
		h, exists := hosts[name]
		if !exists || !mayHave(name) {
			continue
		}
		conn := r.Pool.Connected(name)
		if why := refusalOf(s, h, balancer, recorded[name], conn); why != "" {
			trouble = append(trouble, why)
			continue
		}
		out = append(out, member{h, conn})
	}
	return out, trouble
}

// refusalOf returns the reason why a host cannot have a part of the cluster now, or "". recorded is the id that it had before, if any.
func refusalOf(s *scope, h, balancer overlay.Host, recorded string, conn *connections.Host) string {
	if conn == nil {
		return fmt.Sprintf("Host %s is not connected: it is updated when it returns", h.Name)
	}
	if why := hostselection.Mismatch(h.Name, recorded, conn.ID()); why != "" {
		return why
	}
	if spans(s.capstan) {
		return overlayRefusal(h, balancer)
	}
	return ""
}

// isOn reports whether a host has something of the cluster.
func isOn(conn *connections.Host, s *scope) bool {
	if conn == nil {
		return false
	}
	return hasBalancer(conn, s) || slices.ContainsFunc(conn.Machines(), func(m *hostpb.Machine) bool {
		return m.GetSpec().GetNetwork().GetId() == s.capstan.Spec.ID && owner.Same(m.GetSpec().GetNetwork(), s.cluster)
	})
}

// recordMembers records all hosts before anything is made there.
func (r *Reconciler) recordMembers(ctx context.Context, s *scope, members []member) error {
	before := s.capstan.DeepCopy()
	news := false
	for _, m := range members {
		news = noteHost(s.capstan, m.Name, m.conn.ID()) || news
	}
	if !news {
		return nil
	}
	return r.record(ctx, s, before)
}

// updateMembers brings all hosts up to date at the same time. The message of NetworkReady names the hosts that are not, with the reasons
// in trouble and those of this update.
func updateMembers(s *scope, members []member, trouble []string, update func(member) error) error {
	var errs []error
	for i, err := range atOnce(members, update) {
		m := members[i]
		if err != nil {
			trouble = append(trouble, fmt.Sprintf("Host %s: %s", m.Name, connections.PublicMessage(err))+remedy(err, s.capstan))
		}
		if reconciling.IgnoreWaiting(err) != nil {
			errs = append(errs, fmt.Errorf("host %s: %w", m.Name, err))
		}
	}
	if conditions.IsTrue(s.capstan, infrav1.NetworkReadyCondition) {
		reconciling.SetCondition(s.capstan, infrav1.NetworkReadyCondition, metav1.ConditionTrue, infrav1.NetworkReadyReason, "%s", summary(trouble))
	}
	return errors.Join(errs...)
}

// atOnce calls f for all members at the same time, so that no host waits for one that does not answer, and returns the results in their
// order.
func atOnce(members []member, f func(member) error) []error {
	out := make([]error, len(members))
	var all sync.WaitGroup
	for i, m := range members {
		all.Go(func() { out[i] = f(m) })
	}
	all.Wait()
	return out
}

// balancersOf returns the names of the members that have a load balancer, or get one.
func balancersOf(s *scope, members []member) map[string]bool {
	all, have := make([]overlay.Host, 0, len(members)), map[string]bool{}
	for _, m := range members {
		all = append(all, m.Host)
		have[m.Name] = hasBalancer(m.conn, s)
	}
	return overlay.Balancers(all, s.capstan.Spec.LoadBalancer.HostName, have)
}

// hasBalancer reports whether a host has the load balancer of the cluster, also after the Cluster is gone.
func hasBalancer(conn *connections.Host, s *scope) bool {
	return conn != nil && owner.Same(conn.LoadBalancer(s.capstan.Spec.ID), deletionOf(s))
}

// ensureBalancer keeps the load balancer of a host that spec.loadBalancer does not name. It removes the load balancer from
// a host if another host of its box has it.
func (r *Reconciler) ensureBalancer(ctx context.Context, s *scope, m member, wanted bool, backends []*hostpb.Backend) error {
	h, err := r.capstanHost(ctx, m.Name)
	if err != nil {
		return err
	}
	desired := loadbalancer.Desired(s.capstan, s.key(), backends, loadbalancer.Host{Name: m.Name, Tunnel: m.Tunnel, Virtual: r.virtualAddress(s, h, m.conn)})
	// In a LAN, a load balancer has no other address.
	if wanted && (desired.GetVirtualAddress() != nil || !loadbalancer.InLAN(s.capstan)) {
		lb, err := loadbalancer.Ensure(ctx, m.conn, desired)
		if err == nil && !lb.GetServing() {
			return fmt.Errorf("%w: the load balancer does not listen: %s", reconciling.ErrWaiting, lb.GetMessage()) // A change of the load balancer is the event.
		}
		return err
	}
	if !owner.Same(m.conn.LoadBalancer(desired.GetId()), s.cluster) {
		return nil
	}
	_, err = m.conn.DeleteLoadBalancer(ctx, &hostpb.DeleteLoadBalancerRequest{Id: desired.GetId(), Namespace: desired.GetNamespace(), Name: desired.GetName()})
	return err
}

// summary returns a message with the first reasons.
func summary(trouble []string) string {
	const most = 10
	if more := len(trouble) - most; more > 0 {
		trouble = append(trouble[:most:most], fmt.Sprintf("%d more hosts are not up to date", more))
	}
	return strings.Join(trouble, "; ")
}
