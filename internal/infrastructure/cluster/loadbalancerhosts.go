package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
)

// noteHost writes down that the load balancer is made on a host, and reports whether that is news.
func noteHost(c *infrav1.CapstanCluster, name, id string) bool {
	want := infrav1.LoadBalancerHost{Name: name, ID: id}
	list := c.Spec.LoadBalancerHosts
	i := slices.IndexFunc(list, func(h infrav1.LoadBalancerHost) bool { return h.Name == name })
	switch {
	case i >= 0 && list[i] == want:
		return false
	case i >= 0: // The name now means another host, as the removal of hostID states (CTL-13).
		list[i] = want
	default:
		c.Spec.LoadBalancerHosts = append(list, want)
	}
	return true
}

// recordHost has the host on record before anything is made there: wherever the load balancer moves to, the host
// is rid of it. The first host on record decides whether the network spans several hosts.
func (r *Reconciler) recordHost(ctx context.Context, s *scope, host *connections.Host, h *infrav1.CapstanHost) error {
	before := s.capstan.DeepCopy()
	first := len(s.capstan.Spec.LoadBalancerHosts) == 0
	if !noteHost(s.capstan, host.Name(), host.ID()) {
		return nil
	}
	if first {
		s.capstan.Spec.LoadBalancerHosts = nil
		r.reserving.Lock()
		defer r.reserving.Unlock()
		if err := r.chooseOverlay(ctx, s, h); err != nil {
			return err
		}
		noteHost(s.capstan, host.Name(), host.ID())
	}
	return r.record(ctx, s, before)
}

// leaveFormerHosts removes the load balancer, and the network, from the hosts that it has moved away from, and from those
// that have no machines of the cluster any more. It does so before the load balancer is made on its new host: two hosts of
// one box have one gateway, and there is one port for both. A host that is not connected is left when it is: that
// is an event.
func (r *Reconciler) leaveFormerHosts(ctx context.Context, s *scope) error {
	staying, err := r.hostsOf(ctx, s)
	if err != nil {
		return err
	}
	var left []infrav1.LoadBalancerHost
	var errs []error
	for _, former := range s.capstan.Spec.LoadBalancerHosts {
		if slices.Contains(staying, former.Name) {
			continue
		}
		gone, err := r.leave(ctx, s, former)
		if err != nil {
			errs = append(errs, fmt.Errorf("host %s, which had the load balancer before: %w", former.Name, err))
		}
		if gone {
			left = append(left, former)
		}
	}
	s.capstan.Spec.LoadBalancerHosts = slices.DeleteFunc(s.capstan.Spec.LoadBalancerHosts, func(h infrav1.LoadBalancerHost) bool {
		return slices.Contains(left, h)
	})
	return errors.Join(errs...)
}

// leave reports whether nothing of the cluster's load balancer and its network is on a former host any more. The network stays
// as long as machines are attached to it.
func (r *Reconciler) leave(ctx context.Context, s *scope, former infrav1.LoadBalancerHost) (gone bool, err error) {
	h := &infrav1.CapstanHost{}
	if err := r.Client.Get(ctx, client.ObjectKey{Name: former.Name}, h); err != nil {
		return false, client.IgnoreNotFound(err) // It may be created again. The deletion reports that it is missing.
	}
	if hostselection.Abandoned(h) {
		return true, nil
	}
	conn := r.Pool.Connected(former.Name)
	if conn == nil || hostselection.Mismatch(former.Name, former.ID, conn.ID()) != "" {
		return false, nil
	}
	err = remove(ctx, conn, s)
	if errors.Is(err, errNetworkInUse) {
		return false, nil
	}
	return err == nil, err
}
