package main

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

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

// ALL-07, ALL-18: two managers run side by side and share a host. Labels or namespaces divide the objects between them.
// Each manager reconciles its own objects, and does not take over the objects of a stopped manager.
func TestTwoManagers(t *testing.T) {
	for mode, divide := range map[string]func(w *environment, tenant string) ([]string, familyOf){
		"watch filter": func(_ *environment, tenant string) ([]string, familyOf) {
			// Both tenants use one namespace.
			return []string{"--watch-filter=" + tenant}, familyOf{namespace: "default", labels: map[string]string{clusterv1.WatchLabel: tenant}}
		},
		"namespace": func(w *environment, _ string) ([]string, familyOf) {
			ns := w.env.Namespace(w.t)
			return []string{"--namespace=" + ns}, familyOf{namespace: ns}
		},
	} {
		t.Run(mode, func(t *testing.T) { twoManagers(t, divide) })
	}
}

func twoManagers(t *testing.T, divide func(w *environment, tenant string) ([]string, familyOf)) {
	w := newEnvironment(t)
	fake := fakehost.New(t)
	add := func(name, network string) *tenant {
		args, of := divide(w, name)
		of.hostAddress = fake.Address()
		return &tenant{name: name, network: network, args: append(args, "--machine-network-pool="+network), family: func(member, subnet string) *family {
			of.name, of.subnet = name+"-"+member, subnet
			return w.family(of)
		}}
	}
	red, blue := add("red", "10.201.0.0/16"), add("blue", "10.202.0.0/16")
	stopRed := w.run(red.args...)
	w.run(blue.args...)

	for i, one := range []*tenant{red, blue} {
		f := one.family("first", []string{"10.1.0.0/24", "10.2.0.0/24"}[i])
		w.complete(f)
		w.Expect(netip.MustParsePrefix(one.network).Overlaps(netip.MustParsePrefix(f.capstan.Spec.Network.MachineCIDR))).
			To(BeTrue(), "%s has the network %s of the other manager", one.name, f.capstan.Spec.Network.MachineCIDR)
		// The managers do not overwrite each other's changes, in particular not those of the shared host.
		w.quiet(f.everything()...)
	}

	stopRed()
	waiting := red.family("second", "10.3.0.0/24")
	w.complete(blue.family("second", "10.4.0.0/24"))
	w.untouched(append(waiting.members, waiting.pool)...)
	w.run(red.args...)
	w.complete(waiting)
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
