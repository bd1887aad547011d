//go:build e2e && rack

package rack_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/rack"
)

// A host is cut off from the manager and from the network of the clients, and the manager gives the addresses of its Services to another one.
// The host comes back to the network first. It gives the addresses up without announcing them, and takes them when the other host is gone.
func TestServiceHostReturns(t *testing.T) {
	boxes, router := newRack(t, 2, standIns(t))
	rack.JoinLAN(t, router)
	addresses := []string{rack.ServiceAddress, rack.ServiceIPv6Address}
	for _, b := range boxes {
		b.dualStack = true
		b.make()
	}
	heard, first, second := listen(t, rack.LAN), boxes[0], boxes[1]
	disconnect := first.manage()
	first.publish(addresses...)
	for _, address := range addresses {
		heard.by(t, first.Box, address)
	}
	first.Unplug(router)
	disconnect()
	disconnect = second.manage()
	second.publish(addresses...)
	for _, address := range addresses {
		heard.by(t, second.Box, address)
	}

	returned := time.Now()
	first.Plug(router)
	first.awaitNone(addresses...)
	t.Logf("the host gave the addresses up %s after its return", time.Since(returned).Round(time.Millisecond))
	for _, address := range addresses {
		heard.by(t, second.Box, address)
		heard.only(t, address, first.Box, second.Box)
	}
	if !second.Has(addresses[0]) || !second.Has(addresses[1]) {
		t.Error("the host with a manager gave an address up")
	}

	second.Unplug(router)
	disconnect()
	for _, address := range addresses {
		rack.HolderOf(t, []*rack.Box{first.Box}, address)
	}
	first.manage()
	second.Plug(router)
	second.awaitNone(addresses...)
	for _, address := range addresses {
		heard.by(t, first.Box, address)
		heard.only(t, address, first.Box, second.Box, first.Box)
	}
}

// manage connects a manager, until the returned function is called.
func (b *box) manage() (end func()) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := b.Watch(ctx, &hostpb.WatchRequest{ManagementCluster: "plane"})
	expect.NoError(b.t, err)
	_, err = stream.Recv()
	expect.NoError(b.t, err)
	var reading sync.WaitGroup
	reading.Go(func() {
		for {
			if _, err := stream.Recv(); err != nil {
				return
			}
		}
	})
	end = func() { cancel(); reading.Wait() }
	b.t.Cleanup(end)
	return end
}

// publish publishes a Service at the addresses.
func (b *box) publish(addresses ...string) {
	b.t.Helper()
	req := &hostpb.SetServicesRequest{NetworkId: clusterID, Namespace: "default", Name: "rack"}
	for _, address := range addresses {
		req.Services = append(req.Services, &hostpb.PublishedService{
			Name: "default/web", Address: address, Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_TCP, Port: 80, NodePort: 30080}},
		})
	}
	answer, err := b.SetServices(b.ctx(), req)
	expect.NoError(b.t, err)
	if len(answer.Refused) > 0 {
		b.t.Fatalf("%s refused %v", b.Name(), answer.Refused)
	}
}

// awaitNone waits until the box has none of the addresses.
func (b *box) awaitNone(addresses ...string) {
	b.t.Helper()
	rack.Eventually(b.t, "the end of the addresses of "+b.Name(), func() error {
		for _, address := range addresses {
			if b.Has(address) {
				return fmt.Errorf("it has %s", address)
			}
		}
		return nil
	})
}

// publish creates a Service for Pods on all hosts, and waits for its address from a pool.
func (s *scene) publish() {
	s.Helper()
	pool := &ipamv1.CapstanIPPool{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "services"}}
	pool.Spec.Subnets = []ipamv1.Subnet{{CIDR: s.stack.network, Ranges: []ipamv1.AddressRange{ipamv1.AddressRange(s.stack.service + "-" + s.stack.service)}}}
	expect.NoError(s.T, s.plane.Client.Create(s.Context(), pool))
	of, lb := infrav1.IPPoolReference{APIGroup: "ipam.capstan.dev", Kind: "CapstanIPPool", Name: pool.Name}, &infrav1.ServiceLoadBalancerSpec{}
	if s.stack == ipv6Stack {
		lb.IPv6AddressesFromPool = of
	} else {
		lb.AddressesFromPool = of
	}
	capstan := &infrav1.CapstanCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	expect.NoError(s.T, testenv.Change(s.Context(), s.plane.Client, capstan, func(c *infrav1.CapstanCluster) { c.Spec.Services.LoadBalancer = lb }))
	s.plane.Must(s.T, "load", "image", harness.Bin()+"/images/echo.tar", "--cluster", name, "--namespace", "default")
	s.cluster.Apply(s.T, harness.Echo("type: LoadBalancer"))
	s.cluster.MustKubectl(s.T, "scale", "deployment/echo", "--replicas=3")
	s.cluster.MustKubectl(s.T, "rollout", "status", "deployment/echo", "--timeout=3m")
	s.shown()
}

// shown waits until the status of the Service shows its address.
func (s *scene) shown() {
	s.Helper()
	harness.Eventually(s.T, "the address of the Service", slowest, func(ctx context.Context) error {
		echo := &corev1.Service{}
		if err := s.cluster.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: "echo"}, echo); err != nil {
			return err
		}
		if all := echo.Status.LoadBalancer.Ingress; len(all) != 1 || all[0].IP != s.stack.service {
			return fmt.Errorf("%v, want %s", all, s.stack.service)
		}
		return nil
	})
}

// serviceMoves kills the capstand of the host that has the address of a Service, cuts this host off from the manager, and loses it, while a
// client outside of the hosts sends requests.
func (s *scene) serviceMoves() {
	s.publish()
	s.capstandKilled()
	s.cutFromManager()
	s.serviceHostLost()
}

// capstandKilled kills capstand, and starts it again. The address stays, and no other host tries to get it.
func (s *scene) capstandKilled() {
	heard := listen(s.T, rack.LAN)
	holder := rack.HolderOf(s, s.boxes, s.stack.service)
	s.recorded(holder)
	version := s.claim().ResourceVersion
	longest := s.asking("kill of the capstand of "+holder.Name(), func() {
		holder.End(syscall.SIGKILL)
		holder.Start()
		heard.by(s.T, holder, s.stack.service) // A manager is connected again.
	})
	if now := s.claim(); now.ResourceVersion != version || !holder.Has(s.stack.service) || longest > 3*time.Second {
		s.Errorf("%s without an answer; the record of the hosts changed: %v, %v", longest, now.ResourceVersion != version, now.Annotations)
	}
	heard.only(s.T, s.stack.service, holder)
}

// cutFromManager cuts a host off from its manager, for longer than a manager waits before it reports this. The address stays, and so does the
// status of the Service, while another host tries to get the address. Then the host is lost, and the other host gets it. The host gives it up
// when it comes back to the network, still without a manager.
func (s *scene) cutFromManager() {
	heard := listen(s.T, rack.LAN)
	first := rack.HolderOf(s, s.boxes, s.stack.service)
	heard.by(s.T, first, s.stack.service)
	w := newWire(s.T, first)
	s.reachAt(first, w.path)
	harness.Eventually(s.T, "a connection over the wire", slowest, func(context.Context) error {
		if w.connections.Load() == 0 {
			return errors.New("none")
		}
		return nil
	})
	w.cut.Lock()
	mend := sync.OnceFunc(w.cut.Unlock)
	s.Cleanup(mend)
	var second *rack.Box
	longest := s.asking("cut of "+first.Name()+" from the manager", func() {
		since := time.Now()
		second = s.tries(first)
		s.Logf("%s tries to get %s %s after the cut", second.Name(), s.stack.service, time.Since(since).Round(100*time.Millisecond))
		s.troubled("host " + first.Name() + " is not connected")
		s.Logf("the manager reports this %s after the cut", time.Since(since).Round(100*time.Millisecond))
	})
	if !first.Has(s.stack.service) || second.Has(s.stack.service) || longest > 3*time.Second {
		s.Errorf("the address moved, or was %s without an answer", longest)
	}
	s.shown()

	first.Leave()
	since := time.Now()
	s.asking("loss of "+first.Name()+" after the cut", func() {
		second = rack.HolderOf(s, rack.Others(s.boxes, first), s.stack.service)
		s.Logf("%s has %s %s after the loss", second.Name(), s.stack.service, time.Since(since).Round(100*time.Millisecond))
	})
	// A host that returns before the manager has seen the success of the other one gets its address back.
	s.recorded(second, first)
	since = time.Now()
	first.Join()
	s.givesUp(first)
	s.Logf("%s gave the address up %s after its return to the network", first.Name(), time.Since(since).Round(100*time.Millisecond))
	mend()
	s.reachAt(first, first.Socket())
	heard.by(s.T, second, s.stack.service)
	s.well("the cut", since)
	heard.only(s.T, s.stack.service, first, second)
	s.recorded(second)
}

// serviceHostLost loses the host. Another host takes the address and announces it, and keeps it when the lost host returns. At no time two
// hosts announce it.
func (s *scene) serviceHostLost() {
	heard := listen(s.T, rack.LAN)
	first := rack.HolderOf(s, s.boxes, s.stack.service)
	heard.by(s.T, first, s.stack.service)
	s.asking("before the loss", func() { heard.by(s.T, first, s.stack.service) })

	var second *rack.Box
	first.Lose()
	since := time.Now()
	longest := s.asking("loss of "+first.Name()+" with the Service", func() {
		second = rack.HolderOf(s, rack.Others(s.boxes, first), s.stack.service)
		s.Logf("%s has %s %s after the loss", second.Name(), s.stack.service, time.Since(since).Round(100*time.Millisecond))
	})
	if longest > 20*time.Second {
		s.Errorf("%s without an answer", longest)
	}
	heard.only(s.T, s.stack.service, first, second)

	since = time.Now()
	s.asking("return of "+first.Name(), func() {
		first.Return()
		s.givesUp(first)
		heard.by(s.T, second, s.stack.service)
		s.well("return of "+first.Name(), since)
	})
	heard.only(s.T, s.stack.service, first, second)
	s.shown()
}

// givesUp waits until a host does not have the address of the Service any more.
func (s *scene) givesUp(b *rack.Box) {
	s.Helper()
	rack.Eventually(s, "the end of the address on the host that returned", func() error {
		if b.Has(s.stack.service) {
			return fmt.Errorf("%s has it", b.Name())
		}
		return nil
	})
}

// claim returns the claim of the address of the Service.
func (s *scene) claim() *capiipamv1.IPAddressClaim {
	s.Helper()
	list := &capiipamv1.IPAddressClaimList{}
	expect.NoError(s.T, s.plane.Client.List(s.Context(), list, client.InNamespace("default")))
	for i := range list.Items {
		if list.Items[i].Annotations[infrav1.ServiceAnnotation] == "default/echo" {
			return &list.Items[i]
		}
	}
	s.Fatal("the Service has no claim")
	return nil
}

// recorded waits until exactly these hosts may have the address of the Service.
func (s *scene) recorded(hosts ...*rack.Box) {
	s.Helper()
	var names []string
	for _, b := range hosts {
		names = append(names, b.Name())
	}
	harness.Eventually(s.T, "the record of the hosts", slowest, func(context.Context) error {
		if got := s.claim().Annotations[infrav1.ServiceHostsAnnotation]; got != strings.Join(names, ",") {
			return fmt.Errorf("%s, want %v", got, names)
		}
		return nil
	})
}

// tries waits until another host is recorded after the first one, and returns it.
func (s *scene) tries(first *rack.Box) (found *rack.Box) {
	s.Helper()
	harness.Eventually(s.T, "a host that tries to get the address", slowest, func(context.Context) error {
		got := s.claim().Annotations[infrav1.ServiceHostsAnnotation]
		for _, b := range rack.Others(s.boxes, first) {
			if got == first.Name()+","+b.Name() {
				found = b
				return nil
			}
		}
		return errors.New(got)
	})
	return found
}

// troubled waits until the cluster shows that its Services are not published as they should.
func (s *scene) troubled(message string) {
	s.Helper()
	harness.Eventually(s.T, message, slowest, func(ctx context.Context) error {
		capstan := &infrav1.CapstanCluster{}
		if err := s.plane.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: name}, capstan); err != nil {
			return err
		}
		c := conditions.Get(capstan, infrav1.ServicesPublishedCondition)
		if c == nil || c.Status != metav1.ConditionFalse || !strings.Contains(c.Message, message) {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
}

// reachAt changes the socket at which the manager reaches a box.
func (s *scene) reachAt(b *rack.Box, socket string) {
	s.Helper()
	host := &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: b.Name()}}
	expect.NoError(s.T, testenv.Change(s.Context(), s.plane.Client, host, func(h *infrav1.CapstanHost) { h.Spec.Address = "unix://" + socket }))
}

// asking asks the Service from outside until a change has its effect, and until it answers once more. It returns the longest time
// without an answer.
func (s *scene) asking(what string, effect func()) (longest time.Duration) {
	s.Helper()
	ctx, end := context.WithCancel(s.Context())
	asked := make(chan answers, 1)
	go func() {
		asked <- ask(s.Context(), "http://"+net.JoinHostPort(s.stack.service, "80"), func() bool { return ctx.Err() != nil })
	}()
	func() { defer end(); effect() }()
	got := <-asked
	s.Logf("%s: %s", what, got)
	if got.last != nil {
		s.Errorf("%s: the Service does not answer any more: %v", what, got.last)
	}
	return got.longest
}

// answers describes the requests of a time.
type answers struct {
	answered, failed int
	longest          time.Duration // without an answer
	last             error         // that of the last request
}

func (a answers) String() string {
	return fmt.Sprintf("%d answers, %d requests failed, the longest time without an answer was %s", a.answered, a.failed, a.longest.Round(time.Millisecond))
}

// ask sends requests, each with a connection of its own, until done returns true and a request succeeds, or slowest has passed without
// one.
func ask(ctx context.Context, url string, done func() bool) (out answers) {
	web := &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	last := time.Now()
	_ = wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(context.Context) (bool, error) {
		out.last = answer(ctx, web, url)
		out.longest = max(out.longest, time.Since(last))
		if out.last != nil {
			out.failed++
			return time.Since(last) > slowest, nil
		}
		out.answered++
		last = time.Now()
		return done(), nil
	})
	return out
}

func answer(ctx context.Context, web *http.Client, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	response, err := web.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if _, err := io.Copy(io.Discard, response.Body); err != nil || response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %w", response.Status, err)
	}
	return nil
}
