package connections_test

import (
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

func network(id string) connections.Network {
	return connections.Network{ID: id, Namespace: "ns", Name: "c"}
}

// The pool reports a host with the address of a Service that hangs, long before it gives the connection up, and its return. Such a host
// gets no further pulse, so it does not count itself as one with a manager.
func TestPulses(t *testing.T) {
	const silence = 300 * time.Millisecond
	server := fakehost.New(t)
	g, _, h, events := connect(t, server.Address(), func(p *connections.Pool) { p.Silence = silence })
	g.Eventually(h.ConnectionError).Should(Succeed())
	h.SetPulses(network("net"), true)
	pulses := func() int { return server.Calls("Pulse") }
	g.Eventually(pulses).Should(BeNumerically(">", 2))

	hangs, reported := make(chan struct{}), Receive(HaveField("Silence", BeTrue()))
	server.Before("Pulse", func() { <-hangs })
	drain(events)
	before := pulses()
	g.Eventually(events).Should(reported, "the silence")
	g.Expect(h.Silence()).To(BeNumerically(">=", silence))
	g.Expect(h.SilenceError()).To(MatchError("the host does not answer"))
	g.Expect(pulses()).To(BeNumerically("<=", before+1), "pulses after the one that has no answer")
	g.Expect(h.ConnectionError()).To(Succeed(), "the connection has more time")
	drain(events)
	close(hangs)
	g.Eventually(events).Should(reported, "the return")
	g.Eventually(h.SilenceError).Should(Succeed())

	server.Refuse("Pulse", status.Error(codes.Unimplemented, "an older capstand"))
	before = pulses()
	g.Eventually(pulses).Should(BeNumerically(">", before+3))
	g.Eventually(h.Silence).Should(BeNumerically("<", silence), "an answer is an answer")

	server.Stop()
	g.Eventually(h.ConnectionError).ShouldNot(Succeed())
	g.Eventually(h.Silence).Should(BeNumerically(">=", silence), "without a connection")
	server.Start(t)
	g.Eventually(h.ConnectionError).Should(Succeed())
	g.Expect(h.Silence()).To(BeNumerically("<", silence))
	before = pulses()
	h.SetPulses(network("net"), true)
	g.Eventually(pulses).Should(BeNumerically(">", before), "pulses on the new connection")
}

// A call ends when its host falls silent, and begins again when the host answers.
func TestCallsToSilentHost(t *testing.T) {
	const silence = 300 * time.Millisecond
	server := fakehost.New(t)
	g, _, h, events := connect(t, server.Address(), func(p *connections.Pool) { p.Silence = silence })
	g.Eventually(h.ConnectionError).Should(Succeed())
	hangs := make(chan struct{})
	for _, method := range []string{"Pulse", "ListServices"} {
		server.Before(method, func() { <-hangs })
	}
	h.SetPulses(network("net"), true)
	for _, when := range []string{"before the silence", "after it"} {
		_, err := h.AllServices(t.Context())
		g.Expect(connections.Code(err)).To(Equal(codes.Unavailable), when)
		g.Expect(connections.Message(err)).To(Equal("the host does not answer"), when)
	}
	g.Expect(h.ConnectionError()).To(Succeed())
	close(hangs)
	g.Eventually(func() error { // On a busy box, the host can be silent for a moment.
		_, err := h.AllServices(t.Context())
		return err
	}).Should(Succeed())

	again := make(chan struct{})
	server.Before("Pulse", func() { <-again })
	drain(events)
	g.Eventually(events).Should(Receive(HaveField("Silence", BeTrue())))
	h.SetPulses(network("net"), false)
	g.Expect(h.SilenceError()).To(Succeed(), "without pulses")
	_, err := h.AllServices(t.Context())
	g.Expect(err).NotTo(HaveOccurred(), "without pulses")
	close(again)
}

// A host gets pulses as long as it gets them for one network, and none after a new connection. The end of a network ends its pulses.
func TestPulsesEnd(t *testing.T) {
	server := fakehost.New(t)
	g, _, h, _ := connect(t, server.Address(), func(p *connections.Pool) { p.Silence = 90 * time.Millisecond })
	g.Eventually(h.ConnectionError).Should(Succeed())
	pulses := func() int { return server.Calls("Pulse") }
	beats := func(why string) {
		before := pulses()
		g.Eventually(pulses).Should(BeNumerically(">", before+2), why)
	}
	stopped := func(why string) {
		before := pulses()
		g.Consistently(pulses, "300ms").Should(BeNumerically("<=", before+1), why) // One can be on its way.
	}
	h.SetPulses(network("a"), true)
	h.SetPulses(network("b"), true)
	beats("for two networks")
	h.SetPulses(network("a"), false)
	beats("for one network")
	h.SetPulses(network("b"), false)
	stopped("for none")
	h.SetPulses(network("a"), true)
	beats("again")
	g.Eventually(func() error { // On a busy box, the host can be silent for a moment.
		_, err := h.DeleteNetwork(t.Context(), &hostpb.DeleteNetworkRequest{Id: "a", Namespace: "ns", Name: "c"})
		return err
	}).Should(Succeed())
	stopped("without the network")
	h.SetPulses(network("a"), true)
	beats("again")
	server.Stop()
	g.Eventually(h.ConnectionError).ShouldNot(Succeed())
	server.Start(t)
	g.Eventually(h.ConnectionError).Should(Succeed())
	stopped("after a new connection")
}

// A CapstanCluster of another namespace that has the id of a cluster neither ends the pulses of this cluster, nor makes the manager forget
// what the host has of it.
func TestCopyLeavesRecords_ALL18(t *testing.T) {
	server := fakehost.New(t)
	g, _, h, _ := connect(t, server.Address(), func(p *connections.Pool) { p.Silence = 90 * time.Millisecond })
	g.Eventually(h.ConnectionError).Should(Succeed())
	ensure(g, h, "id-1", "a", "10.200.0.2", gib)
	services := func(namespace string) error {
		_, err := h.EnsureServices(t.Context(), &hostpb.SetServicesRequest{NetworkId: "net", Namespace: namespace, Name: "c"})
		return err
	}
	g.Eventually(func() error { return services("ns") }).Should(Succeed())
	h.SetPulses(network("net"), true)

	copied := network("net")
	copied.Namespace = "other"
	h.SetPulses(copied, false)
	g.Expect(services("other")).NotTo(Succeed())
	_, err := h.DeleteNetwork(t.Context(), &hostpb.DeleteNetworkRequest{Id: "net", Namespace: "other", Name: "c"})
	g.Expect(err).To(HaveOccurred())
	before := server.Calls("SetServices")
	g.Expect(services("ns")).To(Succeed())
	g.Expect(server.Calls("SetServices")).To(Equal(before), "the host accepted this before")
	g.Expect(h.Services(network("net"))).NotTo(BeNil())
	g.Expect(h.Services(copied)).To(BeNil())
	pulses := server.Calls("Pulse")
	g.Eventually(func() int { return server.Calls("Pulse") }).Should(BeNumerically(">", pulses+1))
}
