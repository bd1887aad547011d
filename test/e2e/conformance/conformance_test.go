//go:build e2e

// Package conformance runs Kubernetes' own specs against a cluster of Capstan: 26 in each run of all tests, and all
// conformance specs with "make conformance".
package conformance

import (
	"context"
	"html"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/testnetns"
	"capstan.dev/capstan/test/conformance"
	"capstan.dev/capstan/test/e2e/harness"
)

// plane is the management plane of all tests of this package.
var plane *harness.Plane

func TestMain(m *testing.M) { os.Exit(harness.Run(m, &plane)) }

// subset has specs of each area that depends on how Capstan builds nodes and control planes.
var subset = []string{
	"[sig-network] Services should serve multiport endpoints from pods [Conformance]",
	"[sig-network] Services should be able to create a functioning NodePort service [Conformance]",
	"[sig-network] DNS should provide DNS for services [Conformance]",
	"[sig-network] EndpointSlice should create Endpoints and EndpointSlices for Pods matching a Service [Conformance]",
	"[sig-network] Networking Granular Checks: Pods should function for node-pod communication: udp [LinuxOnly] [NodeConformance] [Conformance]",
	"[sig-node] Pods should run through the lifecycle of Pods and PodStatus [Conformance]",
	"[sig-node] Pods should support remote command execution over websockets [NodeConformance] [Conformance]",
	"[sig-node] Probing container should be restarted with a /healthz http liveness probe [NodeConformance] [Conformance]",
	"[sig-node] InitContainer [NodeConformance] should invoke init containers on a RestartNever pod [Conformance]",
	"[sig-node] Secrets should be consumable as environment variable names variable names with various prefixes [Conformance]",
	"[sig-node] ImageVolume should succeed with pod and pull policy of Always [LinuxOnly] [MinimumKubeletVersion:1.35] [Conformance]",
	"[sig-node] Kubelet when scheduling a read only busybox container should not write to root filesystem [LinuxOnly] [NodeConformance] [Conformance]",
	"[sig-node] Security Context when creating containers with AllowPrivilegeEscalation should not allow privilege escalation when false [LinuxOnly] [NodeConformance] [Conformance]",
	"[sig-apps] Deployment RollingUpdateDeployment should delete old pods and create new ones [Conformance]",
	"[sig-apps] StatefulSet Basic StatefulSet functionality [StatefulSetBasic] should have a working scale subresource [Conformance]",
	"[sig-apps] Daemon set [Serial] should run and stop simple daemon [Conformance]",
	"[sig-apps] Job should run a job to completion when tasks sometimes fail and are locally restarted [Conformance]",
	"[sig-storage] EmptyDir volumes should support (non-root,0644,tmpfs) [LinuxOnly] [NodeConformance] [Conformance]",
	"[sig-storage] Projected combined should project all components that make up the projection API [Projection] [NodeConformance] [Conformance]",
	"[sig-storage] ConfigMap should be consumable from pods in volume as non-root [NodeConformance] [Conformance]",
	"[sig-api-machinery] AdmissionWebhook [Privileged:ClusterAdmin] should mutate configmap [Conformance]",
	"[sig-api-machinery] Aggregator Should be able to support the 1.17 Sample API Server using the current Aggregator [LinuxOnly] [Conformance]",
	"[sig-api-machinery] CustomResourceDefinition resources [Privileged:ClusterAdmin] custom resource defaulting for requests and from storage works [Conformance]",
	"[sig-api-machinery] Garbage collector should delete pods created by rc when not orphaning [Conformance]",
	"[sig-api-machinery] Watchers should observe add, update, and delete watch notifications on configmaps [Conformance]",
	"[sig-auth] ServiceAccounts should mount projected service account token [Conformance]",
}

// subsetImages are the images that the subset uses.
var subsetImages = []string{"agnhost", "busybox", "nginx", "glibc-dns-testing", "nonewprivs", "pause", "sample-apiserver", "etcd"}

// Kubernetes' own specs pass on a cluster with two workers. Each spec of the list must run and pass.
func TestSubset(t *testing.T) {
	var names []string
	for _, name := range subset {
		names = append(names, regexp.QuoteMeta(name))
	}
	reports := t.TempDir()
	specs := run(t, subsetImages, conformance.Run{Focus: strings.Join(names, "|"), Processes: 4, Timeout: 15 * time.Minute, Reports: reports})
	if err := conformance.Missing(specs, subset); err != nil {
		t.Error(err)
	}
	report, err := os.ReadFile(filepath.Join(reports, "junit.xml"))
	expect.NoError(t, err)
	for _, name := range subset {
		if !strings.Contains(html.UnescapeString(string(report)), name) {
			t.Errorf("the report for other tools does not contain %q", name)
		}
	}
}

// run runs specs on a new cluster with one control plane machine and two workers.
func run(t *testing.T, images []string, r conformance.Run) []conformance.Spec {
	t.Helper()
	t.Setenv("CAPSTAN_WORKER_MEMORY", "3Gi")
	r.Programs = programs()
	start := time.Now()
	c := plane.CreateCluster(t, "default", "conformance", "--workers", "2")
	harness.Eventually(t, "three Nodes", 5*time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 3) })
	for _, image := range images {
		plane.Must(t, "load", "image", filepath.Join(r.Programs, "images", image+".tar"), "--cluster", c.Name, "--namespace", c.Namespace)
	}
	mirror(t, c, filepath.Join(r.Programs, "images", "kitten.tar"))
	t.Logf("the cluster with its images: %v", time.Since(start).Round(time.Second))

	start = time.Now()
	r.Kubeconfig, r.Kubectl = c.Kubeconfig, harness.Kubectl()
	specs, err := r.Do(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the specs: %v\n%s", time.Since(start).Round(time.Second), conformance.Summary(specs))
	if err := conformance.Failures(specs); err != nil {
		t.Error(err)
	}
	return specs
}

// mirror makes the images of an archive available to machines that pull them, at an address of each machine itself. A spec of image
// volumes always pulls.
func mirror(t *testing.T, c *harness.Cluster, archive string) {
	t.Helper()
	registry, err := conformance.OpenRegistry(archive)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range c.Machines(t) {
		machine, err := netns.GetFromPid(plane.FindRunning(t, m.Name, "kubelet", 1)[0].PID)
		if err != nil {
			t.Fatal(err)
		}
		server := httptest.NewUnstartedServer(registry)
		expect.NoError(t, server.Listener.Close())
		expect.NoError(t, testnetns.In(machine, func() (err error) {
			server.Listener, err = net.Listen("tcp", "127.0.0.1:0")
			return err
		}))
		expect.NoError(t, machine.Close())
		server.Start()
		t.Cleanup(server.Close)
		plane.Must(t, "shell", m.Name, "--namespace", c.Namespace, "--", "sh", "-c", `mkdir -p /etc/containerd/certs.d/registry.k8s.io
			echo '[host."`+server.URL+`"]' >/etc/containerd/certs.d/registry.k8s.io/hosts.toml`)
	}
}

// programs is the folder that "make build-conformance" fills.
func programs() string { return filepath.Join(harness.Bin(), "conformance") }
