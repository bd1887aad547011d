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

// The pool reports a host with the address of a Service that hangs, long before it gives the connection up, and its return. Such a host
// gets no further pulse, so it does not count itself as one with a manager.
func TestPulses(t *testing.T) {
	const silence = 300 * time.Millisecond
	server := fakehost.New(t)
	g, _, h, events := connect(t, server.Address(), func(p *connections.Pool) { p.Silence = silence })
	g.Eventually(h.Connected).Should(Succeed())
	network := &hostpb.Network{Id: "net", Namespace: "ns", Name: "c", Cidr: "10.200.0.0/21"}
	_, err := h.EnsureNetwork(t.Context(), network)
	g.Expect(err).NotTo(HaveOccurred())
	_, err = h.EnsureServices(t.Context(), &hostpb.SetServicesRequest{NetworkId: "net", Namespace: "ns", Name: "c", Services: []*hostpb.PublishedService{{
		Name: "default/web", Address: "203.0.113.100", Ports: []*hostpb.PublishedPort{{Protocol: hostpb.PublishedPort_TCP, Port: 80, NodePort: 30080}},
	}}})
	g.Expect(err).NotTo(HaveOccurred())
	pulses := func() int { return server.Calls("Pulse") }
	g.Eventually(pulses).Should(BeNumerically(">", 2))

	hangs, reported := make(chan struct{}), Receive(HaveField("Silence", BeTrue()))
	server.Before("Pulse", func() { <-hangs })
	drain(events)
	before := pulses()
	g.Eventually(events).Should(reported, "the silence")
	g.Expect(h.Silence()).To(BeNumerically(">=", silence))
	g.Expect(pulses()).To(BeNumerically("<=", before+1), "pulses after the one that has no answer")
	g.Expect(h.Connected()).To(Succeed(), "the connection has more time")
	drain(events)
	close(hangs)
	g.Eventually(events).Should(reported, "the return")
	g.Eventually(h.Silence).Should(BeNumerically("<", silence))

	server.Refuse("Pulse", status.Error(codes.Unimplemented, "an older capstand"))
	before = pulses()
	g.Eventually(pulses).Should(BeNumerically(">", before+3))
	g.Eventually(h.Silence).Should(BeNumerically("<", silence), "an answer is an answer")

	server.Stop()
	g.Eventually(h.Connected).ShouldNot(Succeed())
	g.Eventually(h.Silence).Should(BeNumerically(">=", silence), "without a connection")
	server.Start(t)
	g.Eventually(h.Connected).Should(Succeed())
	g.Expect(h.Silence()).To(BeNumerically("<", silence))
	before = pulses()
	lists, err := h.AllServices(t.Context())
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(lists).To(HaveLen(1))
	g.Eventually(pulses).Should(BeNumerically(">", before), "pulses on the new connection")
}
