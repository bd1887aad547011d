package cluster

import (
	"cmp"
	"net/netip"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/loadbalancer"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/reconciling"
)

// adoptEndpoint completes the endpoint with the one that others set on the Cluster. The load balancer must listen on its port from the
// start. A field that is set stays, and an incomplete endpoint is not recorded: neither of its fields could be changed later.
func adoptEndpoint(s *scope) {
	own, others := &s.capstan.Spec.ControlPlaneEndpoint, s.cluster.Spec.ControlPlaneEndpoint
	complete := clusterv1.APIEndpoint{Host: cmp.Or(own.Host, others.Host), Port: cmp.Or(own.Port, others.Port)}
	if complete.IsValid() {
		*own = complete
	}
}

// recordEndpoint sets the empty fields of the endpoint: host and port of the load balancer.
func recordEndpoint(s *scope, on loadbalancer.Host) error {
	endpoint := &s.capstan.Spec.ControlPlaneEndpoint
	if endpoint.Host == "" {
		endpoint.Host = loadbalancer.Additional(s.capstan, on)
	}
	if endpoint.Host == "" {
		cidr, err := netip.ParsePrefix(s.capstan.Spec.Network.MachineCIDR)
		if err != nil {
			return err
		}
		endpoint.Host = network.Gateway(cidr).String()
	}
	if endpoint.Port == 0 {
		endpoint.Port = loadbalancer.Port(s.capstan)
	}
	return nil
}

// externalEndpoint waits for the endpoint that others provide (IC-14).
func externalEndpoint(s *scope) error {
	adoptEndpoint(s)
	if endpoint := s.capstan.Spec.ControlPlaneEndpoint; !endpoint.IsValid() {
		reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionFalse, infrav1.WaitingForEndpointReason,
			"spec.loadBalancer.mode is External, and the endpoint has host %q and port %d: set host and port of spec.controlPlaneEndpoint on the Cluster or here",
			endpoint.Host, endpoint.Port)
		return reconciling.ErrWaiting
	}
	reconciling.SetCondition(s.capstan, infrav1.LoadBalancerReadyCondition, metav1.ConditionTrue, infrav1.LoadBalancerExternalReason, "")
	return nil
}
