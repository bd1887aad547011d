package services

import (
	"context"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
)

// maxPortHosts is the largest number of hosts of a cluster, as spec.loadBalancerHosts allows.
const maxPortHosts = 1000

// readPortHosts reads the record live if there can be one: a host that is missing in an old record would be forgotten.
func (r *Reconciler) readPortHosts(ctx context.Context, s *scope) error {
	if !s.publishesPorts() && s.capstan.Annotations[infrav1.HostPortHostsAnnotation] == "" {
		return nil
	}
	live := &infrav1.CapstanCluster{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(s.capstan), live); err != nil {
		return err
	}
	s.capstan, s.portHosts = live, hostNames(live.Annotations[infrav1.HostPortHostsAnnotation], maxPortHosts)
	return nil
}

// recordPortHosts writes the hosts that may publish ports of their own addresses. It comes before a host gets ports.
func (r *Reconciler) recordPortHosts(ctx context.Context, s *scope, hosts []string) error {
	if slices.Equal(hosts, s.portHosts) {
		return nil
	}
	err := reconciling.Change(ctx, r.LiveClient, s.capstan, func() {
		if len(hosts) == 0 {
			delete(s.capstan.Annotations, infrav1.HostPortHostsAnnotation)
			return
		}
		metav1.SetMetaDataAnnotation(&s.capstan.ObjectMeta, infrav1.HostPortHostsAnnotation, strings.Join(hosts, ","))
	})
	if err != nil {
		return fmt.Errorf("recording the hosts that publish ports: %w", err)
	}
	s.portHosts = hosts
	return nil
}

// mayHavePorts reports whether a host has to be asked for the end of ports. The record can be changed by those who can change the
// cluster, so all hosts with machines are asked while the cluster publishes ports.
func (s *scope) mayHavePorts(name string) bool {
	h := s.hosts[name]
	return slices.Contains(s.portHosts, name) || s.publishesPorts() && h.connected && len(h.machines) > 0
}

// placePorts decides which hosts publish Services at ports of their own addresses, and records the hosts.
func (r *Reconciler) placePorts(ctx context.Context, s *scope, services []accepted) (portsPlan, error) {
	plan := planPorts(services, s.hosts)
	for service, why := range plan.refused {
		r.refuse(ctx, s, service, why)
	}
	want := slices.Clone(s.portHosts)
	for _, t := range plan.targets {
		want = append(want, t.host)
	}
	slices.Sort(want)
	return plan, r.recordPortHosts(ctx, s, slices.Compact(want))
}

// settlePorts removes the hosts from the record that confirmed that they publish no ports, and those that no longer exist.
func (r *Reconciler) settlePorts(ctx context.Context, s *scope, targets []*target) error {
	if s.unsettled {
		return nil
	}
	return r.recordPortHosts(ctx, s, slices.DeleteFunc(slices.Clone(s.portHosts), func(name string) bool {
		h := s.hosts[name]
		return h == nil || h.connected && !slices.ContainsFunc(targets, func(t *target) bool { return t.claim == nil && t.host == name })
	}))
}

// refuseIdle notes the Services that clients reach at no host.
func (r *Reconciler) refuseIdle(ctx context.Context, s *scope, plan portsPlan) {
	serving, idle := map[string]bool{}, map[string]*target{}
	for _, t := range plan.targets {
		name := nameOf(t.service)
		serving[name] = serving[name] || len(t.machines) > 0 || !s.hosts[t.host].connected
		idle[name] = t
	}
	for name, t := range idle {
		if !serving[name] && s.trouble[name] == "" {
			r.refuse(ctx, s, t.service, "no host that authorises its ports has a machine that serves it. The Node of such a machine is Ready and, with externalTrafficPolicy Local, has a ready endpoint")
		}
	}
}

// portsLeft is the reason why ports may still be published after the end, or "".
func (s *scope) portsLeft() string {
	for _, name := range s.portHosts {
		if s.hosts[name] != nil {
			return fmt.Sprintf("Host %s may still publish ports: it is not connected, or it refused the request to stop publishing. If it is permanently lost, annotate the CapstanHost with %s", name, infrav1.HostAbandonedAnnotation)
		}
	}
	return ""
}
