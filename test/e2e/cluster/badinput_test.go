//go:build e2e

package cluster

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/test/e2e/harness"
)

// TestInvalidInput creates clusters with invalid input. Admission refuses each of them, or a condition of an object
// contains the expected and the found value. The deletion removes all their objects.
func TestInvalidInput(t *testing.T) {
	addRoute(t, "10.250.1.1/24")
	for _, wrong := range []struct {
		name     string
		from, to string // a text of the template, and its replacement
		words    []string
	}{
		{"malformed version", "version: " + harness.KubernetesVersion, "version: newest", []string{"newest"}},
		{"a version that no host has", "version: " + harness.KubernetesVersion, "version: v1.36.99", []string{"v1.36.99", "it has", harness.KubernetesVersion}},
		{"pod network with host bits", "10.244.0.0/16", "10.244.0.1/33", []string{"10.244.0.1/33"}},
		{"pod and Service networks overlap", "10.244.0.0/16", "10.96.0.0/12", []string{"10.96.0.0"}},
		{"more memory than the host has", "memory: 2Gi", "memory: 4Ti", []string{"4Ti", "memory"}},
		{"the host's own loopback", "kind: CapstanCluster\nmetadata:", "kind: CapstanCluster\nspec:\n  network:\n    machineCIDR: 127.0.0.0/8\nmetadata:", []string{"127.0.0.0/8", "loopback"}},
		{"machine network that the host routes already", "kind: CapstanCluster\nmetadata:", "kind: CapstanCluster\nspec:\n  network:\n    machineCIDR: 10.250.0.0/22\nmetadata:", []string{"10.250.0.0/22", "10.250.1.0/24"}},
		{"an image that no host has", "memory: 2Gi", "memory: 2Gi\n      image: nowhere", []string{"nowhere", "image"}},
		{"a folder of the host that is not allowed", "memory: 2Gi", "memory: 2Gi\n      hostMounts: [{source: /etc/ssl, path: /mnt/ssl}]", []string{"/etc/ssl", "allowedMounts"}},
		{"a proxy that is no URL", "      labels:\n        cluster.x-k8s.io/cluster-name: wrong", "      labels:\n        cluster.x-k8s.io/cluster-name: wrong\n    spec:\n      proxy: {https: \"squid:3128\"}", []string{"squid:3128", "http"}},
		{"balancer port 0", "kind: CapstanCluster\nmetadata:", "kind: CapstanCluster\nspec:\n  loadBalancer:\n    port: 70000\nmetadata:", []string{"port", "65535"}},
	} {
		t.Run(wrong.name, func(t *testing.T) {
			template := plane.Must(t, "create", "cluster", "wrong", "--dry-run", "--workers", "1")
			if !strings.Contains(template, wrong.from) {
				t.Fatalf("the template has no %q:\n%s", wrong.from, template)
			}
			objects := decode(t, strings.ReplaceAll(template, wrong.from, wrong.to))
			slices.SortStableFunc(objects, func(a, b *unstructured.Unstructured) int { return cmp.Compare(position(a), position(b)) })
			t.Cleanup(func() { removeAll(t, objects) })
			if said := createAll(t, objects); said != "" {
				contains(t, said, wrong.words)
				return
			}
			harness.Eventually(t, "a condition with the reason", 30*time.Second, func(ctx context.Context) error {
				return contain(conditionMessages(ctx, t), wrong.words)
			})
		})
	}
}

// addRoute adds a link with an address to the host, and thereby a route to its network, until the end of a test.
func addRoute(t *testing.T, address string) {
	t.Helper()
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "capwrong0"}, PeerName: "capwrong1"}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netlink.LinkDel(link); err != nil {
			t.Error(err)
		}
	})
	addr, err := netlink.ParseAddr(address)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(link, addr); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
}

func decode(t *testing.T, manifests string) []*unstructured.Unstructured {
	t.Helper()
	objects, err := manifest.Parse([]byte(manifests))
	if err != nil {
		t.Fatal(err)
	}
	for _, obj := range objects {
		if obj.GetNamespace() == "" {
			obj.SetNamespace(metav1.NamespaceDefault)
		}
	}
	return objects
}

// position of an object in the order of creation. The configuration of the workers is first: no machine starts before admission refuses it.
func position(obj *unstructured.Unstructured) int {
	if obj.GetKind() == "CapstanConfigTemplate" {
		return 0
	}
	return 1
}

// createAll creates the objects and returns the error of the first one that admission refuses.
func createAll(t *testing.T, objects []*unstructured.Unstructured) string {
	t.Helper()
	for _, obj := range objects {
		if err := plane.Client.Create(t.Context(), obj.DeepCopy()); err != nil {
			return err.Error()
		}
	}
	return ""
}

// removeAll deletes the objects, also those that were not created, and waits until the cluster is removed.
func removeAll(t *testing.T, objects []*unstructured.Unstructured) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	for _, obj := range objects {
		if err := plane.Client.Delete(ctx, obj.DeepCopy()); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	}
	deadline := time.Now().Add(3 * time.Minute)
	for _, obj := range objects {
		for gone(ctx, obj.DeepCopy()) != nil {
			if time.Now().After(deadline) {
				t.Fatalf("%s %s still exists three minutes after its deletion", obj.GetKind(), obj.GetName())
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(200 * time.Millisecond):
			}
		}
	}
}

// conditionMessages returns the messages of the conditions of the cluster's objects.
func conditionMessages(ctx context.Context, t *testing.T) string {
	t.Helper()
	var messages []string
	for _, kind := range []struct{ group, kind string }{
		{"cluster.x-k8s.io", "Cluster"}, {"cluster.x-k8s.io", "Machine"},
		{"infrastructure.capstan.dev", "CapstanCluster"}, {"infrastructure.capstan.dev", "CapstanMachine"},
		{"controlplane.capstan.dev", "CapstanControlPlane"}, {"bootstrap.capstan.dev", "CapstanConfig"},
	} {
		list := &unstructured.UnstructuredList{}
		list.SetAPIVersion(kind.group + "/v1beta2")
		list.SetKind(kind.kind + "List")
		if err := plane.Client.List(ctx, list, client.InNamespace(metav1.NamespaceDefault)); err != nil {
			t.Fatal(err)
		}
		for _, item := range list.Items {
			conditions, _, err := unstructured.NestedSlice(item.Object, "status", "conditions")
			if err != nil {
				t.Fatal(err)
			}
			for _, condition := range conditions {
				c := condition.(map[string]any)
				messages = append(messages, fmt.Sprintf("%s %s %v=%v %v: %v", kind.kind, item.GetName(), c["type"], c["status"], c["reason"], c["message"]))
			}
		}
	}
	return strings.Join(messages, "\n")
}

func contains(t *testing.T, said string, words []string) {
	t.Helper()
	if err := contain(said, words); err != nil {
		t.Error(err)
	}
}

func contain(said string, words []string) error {
	for _, word := range words {
		if !strings.Contains(said, word) {
			return fmt.Errorf("want %q, found:\n%s", words, said)
		}
	}
	return nil
}
