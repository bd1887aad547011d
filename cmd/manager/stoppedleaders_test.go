package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"regexp"
	"syscall"
	"testing"

	. "github.com/onsi/gomega"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// The leases of the test are short, but longer than a renewal takes on a busy machine.
var shortLeases = []string{
	"--leader-elect", "--leader-elect-namespace=default",
	"--leader-elect-lease-duration=6s", "--leader-elect-renew-deadline=4s", "--leader-elect-retry-period=1s",
}

// TestStoppedLeaders stops each provider's leader in the middle of its work, like SIGSTOP, a frozen virtual machine or a
// lack of processor time. Another manager takes its lease over and completes the work. The former leader then continues
// with outdated reads and pending writes. It ends, and every object still exists exactly once. Row ALL-07.
func TestStoppedLeaders(t *testing.T) {
	w := newEnvironment(t)
	fake := fakehost.New(t)
	of := familyOf{namespace: "default", hostAddress: fake.Address()}
	of.name, of.subnet = "first", "10.1.0.0/24"
	former := w.leaders()
	w.complete(w.family(of))
	w.standbys()

	of.name, of.subnet = "second", "10.2.0.0/24"
	second := w.family(of)
	burst := w.burst(second, 0)
	for _, p := range former { // in any state
		w.Expect(p.Process.Signal(syscall.SIGSTOP)).To(Succeed())
	}
	burst = append(burst, w.burst(second, burstSize)...)
	for provider, p := range former {
		w.Eventually(func() bool { return w.holder(provider) != p.holder }).Should(BeTrue(), "no manager takes over the lease of %s", provider)
	}
	w.complete(second)
	w.allDone(burst)
	w.quiet(append(second.everything(), burst...)...)
	before := w.made()

	for _, p := range former {
		w.Expect(p.Process.Signal(syscall.SIGCONT)).To(Succeed())
	}
	for provider, p := range former {
		w.Eventually(p.ended).Should(BeClosed(), "the former leader of %s still runs", provider)
		w.Expect(p.err).To(HaveOccurred(), "the former leader of %s ended without an error", provider)
	}
	w.quiet(append(second.everything(), burst...)...)
	w.Expect(differences(before, w.made())).To(BeEmpty(), "the former leaders have created or changed objects")
	w.wantNoDuplicates(fake)
}

type leader struct {
	*process
	holder string
}

var providers = []string{"infrastructure", "control-plane", "bootstrap", "ipam"}

// leaders starts a manager for each provider and waits until it leads.
func (w *environment) leaders() map[string]leader {
	w.t.Helper()
	out := map[string]leader{}
	for _, provider := range providers {
		out[provider] = leader{process: w.start(provider, shortLeases...)}
	}
	for _, provider := range providers {
		w.Eventually(func() string { return w.holder(provider) }).ShouldNot(BeEmpty(), "no manager leads %s", provider)
		out[provider] = leader{out[provider].process, w.holder(provider)}
	}
	return out
}

func (w *environment) standbys() {
	w.t.Helper()
	for _, provider := range providers {
		w.start(provider, shortLeases...)
	}
}

// holder returns the holder of a provider's lease.
func (w *environment) holder(provider string) string {
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: "default", Name: "controller-leader-election-capstan-" + provider}
	if w.env.Client.Get(w.t.Context(), key, lease) != nil || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// burstSize is the number of objects for about one second of work.
const burstSize = 30

// burst creates claims and CapstanMachines that are ready to be served. Their numbers start with first.
func (w *environment) burst(f *family, first int) (out []client.Object) {
	w.t.Helper()
	for n := first; n < first+burstSize; n++ {
		claim := &capiipamv1.IPAddressClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("burst-%d", n)},
			Spec:       capiipamv1.IPAddressClaimSpec{PoolRef: capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: "CapstanIPPool", Name: f.pool.Name}},
		}
		w.create(claim)
		out = append(out, claim)
		if n%10 == 0 {
			f.addWorker(fmt.Sprintf("burst-%d", n))
			out = append(out, f.machine)
		}
	}
	return out
}

// done reports whether a claim has its address, or a CapstanMachine has its machine.
func (w *environment) done(obj client.Object) bool {
	w.Expect(w.env.Client.Get(w.t.Context(), client.ObjectKeyFromObject(obj), obj)).To(Succeed())
	switch obj := obj.(type) {
	case *capiipamv1.IPAddressClaim:
		return obj.Status.AddressRef.Name != ""
	case *infrav1.CapstanMachine:
		return obj.Spec.ProviderID != ""
	}
	return false
}

func (w *environment) allDone(all []client.Object) {
	w.t.Helper()
	for _, obj := range all {
		w.Eventually(func() bool { return w.done(obj) }).Should(BeTrue(), "%T %s", obj, obj.GetName())
	}
}

// dates matches the times of conditions. A former leader may write a condition just before it detects the loss of its
// lease. Only the times may change by that.
var dates = regexp.MustCompile(`"(lastTransitionTime":"[^"]*"|observedGeneration":\d+),?`)

// made returns the objects that the providers have created, by kind and name.
func (w *environment) made() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	for _, list := range []client.ObjectList{
		&clusterv1.MachineList{}, &infrav1.CapstanMachineList{}, &corev1.SecretList{}, &capiipamv1.IPAddressList{}, &capiipamv1.IPAddressClaimList{},
	} {
		w.Expect(w.env.Client.List(w.t.Context(), list)).To(Succeed())
		w.Expect(apimeta.EachListItem(list, func(o runtime.Object) error {
			obj := o.(client.Object)
			obj.SetResourceVersion("")
			obj.SetManagedFields(nil)
			content, err := json.Marshal(obj)
			out[fmt.Sprintf("%T %s", obj, obj.GetName())] = dates.ReplaceAllString(string(content), "")
			return err
		})).To(Succeed())
	}
	return out
}

// differences compares two results of made.
func differences(before, after map[string]string) (out []string) {
	for name, version := range after {
		if before[name] != version {
			out = append(out, fmt.Sprintf("%s was\n%s\nis\n%s", name, before[name], version))
		}
	}
	for name := range before {
		if _, ok := after[name]; !ok {
			out = append(out, name+" was deleted")
		}
	}
	return out
}

// wantNoDuplicates checks that no address is allocated twice, that each CapstanMachine has one machine on the host, and
// that each control plane has only its first Machine.
func (w *environment) wantNoDuplicates(fake *fakehost.Host) {
	w.t.Helper()
	addresses, machines, capstan := &capiipamv1.IPAddressList{}, &clusterv1.MachineList{}, &infrav1.CapstanMachineList{}
	for _, list := range []client.ObjectList{addresses, machines, capstan} {
		w.Expect(w.env.Client.List(w.t.Context(), list)).To(Succeed())
	}
	given := map[netip.Addr]string{}
	for _, a := range addresses.Items {
		address := netip.MustParseAddr(a.Spec.Address)
		w.Expect(given).NotTo(HaveKey(address), "%s has the address of %s", a.Name, given[address])
		given[address] = a.Name
	}
	w.Expect(given).To(HaveLen(2*burstSize + 2))
	for _, m := range capstan.Items {
		if m.Spec.ProviderID != "" {
			machine, _ := fake.Machine(m.Spec.ID)
			w.Expect(machine).NotTo(BeNil(), "%s has no machine", m.Name)
		}
	}
	first := map[string]int{}
	for _, m := range machines.Items {
		if _, ok := m.Labels[clusterv1.MachineControlPlaneLabel]; ok {
			first[m.Labels[clusterv1.ClusterNameLabel]]++
		}
	}
	w.Expect(first).To(Equal(map[string]int{"first": 1, "second": 1}), "control plane machines of the clusters")
}
