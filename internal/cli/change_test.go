package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// lateClient answers after the time of the command has ended.
type lateClient struct{ client.WithWatch }

// Get implements client.Client.
func (lateClient) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return fmt.Errorf("no answer: %w", context.DeadlineExceeded)
}

// A change whose time ends before its first request is an error, and not a success without objects.
func TestWriteWithoutTime(t *testing.T) {
	m := &management{client: lateClient{}}
	if _, err := m.write(t.Context(), client.ObjectKey{Name: "a"}, target{}, parts.controlPlaneObjects); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("expected the end of the time, found %v", err)
	}
}

const (
	plainCluster    = "apiVersion: cluster.x-k8s.io/v1beta2\nkind: Cluster\nmetadata: {name: a}\nspec: {controlPlaneRef: {kind: CapstanControlPlane, name: a}}"
	topologyCluster = `apiVersion: cluster.x-k8s.io/v1beta2
kind: Cluster
metadata: {name: a}
spec:
  topology:
    version: v1.35.4
    controlPlane: {replicas: 1}
    workers:
      machineDeployments: [{name: one, class: w, replicas: 1}]
      machinePools: [{name: two, class: w, replicas: 2}]
`
	controlPlaneA = "apiVersion: controlplane.capstan.dev/v1beta2\nkind: CapstanControlPlane\nmetadata: {name: a}\nspec: {replicas: 1, version: v1.35.4}"
)

func workersNamed(name string) string {
	return "apiVersion: cluster.x-k8s.io/v1beta2\nkind: MachineDeployment\nmetadata: {name: " + name + "}\nspec: {replicas: 1, template: {spec: {version: v1.35.4}}}"
}

// summarizeParts describes sizes and versions: of the cluster's topology, the control plane and each group.
func summarizeParts(p parts) string {
	var out []string
	add := func(object map[string]any, paths ...string) {
		for _, path := range paths {
			if value, found, _ := unstructured.NestedFieldNoCopy(object, strings.Split(path, ".")...); found {
				out = append(out, fmt.Sprint(value))
			}
		}
	}
	add(p.cluster.Object, "spec.topology.version", "spec.topology.controlPlane.replicas")
	for _, g := range topologyGroups(p.cluster.Object) {
		add(g.object, "replicas")
	}
	if p.controlPlane != nil {
		add(p.controlPlane.Object, "spec.version", "spec.replicas")
	}
	for _, w := range p.workers {
		add(w.Object, "spec.template.spec.version", "spec.replicas")
	}
	return strings.Join(out, " ")
}

// TestMachines: the machines of a cluster are those of its control plane and of its workers.
func TestMachines(t *testing.T) {
	plain := parts{cluster: parseObject(t, plainCluster), controlPlane: parseObject(t, controlPlaneA), workers: []*unstructured.Unstructured{parseObject(t, workersNamed("a"))}}
	shaped := parts{cluster: parseObject(t, topologyCluster)}
	for want, p := range map[int]parts{2: plain, 4: shaped, 0: {cluster: parseObject(t, plainCluster)}} {
		if got := p.machines(); got != want {
			t.Errorf("%d machines, want %d", got, want)
		}
	}
}

// TestScaleWithoutMemory: a scaled cluster counts its new machines as the smallest ones.
func TestScaleWithoutMemory(t *testing.T) {
	for host, want := range map[string]string{
		"1536Mi": "",
		"1Gi": "3 new machines do not fit, even with the smallest limit, 512 MiB each: the hosts have free memory for 2 of them. " +
			"The other machines wait for more hosts\n",
	} {
		cluster := &clusterv1.Cluster{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(parseObject(t, topologyCluster).Object, cluster); err != nil {
			t.Fatal(err)
		}
		m := managementWith(t, cluster, hostWith(host))
		var out bytes.Buffer
		to := target{controlPlanes: unchanged, workers: 4, group: "one"}
		if err := (&app{errOut: &out}).checkHosts(t.Context(), m, client.ObjectKeyFromObject(cluster), to); err != nil || out.String() != want {
			t.Errorf("%s: %q, want %q: %v", host, out.String(), want, err)
		}
	}
}

func TestChanged(t *testing.T) {
	plain := func(workers ...string) parts {
		p := parts{cluster: parseObject(t, plainCluster), controlPlane: parseObject(t, controlPlaneA)}
		for _, w := range workers {
			p.workers = append(p.workers, parseObject(t, workersNamed(w)))
		}
		return p
	}
	topology := parts{cluster: parseObject(t, topologyCluster)}
	for name, test := range map[string]struct {
		parts       parts
		to          target
		want, wrong string
		workers     int
	}{
		"scale both":                     {plain("md"), target{controlPlanes: 3, workers: 4}, "v1.35.4 3 v1.35.4 4", "", 4},
		"scale the only group":           {plain("md"), target{controlPlanes: unchanged, workers: 0}, "v1.35.4 1 v1.35.4 0", "", 0},
		"several groups need a name":     {plain("w1", "w2"), target{controlPlanes: unchanged, workers: 2}, "", "found the groups w1, w2", 0},
		"named group":                    {plain("w1", "w2"), target{controlPlanes: unchanged, workers: 2, group: "w2"}, "v1.35.4 1 v1.35.4 1 v1.35.4 2", "", 3},
		"unknown group":                  {plain("x"), target{controlPlanes: unchanged, workers: 2, group: "z"}, "", "expected a group of workers z", 0},
		"no workers":                     {plain(), target{controlPlanes: unchanged, workers: 2}, "", "found the groups none", 0},
		"upgrade":                        {plain("md"), target{controlPlanes: unchanged, workers: unchanged, version: "v1.36.3"}, "v1.36.3 1 v1.36.3 1", "", 1},
		"upgrade of a topology":          {topology, target{controlPlanes: unchanged, workers: unchanged, version: "v1.36.3"}, "v1.36.3 1 1 2", "", 3},
		"scale a topology":               {topology, target{controlPlanes: 3, workers: 5, group: "two"}, "v1.35.4 3 1 5", "", 6},
		"a topology with several groups": {topology, target{controlPlanes: unchanged, workers: 5}, "", "found the groups one, two", 0},
		"no control plane":               {parts{cluster: parseObject(t, plainCluster)}, target{controlPlanes: 3, workers: unchanged}, "", "controlPlaneRef or a topology", 0},
	} {
		t.Run(name, func(t *testing.T) {
			before := summarizeParts(test.parts)
			got, err := test.parts.changed(test.to)
			if test.wrong != "" {
				if err == nil || !strings.Contains(err.Error(), test.wrong) {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil || summarizeParts(got) != test.want || got.totalWorkers() != test.workers {
				t.Errorf("got %q with %d workers, %v", summarizeParts(got), got.totalWorkers(), err)
			}
			if after := summarizeParts(test.parts); after != before {
				t.Errorf("the original objects were changed: %s", after)
			}
		})
	}
}

func TestMachineSteps(t *testing.T) {
	machine := func(more string, role string) string {
		return "apiVersion: cluster.x-k8s.io/v1beta2\nkind: Machine\nmetadata: {name: m, labels: {" + role + "}" + more + "}\nstatus: {nodeInfo: {kubeletVersion: v1.35.4}, conditions: [{type: Ready, status: 'True'}]}"
	}
	const controlPlane = "cluster.x-k8s.io/control-plane: ''"
	deployment := workersNamed("md")
	for name, test := range map[string]struct {
		objects []string
		to      target
		want    string // open steps with their notes
	}{
		"complete":                  {[]string{controlPlaneA, deployment, machine("", controlPlane), machine("", "")}, target{controlPlanes: unchanged, workers: unchanged}, ""},
		"old version":               {[]string{controlPlaneA, machine("", controlPlane)}, target{controlPlanes: unchanged, workers: unchanged, version: "v1.36.3"}, "control plane machines: 0 of 1 ready with v1.36.3, 1 others"},
		"one more worker is wanted": {[]string{controlPlaneA, deployment, machine("", controlPlane), machine("", "")}, target{controlPlanes: unchanged, workers: 2}, "workers: 1 of 2 ready"},
		"a machine is leaving": {[]string{controlPlaneA, deployment, machine("", controlPlane), machine("", ""), machine(", deletionTimestamp: '2026-01-01T00:00:00Z'", "")},
			target{controlPlanes: unchanged, workers: unchanged}, "workers: 1 of 1 ready, 1 others"},
		"the object does not have the target yet": {[]string{controlPlaneA, machine("", controlPlane)}, target{controlPlanes: 3, workers: unchanged}, "control plane machines: 1 of 3 ready"},
	} {
		t.Run(name, func(t *testing.T) {
			v := view{cluster: parseObject(t, plainCluster+"\nstatus: {conditions: [{type: Available, status: 'True'}]}")}
			for _, o := range test.objects {
				v.objects = append(v.objects, parseObject(t, o))
			}
			var open []string
			for _, s := range settledSteps(v, test.to) {
				if !s.done {
					open = append(open, s.name+": "+s.note)
				}
			}
			if got := strings.Join(open, "; "); got != test.want {
				t.Errorf("open steps: %q, want %q", got, test.want)
			}
		})
	}
}
