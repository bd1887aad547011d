//go:build e2e

package clusterctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// dataFile is on the volume of the worker, and precious is its content.
const dataFile, precious = "/srv/data/file", "precious"

// volumes lists the CapstanVolumes of the cluster's namespace.
func volumes(t *testing.T, c *harness.Cluster) []infrav1.CapstanVolume {
	t.Helper()
	list := &infrav1.CapstanVolumeList{}
	if err := c.Plane.Client.List(context.WithoutCancel(t.Context()), list, client.InNamespace(c.Namespace)); err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// dataVolume returns the volume of the MachineDeployment.
func dataVolume(t *testing.T, c *harness.Cluster) infrav1.CapstanVolume {
	t.Helper()
	found := slices.DeleteFunc(volumes(t, c), func(v infrav1.CapstanVolume) bool { return v.Spec.VolumeName != "data" })
	if len(found) != 1 {
		t.Fatalf("want one volume of the MachineDeployment, found %d", len(found))
	}
	return found[0]
}

// worker returns the machine of the MachineDeployment.
func worker(t *testing.T, c *harness.Cluster) infrav1.CapstanMachine {
	t.Helper()
	found := slices.DeleteFunc(c.Machines(t), func(m infrav1.CapstanMachine) bool {
		return m.Labels[clusterv1.MachineDeploymentNameLabel] == "" || !m.DeletionTimestamp.IsZero()
	})
	if len(found) != 1 {
		t.Fatalf("want one machine of the MachineDeployment, found %d", len(found))
	}
	return found[0]
}

// writeData writes the file to the volume of the worker.
func writeData(t *testing.T, c *harness.Cluster) {
	t.Helper()
	c.InMachine(t, worker(t, c).Name, "echo "+precious+" >"+dataFile+"; sync")
}

// checkData checks that the machine has the volume and its data.
func checkData(t *testing.T, c *harness.Cluster, machine string) {
	t.Helper()
	if v := dataVolume(t, c); v.Spec.MachineName != machine {
		t.Errorf("CapstanVolume %s belongs to machine %q, want %s", v.Name, v.Spec.MachineName, machine)
	}
	if got := c.InMachine(t, machine, "mountpoint -q /srv/data; cat "+dataFile); got != precious {
		t.Errorf("%s of machine %s contains %q, want %q", dataFile, machine, got, precious)
	}
}

// replaceWorker rolls the MachineDeployment out: the successor is on the host of the volume, and has the data.
func replaceWorker(t *testing.T, c *harness.Cluster) {
	t.Helper()
	volume, former := dataVolume(t, c), worker(t, c)
	mustClusterctl(t, nil, "alpha", "rollout", "restart", "machinedeployment/"+c.Name+"-md-0", "--namespace", c.Namespace, "--kubeconfig", admin(c.Plane))
	harness.Eventually(t, "the successor of "+former.Name, 3*time.Minute, func(ctx context.Context) error {
		machines, sets := &infrav1.CapstanMachineList{}, &clusterv1.MachineSetList{}
		if err := c.Plane.Client.List(ctx, machines, client.InNamespace(c.Namespace)); err != nil {
			return err
		}
		if slices.ContainsFunc(machines.Items, func(m infrav1.CapstanMachine) bool { return m.Name == former.Name }) {
			return errors.New("the former machine exists")
		}
		// clusterctl fails if core deletes the former MachineSet during a move.
		if err := c.Plane.Client.List(ctx, sets, client.InNamespace(c.Namespace)); err != nil {
			return err
		}
		if len(sets.Items) != 1 {
			return fmt.Errorf("%d MachineSets, %d machines", len(sets.Items), len(machines.Items))
		}
		return nil
	})
	ready(t, c, 3)
	settled(t, c)
	successor := worker(t, c)
	if now := dataVolume(t, c); now.Spec.ID != volume.Spec.ID || successor.Spec.HostName != volume.Spec.HostName {
		t.Errorf("volume %s of host %s became %s, and the successor is on host %s", volume.Spec.ID, volume.Spec.HostName, now.Spec.ID, successor.Spec.HostName)
	}
	if successor.Spec.ID == former.Spec.ID {
		t.Errorf("machine %s was not replaced", former.Spec.ID)
	}
	checkData(t, c, successor.Name)
}

// published returns the URL of the Service with an address of its own.
func published(t *testing.T, c *harness.Cluster) (url string) {
	t.Helper()
	harness.Eventually(t, "the address of the Service", time.Minute, func(ctx context.Context) error {
		s := &corev1.Service{}
		if err := c.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: "public"}, s); err != nil {
			return err
		}
		if len(s.Status.LoadBalancer.Ingress) != 1 {
			return fmt.Errorf("status: %v", s.Status.LoadBalancer)
		}
		url = "http://" + s.Status.LoadBalancer.Ingress[0].IP + "/"
		return nil
	})
	return url
}

// owned checks that each owner reference of the namespace is the UID of an object of the plane.
func owned(t *testing.T, c *harness.Cluster) {
	t.Helper()
	var all metav1.PartialObjectMetadataList
	out := c.Plane.MustKubectl(t, "-n", c.Namespace, "get", "cluster-api,capstan,secrets", "-o", "json")
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		t.Fatal(err)
	}
	uids, kinds := map[types.UID]bool{}, map[string]int{}
	for _, o := range all.Items {
		uids[o.UID] = true
	}
	for _, o := range all.Items {
		for _, ref := range o.OwnerReferences {
			kinds[o.Kind]++
			if !uids[ref.UID] {
				t.Errorf("the owner of %s %s is not here: %s %s", o.Kind, o.Name, ref.Kind, ref.Name)
			}
		}
	}
	for _, kind := range []string{"CapstanMachine", "IPAddressClaim", "IPAddress", "CapstanVolume"} {
		if kinds[kind] == 0 {
			t.Errorf("no %s has an owner", kind)
		}
	}
}

// deleted deletes the cluster. Addresses and the volume of the MachinePool go with it, and the volume of the MachineDeployment with its
// CapstanVolume.
func deleted(t *testing.T, c *harness.Cluster) {
	image := func(v infrav1.CapstanVolume) string {
		return filepath.Join(plane.Root, "hosts", "local", "volumes", v.Spec.ID, "disk.img")
	}
	kept := dataVolume(t, c)
	all := volumes(t, c)
	for _, v := range all {
		if _, err := os.Stat(image(v)); err != nil {
			t.Fatal(err)
		}
	}
	c.Delete(t)
	want := []string{"capstanippool.ipam.capstan.dev/machines", "capstanippool.ipam.capstan.dev/services", "capstanvolume.infrastructure.capstan.dev/" + kept.Name}
	gone := func() {
		t.Helper()
		harness.Eventually(t, "the objects of the cluster are gone", time.Minute, func(context.Context) error {
			if rest := objects(t, admin(c.Plane), c.Namespace); !slices.Equal(rest, want) {
				return fmt.Errorf("the namespace has %v, want %v", rest, want)
			}
			return nil
		})
		for _, v := range all {
			_, err := os.Stat(image(v))
			if exists := slices.ContainsFunc(want, func(name string) bool { return strings.HasSuffix(name, "/"+v.Name) }); exists != (err == nil) {
				t.Errorf("want the file of volume %s to exist: %v, got %v", v.Name, exists, err)
			}
		}
	}
	gone()
	if out, err := exec.Command("ip", "-o", "addr", "show", "dev", lan).CombinedOutput(); err != nil || strings.Contains(string(out), "198.51.100.9") {
		t.Errorf("the host still has the address of the Service: %s, %v", out, err)
	}
	c.Plane.MustKubectl(t, "-n", c.Namespace, "delete", "capstanvolume", kept.Name, "--timeout=60s")
	want = want[:2]
	gone()
	c.Plane.MustKubectl(t, "-n", c.Namespace, "delete", "capstanippool", "--all", "--timeout=60s")
}
