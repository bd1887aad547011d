//go:build linux

package cli

import (
	"io"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// TestQuickstartUsesItsPlane: $KUBECONFIG and the flags of another management cluster do not change where quickstart works.
func TestQuickstartUsesItsPlane(t *testing.T) {
	t.Setenv("KUBECONFIG", "/nonexistent")
	a := &app{out: io.Discard, errOut: io.Discard, root: t.TempDir(), assets: t.TempDir(), kubeconfig: "other", context: "other"}
	if err := a.quickstart(t.Context()); err == nil {
		t.Fatal("expected an error without programs")
	}
	if from := choose(a.surroundings()); from != fromPlane || !a.onThisBox() {
		t.Errorf("uses %s, on this box: %v", from, a.onThisBox())
	}
}

// TestCreateDemo: a run continues an interrupted creation, and refuses a box without memory and a cluster that is being deleted.
func TestCreateDemo(t *testing.T) {
	o, _, objects := rendered(t, "", nil)
	cluster := func(change func(*clusterv1.Cluster)) *clusterv1.Cluster {
		c := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: o.name, Namespace: o.namespace, Finalizers: []string{clusterv1.ClusterFinalizer}}}
		change(c)
		return c
	}
	for name, test := range map[string]struct {
		memory      string
		cluster     *clusterv1.Cluster
		interrupted bool
		wrong       string
		code        int
		complete    bool
	}{
		"new": {memory: "4Gi", complete: true},
		"too little memory": {memory: "3Gi", wrong: "expected 4096 MiB of free memory for the 3 machines of cluster demo, found 3072 MiB without the memory that is reserved for the box: use a box " +
			"with more memory, delete other clusters, or create smaller machines: `sudo CAPSTAN_CONTROL_PLANE_MEMORY=1Gi CAPSTAN_WORKER_MEMORY=512Mi capstan quickstart`", code: exitUnfit},
		"interrupted, its machines have the memory": {memory: "0", interrupted: true, complete: true},
		"complete":       {memory: "0", cluster: cluster(func(*clusterv1.Cluster) {})},
		"being deleted":  {memory: "4Gi", cluster: cluster(func(c *clusterv1.Cluster) { c.DeletionTimestamp = &metav1.Time{Time: metav1.Now().Time} }), wrong: "being deleted", code: exitFailed},
		"unknown memory": {memory: "", complete: true},
	} {
		t.Run(name, func(t *testing.T) {
			m := managementWith(t, test.cluster, hostWith(test.memory))
			if test.interrupted {
				for _, u := range objects {
					if u.GetKind() == "Cluster" {
						u = incomplete(u)
						if err := m.apply(t.Context(), u); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			err := (&app{out: io.Discard, errOut: io.Discard}).createDemo(t.Context(), m, o)
			if test.wrong != "" && (err == nil || !strings.Contains(err.Error(), test.wrong) || exitCode(err) != test.code) || test.wrong == "" && err != nil {
				t.Fatalf("expected %q, found %v", test.wrong, err)
			}
			made, got := &clusterv1.MachineDeploymentList{}, &clusterv1.ClusterList{}
			if err := m.client.List(t.Context(), made); err != nil {
				t.Fatal(err)
			}
			if err := m.client.List(t.Context(), got); err != nil {
				t.Fatal(err)
			}
			if test.complete != (len(made.Items) == 1) || test.complete && (len(got.Items) != 1 || !isComplete(&got.Items[0])) {
				t.Errorf("the cluster has %d MachineDeployments: %+v", len(made.Items), got.Items)
			}
		})
	}
}
