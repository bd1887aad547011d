package main

import (
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// tenant is a manager with its own objects.
type tenant struct {
	name string
	// network is the range of the networks of its clusters. It shows which manager has reconciled a cluster.
	network string
	args    []string
	// family is the set of objects of this tenant.
	family func(name, subnet string) *family
}

// ALL-07, ALL-18, IM-02: two managers run side by side and share a host. Labels or namespaces divide the objects between them.
// Each manager reconciles its own objects, and does not take over the objects of a stopped manager. Both together do not place more
// machines on the host than its memory allows.
func TestTwoManagers(t *testing.T) {
	for mode, divide := range map[string]func(w *environment, tenant string) ([]string, familyOf){
		"filter": func(_ *environment, tenant string) ([]string, familyOf) {
			// Both tenants use one namespace.
			return []string{"--watch-filter=" + tenant}, familyOf{namespace: "default", labels: map[string]string{clusterv1.WatchLabel: tenant}}
		},
		"namespace": func(w *environment, _ string) ([]string, familyOf) {
			ns := w.env.Namespace(w.t)
			return []string{"--namespace=" + ns}, familyOf{namespace: ns}
		},
	} {
		t.Run(mode, func(t *testing.T) { twoManagers(t, mode, divide) })
	}
}

func twoManagers(t *testing.T, mode string, divide func(w *environment, tenant string) ([]string, familyOf)) {
	w := sharedEnvironment(t)
	fake := fakehost.New(t)
	add := func(name, network string) *tenant {
		args, of := divide(w, name)
		of.hostAddress = fake.Address()
		return &tenant{name: name, network: network, args: append(args, "--machine-network-pool="+network), family: func(member, subnet string) *family {
			of.name, of.subnet = name+"-"+member, subnet
			return w.family(of)
		}}
	}
	red, blue := add(mode+"-red", "10.201.0.0/16"), add(mode+"-blue", "10.202.0.0/16")
	stopRed := w.run(red.args...)
	w.run(blue.args...)

	var families []*family
	for i, one := range []*tenant{red, blue} {
		f := one.family("first", []string{"10.1.0.0/24", "10.2.0.0/24"}[i])
		w.complete(f)
		w.Expect(netip.MustParsePrefix(one.network).Overlaps(netip.MustParsePrefix(f.capstan.Spec.Network.MachineCIDR))).
			To(BeTrue(), "%s has the network %s of the other manager", one.name, f.capstan.Spec.Network.MachineCIDR)
		// The managers do not overwrite each other's changes, in particular not those of the shared host.
		w.quiet(f.everything()...)
		families = append(families, f)
	}
	w.oneSlot(fake, families)

	stopRed()
	waiting := red.family("second", "10.3.0.0/24")
	w.complete(blue.family("second", "10.4.0.0/24"))
	w.untouched(append(waiting.members, waiting.pool)...)
	w.run(red.args...)
	w.complete(waiting)
}

// oneSlot: a host with memory for one more machine is chosen by each manager for a machine, before it has got the call of any. It
// takes one of the machines. The others have its reason, and wait for memory.
func (w *environment) oneSlot(fake *fakehost.Host, families []*family) {
	w.t.Helper()
	fake.SetInfo(func(i *hostpb.HostInfo) { i.MemoryBytes = i.AllocatedMemoryBytes + 2<<30 })
	defer fake.SetInfo(func(i *hostpb.HostInfo) { i.MemoryBytes = 64 << 30 })
	var calls atomic.Int32
	all := make(chan struct{})
	fake.Before("EnsureMachine", func() {
		if calls.Add(1) == int32(len(families)) {
			close(all)
		}
		select {
		case <-all:
		case <-w.t.Context().Done():
		}
	})
	defer fake.Before("EnsureMachine", nil)
	for _, f := range families {
		f.addWorker(f.capstan.Name + "-slot")
	}
	w.Eventually(func(g Gomega) {
		var runs, refused []string
		for _, f := range families {
			w.get(f.machine)
			c := conditions.Get(f.machine, infrav1.MachineRunningCondition)
			if m, _ := fake.Machine(f.machine.Spec.ID); m != nil {
				runs = append(runs, f.machine.Name)
			} else if c != nil && c.Reason == infrav1.MachineRefusedReason && strings.Contains(c.Message, "requests 2048 MiB of memory, 0 of ") {
				refused = append(refused, f.machine.Name)
			}
		}
		g.Expect(runs).To(HaveLen(1), "%v run and %v were refused", runs, refused)
		g.Expect(refused).To(HaveLen(len(families)-1), "%v run and %v were refused", runs, refused)
	}).Should(Succeed())
	info, err := fake.GetInfo(w.t.Context(), nil)
	w.Expect(err).NotTo(HaveOccurred())
	w.Expect(info.AllocatedMemoryBytes).To(Equal(info.MemoryBytes))
}

// complete waits until a family is reconciled, its machine runs, and its claim has an address.
func (w *environment) complete(f *family) {
	w.t.Helper()
	w.reconciled(f.everything()...)
	w.Eventually(func() string { w.get(f.machine); return f.machine.Spec.ProviderID }).ShouldNot(BeEmpty())
	w.Eventually(func() string { w.get(f.claim); return f.claim.Status.AddressRef.Name }).ShouldNot(BeEmpty())
	w.get(f.capstan)
}

// quiet waits until the objects do not change any more.
func (w *environment) quiet(objs ...client.Object) {
	w.t.Helper()
	var last []string
	since := time.Now()
	w.Eventually(func() time.Duration {
		var versions []string
		for _, obj := range objs {
			versions = append(versions, w.look(obj).version)
		}
		if !slices.Equal(last, versions) {
			last, since = versions, time.Now()
		}
		return time.Since(since)
	}).Should(BeNumerically(">", 2*time.Second))
}
