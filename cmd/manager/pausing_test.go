package main

import (
	"fmt"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
)

// ALL-08, CP-22: for every reconciled kind, a paused object is not written, also during events and deletion. It is
// paused by its Cluster or by its own annotation. It shows the condition Paused. Reconciliation continues after the
// pause.
func TestPausing_ALL08(t *testing.T) {
	w := sharedEnvironment(t)
	fake := fakehost.New(t)
	ns := w.env.Namespace(t)
	annotated := w.family(familyOf{
		namespace: ns, name: "annotated", annotations: map[string]string{clusterv1.PausedAnnotation: ""}, hostAddress: fake.Address(), subnet: "10.1.0.0/24",
	})
	ofCluster := w.family(familyOf{namespace: ns, name: "of-cluster", paused: true, hostAddress: fake.Address(), subnet: "10.2.0.0/24"})
	w.run()

	paused := append(annotated.everything(), ofCluster.members...)
	w.wantNotWritten(ns, "first", fake, paused)
	for _, f := range []*family{annotated, ofCluster} {
		w.get(f.machine)
		w.Expect(f.machine.Spec.ID).To(BeEmpty())
	}

	for _, obj := range annotated.everything() {
		w.patch(obj, `{"metadata":{"annotations":{%q:null}}}`, clusterv1.PausedAnnotation)
	}
	w.patch(ofCluster.cluster, `{"spec":{"paused":null}}`)
	w.reconciled(paused...)
	for _, obj := range paused {
		if reports(obj) {
			w.Eventually(func() string { return w.look(obj).conditions[clusterv1.PausedCondition] }).Should(Equal("False"), w.look(obj).name)
		}
	}
	for _, f := range []*family{annotated, ofCluster} {
		w.Eventually(func() string { w.get(f.machine); return f.machine.Spec.ProviderID }).ShouldNot(BeEmpty())
		w.Eventually(func() string { w.get(f.claim); return f.claim.Status.AddressRef.Name }).ShouldNot(BeEmpty())
	}

	// Paused again, deleted objects stay as they are until the end of the pause. A CapstanConfig has no finalizer.
	for _, obj := range annotated.everything() {
		w.patch(obj, `{"metadata":{"annotations":{%q:""}}}`, clusterv1.PausedAnnotation)
	}
	w.patch(ofCluster.cluster, `{"spec":{"paused":true}}`)
	w.wantPausedCondition(paused)
	leaving := slices.DeleteFunc(slices.Clone(paused), func(obj client.Object) bool { _, config := obj.(*bootstrapv1.CapstanConfig); return config })
	for _, obj := range leaving {
		w.Expect(w.env.Client.Delete(t.Context(), obj)).To(Succeed())
	}
	w.wantNotWritten(ns, "second", fake, leaving)
	w.Expect(fake.Calls("DeleteMachine")).To(BeZero())
	for _, obj := range annotated.everything() {
		w.patch(obj, `{"metadata":{"annotations":{%q:null}}}`, clusterv1.PausedAnnotation)
	}
	w.patch(ofCluster.cluster, `{"spec":{"paused":null}}`)
	for _, obj := range leaving {
		w.leaves(obj)
	}
}

// leaves waits until a manager continues the deletion of an object. The Machine of the control plane stays, because core is missing. So
// its control plane, cluster and host stay too, and show the deletion.
func (w *environment) leaves(obj client.Object) {
	w.t.Helper()
	switch obj.(type) {
	case *controlplanev1.CapstanControlPlane, *infrav1.CapstanCluster, *infrav1.CapstanHost:
		w.Eventually(func() string { return w.look(obj).conditions[clusterv1.DeletingCondition] }).Should(Equal("True"), w.look(obj).name)
	default:
		w.gone(obj)
	}
}

// wantNotWritten changes paused objects. It checks that the managers do not write them while another family is created
// and reconciled.
func (w *environment) wantNotWritten(namespace, name string, fake *fakehost.Host, paused []client.Object) {
	w.t.Helper()
	w.wantPausedCondition(paused)
	w.quiet(paused...) // The condition of a deleted object is written again.
	before := map[string]string{}
	for _, obj := range paused {
		w.patch(obj, `{"metadata":{"labels":{"touched":%q}}}`, name)
		before[w.look(obj).name] = w.look(obj).version
	}
	other := w.family(familyOf{namespace: namespace, name: name, hostAddress: fake.Address(), subnet: fmt.Sprintf("10.%d.0.0/24", 10+len(name))})
	w.reconciled(other.everything()...)
	w.Eventually(func() string { w.get(other.machine); return other.machine.Spec.ProviderID }).ShouldNot(BeEmpty())
	w.Consistently(func() (changed []string) {
		for _, obj := range paused {
			if s := w.look(obj); s.version != before[s.name] {
				changed = append(changed, fmt.Sprintf("%+v", s))
			}
		}
		return changed
	}, time.Second).Should(BeEmpty(), "written while paused")
}

// wantPausedCondition waits until all kinds with the condition Paused show it.
func (w *environment) wantPausedCondition(objs []client.Object) {
	w.t.Helper()
	for _, obj := range objs {
		if reports(obj) {
			w.Eventually(func() string { return w.look(obj).conditions[clusterv1.PausedCondition] }).Should(Equal("True"), w.look(obj).name)
		}
	}
}

// reports reports whether a kind has the condition Paused. Claims do not have it: the kind belongs to core, and its
// contract has no such condition.
func reports(obj client.Object) bool {
	_, claim := obj.(*capiipamv1.IPAddressClaim)
	return !claim
}

func (w *environment) get(obj client.Object) {
	w.t.Helper()
	w.Expect(w.env.Client.Get(w.t.Context(), client.ObjectKeyFromObject(obj), obj)).To(Succeed())
}
