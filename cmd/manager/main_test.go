package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	. "github.com/onsi/gomega"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testlogs"
)

// The last line of the manager is JSON too, also for an invalid command line.
func TestLastErrorIsJSON(t *testing.T) {
	for _, args := range [][]string{
		{"all", "--logging-format=json", "--nonsense"},
		{"infrastructure", "--logging-format=json", "nonsense"},
		{"all", "--logging-format=json", "--kubeconfig=/nonexistent"},
	} {
		testlogs.EndsInJSON(t, testlogs.Failed(t, asManager, args...), "The manager ends")
	}
}

// ALL-07, CP-22: `manager all` starts every provider and becomes leader. With --namespace and --watch-filter, it
// reconciles only the objects of that namespace with the label.
func TestManagerAll_ALL07(t *testing.T) {
	g := NewWithT(t)
	g.SetDefaultEventuallyTimeout(expect.Patience)
	ctx := t.Context()
	own, err := testenv.Start(testenv.Options{AddToScheme: []func(*runtime.Scheme) error{infrav1.AddToScheme}})
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { g.Expect(own.Stop()).To(Succeed()) })
	for _, ns := range []string{"mine", "theirs"} {
		g.Expect(own.Client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})).To(Succeed())
	}
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	g.Expect(os.WriteFile(kubeconfig, own.Kubeconfig, 0o600)).To(Succeed())

	cmd := command()
	cmd.SetArgs([]string{
		"all", "--kubeconfig=" + kubeconfig, "--health-addr=0", "--diagnostics-address=0", "--webhook-port=0",
		"--leader-elect", "--leader-elect-namespace=default", "--namespace=mine", "--watch-filter=blue",
		// The lease survives the load of a busy machine.
		"--leader-elect-lease-duration=5m", "--leader-elect-renew-deadline=4m",
	})
	running, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- cmd.ExecuteContext(running) }()
	t.Cleanup(func() {
		stop()
		g.Expect(<-done).To(Succeed())
	})

	add := func(namespace, filter string) *infrav1.CapstanCluster {
		meta := metav1.ObjectMeta{Namespace: namespace, GenerateName: "c-", Labels: map[string]string{clusterv1.WatchLabel: filter}}
		cluster := &clusterv1.Cluster{ObjectMeta: meta, Spec: clusterv1.ClusterSpec{
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanCluster", Name: "x"},
		}}
		g.Expect(own.Client.Create(ctx, cluster)).To(Succeed())
		c := &infrav1.CapstanCluster{ObjectMeta: meta}
		c.OwnerReferences = []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: cluster.Name, UID: cluster.UID}}
		g.Expect(own.Client.Create(ctx, c)).To(Succeed())
		return c
	}
	addVolume := func(filter string) *infrav1.CapstanVolume {
		v := &infrav1.CapstanVolume{
			ObjectMeta: metav1.ObjectMeta{Namespace: "mine", GenerateName: "v-", Labels: map[string]string{clusterv1.WatchLabel: filter}},
			Spec:       infrav1.CapstanVolumeSpec{ID: "volume-" + filter, HostName: "h", ClusterName: "c", Owner: "MachineSet/m", VolumeName: "data", SizeGiB: 1},
		}
		g.Expect(own.Client.Create(ctx, v)).To(Succeed())
		return v
	}
	addTemplate := func(filter string) *infrav1.CapstanMachineTemplate {
		t := &infrav1.CapstanMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "mine", GenerateName: "t-", Labels: map[string]string{clusterv1.WatchLabel: filter}}}
		t.Spec.Template.Spec.CPUs = 2
		g.Expect(own.Client.Create(ctx, t)).To(Succeed())
		return t
	}
	foreign, red, blue := add("theirs", "blue"), add("mine", "red"), add("mine", "blue")
	redVolume, blueVolume, redTemplate, blueTemplate := addVolume("red"), addVolume("blue"), addTemplate("red"), addTemplate("blue")
	seen := func(o client.Object) bool {
		g.Expect(own.Client.Get(ctx, client.ObjectKeyFromObject(o), o)).To(Succeed())
		return len(o.GetFinalizers()) > 0
	}
	described := func(t *infrav1.CapstanMachineTemplate) bool { seen(t); return len(t.Status.Capacity) > 0 }
	g.Eventually(func() bool { return seen(blue) && seen(blueVolume) && described(blueTemplate) }).Should(BeTrue())
	// An event of an object that all clusters use does not change that.
	g.Expect(own.Client.Create(ctx, &infrav1.CapstanHost{
		ObjectMeta: metav1.ObjectMeta{Name: "h", Labels: map[string]string{clusterv1.WatchLabel: "blue"}},
		Spec:       infrav1.CapstanHostSpec{Address: "unix:///nothing", AllowedNamespaces: &infrav1.AllowedNamespaces{Names: []string{"mine", "theirs"}}},
	})).To(Succeed())
	g.Eventually(func() string {
		seen(blue)
		return conditions.GetReason(blue, infrav1.HostsAvailableCondition)
	}).Should(Equal(infrav1.NoHostConnectedReason), "the cluster has the event of the host")
	later := add("mine", "blue")
	g.Eventually(func() bool { return seen(later) }).Should(BeTrue())
	g.Expect(seen(red) || seen(foreign) || seen(redVolume) || described(redTemplate)).To(BeFalse())
	lease := &coordinationv1.Lease{}
	g.Expect(own.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: "controller-leader-election-capstan"}, lease)).To(Succeed())
}
