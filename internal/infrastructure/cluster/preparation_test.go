package cluster

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/reconciling"
)

// ALL-15: the waits are bounded, and apply only to Capstan's own kind of control plane.
func TestRemaining_ALL15(t *testing.T) {
	ours := clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: controlplanev1.ControlPlaneKind}
	kubeadm := clusterv1.ContractVersionedObjectReference{APIGroup: "controlplane.cluster.x-k8s.io", Kind: "KubeadmControlPlane"}
	for name, tc := range map[string]struct {
		ref    clusterv1.ContractVersionedObjectReference
		done   bool
		waited time.Duration
		limit  time.Duration
		want   time.Duration
	}{
		"the boot waits for the preparation":                  {ref: ours, waited: 4 * time.Second, limit: prepareWait, want: 6 * time.Second},
		"until all is prepared":                               {ref: ours, done: true, waited: time.Second, limit: prepareWait},
		"but not longer than ten seconds":                     {ref: ours, waited: 11 * time.Second, limit: prepareWait},
		"the preparation of KubeadmControlPlane never":        {ref: kubeadm, limit: prepareWait},
		"the preparation of no control plane never":           {limit: prepareWait},
		"nor that of another group":                           {ref: clusterv1.ContractVersionedObjectReference{APIGroup: "example.com", Kind: "CapstanControlPlane"}, limit: prepareWait},
		"provisioned waits for the API server":                {ref: ours, waited: 20 * time.Second, limit: answerWait, want: 40 * time.Second},
		"until it answers":                                    {ref: ours, done: true, waited: time.Second, limit: answerWait},
		"but not longer than one minute":                      {ref: ours, waited: 61 * time.Second, limit: answerWait},
		"provisioned with a KubeadmControlPlane never waits":  {ref: kubeadm, limit: answerWait},
		"provisioned without a control plane does not either": {limit: answerWait},
	} {
		t.Run(name, func(t *testing.T) {
			if got := remaining(tc.ref, tc.done, tc.waited, tc.limit); got != tc.want {
				t.Errorf("remaining: got %s, want %s", got, tc.want)
			}
		})
	}
}

// ALL-15: an API server answers when the load balancer of the same cluster has a healthy backend, or core has it from the control plane.
func TestAnswers_ALL15(t *testing.T) {
	lb := func(name string, healthy bool) *hostpb.LoadBalancer {
		return &hostpb.LoadBalancer{Namespace: "ns", Name: name, Backends: []*hostpb.Backend{{Name: "a"}, {Name: "b", Healthy: healthy}}}
	}
	for name, tc := range map[string]struct {
		initialized bool
		lb          *hostpb.LoadBalancer
		want        bool
	}{
		"no load balancer":                 {},
		"no healthy backend":               {lb: lb("c", false)},
		"a healthy backend":                {lb: lb("c", true), want: true},
		"a healthy backend of another one": {lb: lb("other", true)},
		"an initialized control plane":     {initialized: true, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
			cluster.Status.Initialization.ControlPlaneInitialized = &tc.initialized
			if got := answers(cluster, tc.lb); got != tc.want {
				t.Errorf("answers: got %t, want %t", got, tc.want)
			}
		})
	}
}

// ALL-15: with --strict-contract, nothing holds provisioned back.
func TestStrictContractHoldsNothing_ALL15(t *testing.T) {
	r := &Reconciler{Options: reconciling.Options{StrictContract: true}, Pool: &connections.Pool{}}
	s := &scope{cluster: &clusterv1.Cluster{}, capstan: &infrav1.CapstanCluster{}}
	s.cluster.Spec.ControlPlaneRef = clusterv1.ContractVersionedObjectReference{APIGroup: controlplanev1.GroupVersion.Group, Kind: controlplanev1.ControlPlaneKind}
	if wait, err := r.provisionDelay(t.Context(), s); wait != 0 || err != nil {
		t.Errorf("provisionDelay: %s, %v", wait, err)
	}
}

// A cluster waits for others only if it could boot now, and not on an unknown host.
func TestNeedsTurn(t *testing.T) {
	for name, tc := range map[string]struct {
		mode     infrav1.LoadBalancerMode
		prepared bool
		waited   time.Duration
		want     bool
	}{
		"ready to boot":        {mode: infrav1.LoadBalancerManaged, prepared: true, want: true},
		"not prepared":         {mode: infrav1.LoadBalancerManaged},
		"waited long enough":   {mode: infrav1.LoadBalancerManaged, prepared: true, waited: turnWait},
		"an external endpoint": {mode: infrav1.LoadBalancerExternal, prepared: true},
	} {
		t.Run(name, func(t *testing.T) {
			c := &infrav1.CapstanCluster{}
			c.Spec.LoadBalancer.Mode = tc.mode
			if got := needsTurn(c, tc.prepared, tc.waited); got != tc.want {
				t.Errorf("needsTurn: got %t, want %t", got, tc.want)
			}
		})
	}
}
