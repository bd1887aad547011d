package machine

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/infrastructure/fencing"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/expect"
)

// hung is a reconciler with two turns for each host, and two hosts. The first host answers no call of a method, until the test ends.
func hung(t *testing.T, method string) (r *Reconciler, calls chan string) {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, clusterv1.AddToScheme, infrav1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	b := fake.NewClientBuilder().WithScheme(scheme).WithObjects(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem, UID: "here"}})
	r = &Reconciler{Pool: connections.NewPool(t.Context(), nil), turns: reconciling.NewTurns(4, 2), recorder: events.NewFakeRecorder(100)}
	calls = make(chan string, 100)
	for _, name := range []string{"hung", "other"} {
		server := fakehost.New(t)
		h := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanHostSpec{Address: server.Address()}}
		b.WithObjects(h)
		conn, err := r.Pool.Connect(t.Context(), h)
		if err != nil {
			t.Fatal(err)
		}
		expect.True(t, "connected", func() bool { return conn.ConnectionError() == nil })
		if _, err := conn.HostClient.EnsureMachine(t.Context(), &hostpb.EnsureMachineRequest{Spec: &hostpb.MachineSpec{
			Id: "m", Namespace: "ns", Name: "m", MemoryBytes: 1 << 30, Image: "host", KubernetesVersion: "v1.36.3",
			Network:   &hostpb.Network{Id: "net", Namespace: "ns", Name: "c", Cidr: "10.200.0.0/21"},
			Addresses: []*hostpb.Address{{Address: "10.200.0.2", Prefix: 21}},
		}}); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.EnsureLoadBalancer(t.Context(), &hostpb.LoadBalancer{Id: "net", Namespace: "ns", Name: "c", NetworkId: "net", Listen: []string{":6443"}}); err != nil {
			t.Fatal(err)
		}
		expect.True(t, "the objects of the host are known", func() bool { return conn.Machine("m") != nil && conn.LoadBalancer("net") != nil })
		server.Before(method, func() {
			calls <- name
			if name == "hung" {
				<-t.Context().Done()
			}
		})
	}
	r.Client = reconciling.Live(b.Build())
	r.LiveClient = r.Client
	return r, calls
}

// Machines of a host that answers no calls occupy its turns only. The others of the host try again, and other hosts have workers.
func TestHungHost(t *testing.T) {
	for method, step := range map[string]func(*Reconciler, context.Context, *scope) error{
		"ClaimMachine":  (*Reconciler).ensureMachine,
		"DeleteMachine": (*Reconciler).deleteMachine,
		"ListContacts": func(r *Reconciler, ctx context.Context, s *scope) error {
			return r.askContacts(ctx, s, s.capstan.Spec.HostName, []fencing.Other{{Name: s.capstan.Spec.HostName, Connected: true}}, "net")
		},
		"EnsureLoadBalancer": func(r *Reconciler, ctx context.Context, s *scope) error {
			c := &infrav1.CapstanCluster{Spec: infrav1.CapstanClusterSpec{ID: "net"}}
			return r.keepBackends(ctx, s, c, s.capstan.Spec.HostName, []*hostpb.Backend{{Name: "m", Address: "10.200.0.2:6443"}})
		},
	} {
		t.Run(method, func(t *testing.T) {
			r, calls := hung(t, method)
			ctx, cancel := context.WithCancel(t.Context())
			results := make(chan error, 100)
			start := func(host string) *scope {
				s := &scope{cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}, machine: &clusterv1.Machine{}, capstan: &infrav1.CapstanMachine{
					ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "m"},
					Spec:       infrav1.CapstanMachineSpec{ID: "m", HostName: host},
				}}
				go func() { results <- step(r, ctx, s) }()
				return s
			}
			for range 2 {
				start("hung")
				<-calls
			}
			late := start("hung")
			select {
			case err := <-results:
				if !errors.Is(err, reconciling.ErrWaiting) || late.again <= 0 || len(late.capstan.Status.Conditions) > 0 {
					t.Errorf("expected another attempt, found one after %s, %v", late.again, err)
				}
			case <-calls:
				t.Fatal("a third worker waits for the host")
			}
			r.waiting.since[client.ObjectKeyFromObject(late.capstan)] = attempts{first: time.Now().Add(-longWait), last: time.Now()}
			longer := start("hung")
			condition, reason := infrav1.MachineRunningCondition, infrav1.WaitingForTurnReason
			if method == "ListContacts" {
				condition, reason = clusterv1.DeletingCondition, infrav1.DeletionBlockedReason
			}
			if err := <-results; !errors.Is(err, reconciling.ErrWaiting) || conditions.GetReason(longer.capstan, condition) != reason {
				t.Errorf("the conditions after a longer wait are %v, %v", longer.capstan.Status.Conditions, err)
			}
			start("other")
			if host := <-calls; host != "other" {
				t.Error(host)
			}
			<-results
			cancel()
			<-results
			<-results
		})
	}
}

// A condition shows a longer wait, and the wait ends with a turn, or if the machine waits for something else.
func TestWaits(t *testing.T) {
	var w turnWaits
	begun, machine, other := time.Now(), client.ObjectKey{Name: "m"}, client.ObjectKey{Name: "other"}
	attempt := func(key client.ObjectKey, after time.Duration, want bool) {
		t.Helper()
		if got := w.long(key, begun.Add(after)); got != want {
			t.Errorf("after %s: %t, want %t", after, got, want)
		}
	}
	attempt(machine, 0, false)
	attempt(machine, longWait/2, false)
	attempt(other, longWait, false)
	attempt(machine, longWait, true)
	attempt(machine, longWait+longWait/2, true)
	w.end(machine)
	attempt(machine, longWait+longWait/2, false)
	attempt(machine, 3*longWait, false)
	attempt(machine, 4*longWait-1, false)
}

// The condition is that of the step which waits. Its text does not change, so attempts write nothing. The conditions of a machine that has
// run come from reports of its host.
func TestShowWait(t *testing.T) {
	now := metav1.Now()
	for name, test := range map[string]struct {
		capstan   infrav1.CapstanMachine
		condition string
	}{
		"new":      {infrav1.CapstanMachine{}, infrav1.MachineRunningCondition},
		"has run":  {infrav1.CapstanMachine{Spec: infrav1.CapstanMachineSpec{ProviderID: "capstan://m"}}, ""},
		"deleting": {infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}, Spec: infrav1.CapstanMachineSpec{ProviderID: "capstan://m"}}, clusterv1.DeletingCondition},
	} {
		s := &scope{capstan: &test.capstan}
		showWait(s, "h")
		first := s.capstan.DeepCopy()
		showWait(s, "h")
		if found := s.capstan.Status.Conditions; !equality.Semantic.DeepEqual(found, first.Status.Conditions) || len(found) > 1 || (len(found) == 1) != (test.condition != "") {
			t.Errorf("%s: %v, then %v", name, first.Status.Conditions, found)
		} else if len(found) == 1 && (found[0].Type != test.condition || found[0].Reason != infrav1.WaitingForTurnReason || !strings.Contains(found[0].Message, "Host h ")) {
			t.Errorf("%s: %v", name, found)
		}
	}
}
