package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/templates"
)

// clock returns a time that the test sets.
type clock struct{ at time.Time }

func (c *clock) now() time.Time { return c.at }

func TestProgress(t *testing.T) {
	for name, test := range map[string]struct {
		live  bool
		width int
		want  string
	}{
		"plain": {false, 0, `   1.0s  ✓ etcd
   2.5s  ✓ API server: 127.0.0.1:6443
   2.5s  … waiting for a miracle
`},
		"terminal": {true, 0, "   1.0s  ✓ etcd\n" + "   1.0s  … API server\n" +
			"\x1b[1A\x1b[J" + "   2.5s  ✓ API server: 127.0.0.1:6443\n" + "   2.5s  … manager: starting\n" +
			"\x1b[1A\x1b[J"},
		// An open line must fit, as it is updated. A line of a completed step stays, so it can wrap and be complete.
		"narrow terminal": {true, 20, "   1.0s  ✓ etcd\n" + "   1.0s  … API ser…\n" +
			"\x1b[1A\x1b[J" + "   2.5s  ✓ API server: 127.0.0.1:6443\n" + "   2.5s  … manager…\n" +
			"\x1b[1A\x1b[J"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			c := &clock{at: time.Unix(1000, 0)}
			p := &progress{out: &out, live: test.live, start: c.at, now: c.now, width: func() int { return test.width }, stop: make(chan struct{})}
			c.at = c.at.Add(time.Second)
			p.show([]step{{name: "etcd", done: true}, {name: "API server"}})
			c.at = c.at.Add(1500 * time.Millisecond)
			p.show([]step{{name: "etcd"}, {name: "API server", done: true, note: "127.0.0.1:6443"}, {name: "manager", note: "starting"}})
			p.remark("a miracle")
			p.close()
			if diff := cmp.Diff(test.want, out.String()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestProgressIsQuietForScripts(t *testing.T) {
	var out bytes.Buffer
	p := (&app{out: &out, output: "json", live: true}).newProgress()
	p.show([]step{{name: "etcd", done: true}})
	p.remark("nothing")
	p.close()
	if out.Len() > 0 {
		t.Errorf("wrote %q", out.String())
	}
}

func parseObject(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		t.Fatal(err)
	}
	// The API returns whole numbers as int64.
	data, err := o.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.UnmarshalJSON(data); err != nil {
		t.Fatal(err)
	}
	return o
}

// The time of a command can end before the first answer of the API server.
func TestNoBlockersOfNothing(t *testing.T) {
	if found := blockers(view{}); len(found) > 0 {
		t.Errorf("blockers of no cluster: %v", found)
	}
}

func TestAssess(t *testing.T) {
	const head = "apiVersion: cluster.x-k8s.io/v1beta2\nkind: Cluster\nmetadata: {name: a}\n"
	for name, test := range map[string]struct {
		cluster string
		objects []string
		done    string // completed steps
		note    string // message of the first open step
		blocker string // first blocker
	}{
		"no Cluster": {done: ""},
		"new":        {cluster: head, done: ""},
		"infrastructure before control plane": {
			cluster: head + "spec: {controlPlaneEndpoint: {host: 10.0.0.1, port: 6443}}\nstatus: {initialization: {infrastructureProvisioned: true}, controlPlane: {desiredReplicas: 1, readyReplicas: 0}}",
			done:    "infrastructure",
		},
		"the infrastructure is complete when machines may boot": {
			cluster: head,
			objects: []string{"apiVersion: infrastructure.capstan.dev/v1beta2\nkind: CapstanCluster\nmetadata: {name: a}\nstatus: {conditions: [{type: BootAllowed, status: 'True'}]}"},
			done:    "infrastructure",
		},
		"the infrastructure is not complete while the cluster waits for its turn": {
			cluster: head,
			objects: []string{"apiVersion: infrastructure.capstan.dev/v1beta2\nkind: CapstanCluster\nmetadata: {name: a}\nstatus: {conditions: [{type: BootAllowed, status: 'False', reason: WaitingForOtherClusters, message: wait}]}"},
			blocker: "CapstanCluster a: BootAllowed is False (WaitingForOtherClusters): wait",
		},
		"workers are incomplete before the control plane answers, even with 0 replicas": {
			cluster: head + "status: {initialization: {infrastructureProvisioned: true}, workers: {desiredReplicas: 0}}",
			done:    "infrastructure",
		},
		"half of the workers are ready": {
			cluster: head + "status: {initialization: {infrastructureProvisioned: true, controlPlaneInitialized: true}, controlPlane: {desiredReplicas: 1, readyReplicas: 1}, workers: {desiredReplicas: 2, readyReplicas: 1}}",
			done:    "infrastructure, control plane answers, control plane machines", note: "1 of 2 ready",
		},
		"complete": {
			cluster: head + "status: {conditions: [{type: Available, status: 'True'}], initialization: {infrastructureProvisioned: true, controlPlaneInitialized: true}, controlPlane: {desiredReplicas: 1, readyReplicas: 1}, workers: {desiredReplicas: 0}}",
			done:    "infrastructure, control plane answers, control plane machines, workers, cluster available",
		},
		"the cause is listed before its consequences": {
			cluster: head + "status: {conditions: [{type: Available, status: 'False', message: '* ControlPlane: x'}]}",
			objects: []string{
				"apiVersion: cluster.x-k8s.io/v1beta2\nkind: Machine\nmetadata: {name: a-1}\nstatus: {conditions: [{type: InfrastructureReady, status: 'False', reason: NotReady, message: no host has 2Gi free}]}",
				"apiVersion: infrastructure.capstan.dev/v1beta2\nkind: CapstanMachine\nmetadata: {name: a-1}\nstatus: {conditions: [{type: Ready, status: 'False', message: '* HostAssigned: no'}, {type: Paused, status: 'False'}, {type: HostAssigned, status: 'False', reason: NoHost, message: no host has 2Gi free}]}",
			},
			blocker: "CapstanMachine a-1: HostAssigned is False (NoHost): no host has 2Gi free",
		},
		"a paused cluster": {
			cluster: head + "status: {conditions: [{type: Paused, status: 'True', reason: Paused}]}",
			blocker: "Cluster a: Paused is True (Paused)",
		},
		"conditions that are False in a healthy object do not block": {
			cluster: head + "status: {conditions: [{type: ScalingUp, status: 'False'}, {type: Deleting, status: 'False'}, {type: RollingOut, status: 'False'}]}",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var v view
			if test.cluster != "" {
				v.cluster = parseObject(t, test.cluster)
			}
			for _, o := range test.objects {
				v.objects = append(v.objects, parseObject(t, o))
			}
			a := assess(v)
			var done []string
			note := ""
			for _, s := range a.steps {
				if s.done {
					done = append(done, s.name)
				} else if note == "" {
					note = s.note
				}
			}
			if got := strings.Join(done, ", "); got != test.done {
				t.Errorf("completed steps are %q, want %q", got, test.done)
			}
			if test.note != "" && note != test.note {
				t.Errorf("the message of the first open step is %q", note)
			}
			if a.done != (len(done) == len(a.steps)) {
				t.Errorf("done is %v with the steps %v", a.done, done)
			}
			switch {
			case test.blocker == "" && len(a.blockers) > 0:
				t.Errorf("blocked by %v", a.blockers)
			case test.blocker != "" && (len(a.blockers) == 0 || a.blockers[0] != test.blocker):
				t.Errorf("blocked by %q, want %q first", a.blockers, test.blocker)
			}
		})
	}
}

// TestBlockersOnce checks that a message that an owner repeats is shown once.
func TestBlockersOnce(t *testing.T) {
	v := view{cluster: parseObject(t, "kind: Cluster\napiVersion: cluster.x-k8s.io/v1beta2\nmetadata: {name: a}\nstatus: {conditions: [{type: InfrastructureReady, status: 'False', message: port 6443 is taken}]}"), objects: []*unstructured.Unstructured{
		parseObject(t, "kind: CapstanCluster\napiVersion: infrastructure.capstan.dev/v1beta2\nmetadata: {name: a}\nstatus: {conditions: [{type: LoadBalancerReady, status: 'False', message: port 6443 is taken}]}"),
	}}
	if got := blockers(v); len(got) != 1 || !strings.HasPrefix(got[0], "CapstanCluster a: LoadBalancerReady") {
		t.Errorf("got %q", got)
	}
}

func TestClusterOptions(t *testing.T) {
	host := func(versions ...string) (h infrav1.CapstanHost) { h.Status.Versions = versions; return h }
	hosts := []infrav1.CapstanHost{host("v1.36.3"), host("v1.35.9", "v1.36.3")}
	good := clusterOptions{name: "a", namespace: "default", controlPlanes: 1, workers: 2}
	for name, test := range map[string]struct {
		change  func(*clusterOptions)
		version string // expected version
		wrong   string
	}{
		"newest version":               {func(*clusterOptions) {}, "v1.36.3", ""},
		"version without v":            {func(o *clusterOptions) { o.kubernetesVersion = "1.35.9" }, "v1.35.9", ""},
		"unknown version":              {func(o *clusterOptions) { o.kubernetesVersion = "v1.30.0" }, "", "found v1.35.9, v1.36.3 on the hosts"},
		"malformed version":            {func(o *clusterOptions) { o.kubernetesVersion = "latest" }, "", "such as v1.36.3"},
		"version without patch":        {func(o *clusterOptions) { o.kubernetesVersion = "1.36" }, "", "such as v1.36.3"},
		"bad name":                     {func(o *clusterOptions) { o.name = "My_Cluster" }, "", "lower case"},
		"bad namespace":                {func(o *clusterOptions) { o.namespace = "a.b" }, "", "namespace of lower case"},
		"even number of control plane": {func(o *clusterOptions) { o.controlPlanes = 2 }, "", "odd number"},
		"no control plane":             {func(o *clusterOptions) { o.controlPlanes = 0 }, "", "odd number"},
	} {
		t.Run(name, func(t *testing.T) {
			o := good
			test.change(&o)
			err := o.check()
			if err == nil {
				err = o.chooseVersion(hosts)
			}
			if test.wrong == "" {
				if err != nil || o.kubernetesVersion != test.version {
					t.Errorf("got %s, %v", o.kubernetesVersion, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), test.wrong) || exitCode(err) != exitUsage {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestVersionsOfHosts: a version is refused only if all hosts have reported theirs.
func TestVersionsOfHosts(t *testing.T) {
	host := func(versions ...string) (h infrav1.CapstanHost) { h.Status.Versions = versions; return h }
	for name, test := range map[string]struct {
		version string
		hosts   []infrav1.CapstanHost
		want    string
		code    int
	}{
		"one host has not reported yet": {"v1.34.0", []infrav1.CapstanHost{host("v1.36.3"), host()}, "v1.34.0", exitOK},
		"hosts cannot be listed":        {"v1.34.0", nil, "v1.34.0", exitOK},
		"newest of all hosts":           {"", []infrav1.CapstanHost{host("v1.9.0", "v1.10.0"), host("v1.9.1")}, "v1.10.0", exitOK},
		"no default without hosts":      {"", nil, "", exitFailed},
		"no default without reports":    {"", []infrav1.CapstanHost{host()}, "", exitFailed},
	} {
		t.Run(name, func(t *testing.T) {
			o := clusterOptions{kubernetesVersion: test.version}
			err := o.chooseVersion(test.hosts)
			if o.kubernetesVersion != test.want || (err != nil) != (test.code != exitOK) || err != nil && exitCode(err) != test.code {
				t.Errorf("got %q, %v", o.kubernetesVersion, err)
			}
		})
	}
}

const template = `apiVersion: cluster.x-k8s.io/v1beta2
kind: Cluster
metadata: {name: "${CLUSTER_NAME}", namespace: "${NAMESPACE}"}
---
apiVersion: example.com/v1
kind: Machines
metadata: {name: "${CLUSTER_NAME}-md"}
spec: {replicas: ${WORKER_MACHINE_COUNT}, version: "${KUBERNETES_VERSION}", cidr: "${CIDR:=10.0.0.0/8}", zone: "${ZONE}"}
`

func TestTemplate(t *testing.T) {
	o := clusterOptions{name: "a", namespace: "team", kubernetesVersion: "v1.36.3", controlPlanes: 1, workers: 3}
	environment := map[string]string{"ZONE": "north", "CLUSTER_NAME": "not this one"}
	lookup := func(name string) (string, bool) { v, ok := environment[name]; return v, ok }
	objects, err := o.process([]byte(template), lookup)
	if err != nil {
		t.Fatal(err)
	}
	if len(objects) != 2 || objects[1].GetKind() != "Cluster" {
		t.Fatalf("expected the Cluster last, got %v", objects)
	}
	if objects[0].GetName() != "a-md" || objects[0].GetNamespace() != "team" {
		t.Errorf("got %s/%s", objects[0].GetNamespace(), objects[0].GetName())
	}
	want := map[string]any{"replicas": int64(3), "version": "v1.36.3", "cidr": "10.0.0.0/8", "zone": "north"}
	if diff := cmp.Diff(want, objects[0].Object["spec"]); diff != "" {
		t.Error(diff)
	}
	delete(environment, "ZONE")
	if _, err := o.process([]byte(template), lookup); err == nil || !strings.Contains(err.Error(), "ZONE") || exitCode(err) != exitUsage {
		t.Errorf("error for a missing variable: %v", err)
	}
	if _, err := o.process([]byte("kind: ConfigMap\napiVersion: v1\n"), lookup); err == nil || !strings.Contains(err.Error(), "one Cluster named a, found 0") {
		t.Errorf("error for a template without a Cluster: %v", err)
	}
}

// TestCounts: numbers of machines come from the command line, else from the environment, else from the template, else they are 1. The default
// template has one worker.
func TestCounts(t *testing.T) {
	const bare = "kind: Cluster\napiVersion: cluster.x-k8s.io/v1beta2\nmetadata: {name: '${CLUSTER_NAME}'}\nspec: {a: ${ CONTROL_PLANE_MACHINE_COUNT }, b: ${WORKER_MACHINE_COUNT}}\n"
	defaults := strings.NewReplacer("${ CONTROL_PLANE_MACHINE_COUNT }", "${CONTROL_PLANE_MACHINE_COUNT:=3}", "${WORKER_MACHINE_COUNT}", "${WORKER_MACHINE_COUNT:=2}").Replace(bare)
	for name, test := range map[string]struct {
		template      string
		o             clusterOptions
		environment   map[string]string
		control, work int64
	}{
		"a flavor":                             {defaults, clusterOptions{flavor: "ha", controlPlanes: unchanged, workers: unchanged}, nil, 3, 2},
		"a template of the user":               {defaults, clusterOptions{from: "-", controlPlanes: unchanged, workers: unchanged}, nil, 3, 2},
		"flags":                                {defaults, clusterOptions{flavor: "ha", controlPlanes: 1, workers: 0}, map[string]string{"WORKER_MACHINE_COUNT": "7"}, 1, 0},
		"the environment":                      {defaults, clusterOptions{flavor: "ha", controlPlanes: unchanged, workers: unchanged}, map[string]string{"WORKER_MACHINE_COUNT": "7"}, 3, 7},
		"a template without default":           {bare, clusterOptions{from: "-", controlPlanes: unchanged, workers: unchanged}, nil, 1, 1},
		"the default template":                 {defaults, clusterOptions{controlPlanes: unchanged, workers: unchanged}, nil, 1, 1},
		"the default one, and the environment": {defaults, clusterOptions{controlPlanes: unchanged, workers: unchanged}, map[string]string{"WORKER_MACHINE_COUNT": "7"}, 1, 7},
		"a flag before a wrong environment":    {defaults, clusterOptions{controlPlanes: 3, workers: unchanged}, map[string]string{"CONTROL_PLANE_MACHINE_COUNT": "2"}, 3, 1},
	} {
		test.o.name = "a"
		objects, err := test.o.process([]byte(test.template), func(name string) (string, bool) { v, ok := test.environment[name]; return v, ok })
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(map[string]any{"a": test.control, "b": test.work}, objects[0].Object["spec"]); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	for value, want := range map[string]string{"2": "$CONTROL_PLANE_MACHINE_COUNT: expected an odd number", "x": "expected a number in $CONTROL_PLANE_MACHINE_COUNT"} {
		o := clusterOptions{name: "a", controlPlanes: unchanged, workers: unchanged}
		_, err := o.process([]byte(defaults), func(name string) (string, bool) { return value, name == "CONTROL_PLANE_MACHINE_COUNT" })
		if err == nil || exitCode(err) != exitUsage || !strings.Contains(err.Error(), want) {
			t.Errorf("%s control plane machines in the environment: %v", value, err)
		}
	}
}

func TestTemplateSources(t *testing.T) {
	shipped := fstest.MapFS{"cluster-template.yaml": {Data: []byte("default")}, "cluster-template-ha.yaml": {Data: []byte("ha")}}
	for name, test := range map[string]struct{ flavor, from, want, wrong string }{
		"default": {"", "", "default", ""},
		"flavor":  {"ha", "", "ha", ""},
		"unknown": {"x", "", "", `expected one of the flavors ha, found "x"`},
		"stdin":   {"", "-", "piped", ""},
		"file":    {"", "/nonexistent", "", "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			o := clusterOptions{flavor: test.flavor, from: test.from}
			got, err := o.template(shipped, strings.NewReader("piped"))
			if test.wrong != "" {
				if err == nil || !strings.Contains(err.Error(), test.wrong) {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil || string(got) != test.want {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

// The default template needs only the variables that the command sets.
func TestShippedTemplates(t *testing.T) {
	o := clusterOptions{name: "demo", namespace: "default", kubernetesVersion: "v1.36.3", controlPlanes: 1, workers: 2}
	data, err := o.template(templates.FS, nil)
	if err != nil {
		t.Fatal(err)
	}
	objects, err := o.process(data, func(string) (string, bool) { return "", false })
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range objects {
		if u.GetNamespace() != "default" {
			t.Errorf("%s %s is in namespace %s", u.GetKind(), u.GetName(), u.GetNamespace())
		}
	}
}

// execute runs a command on a box without an installation.
func execute(t *testing.T, args ...string) error {
	_, err := outputOf(t, args...)
	return err
}

func outputOf(t *testing.T, args ...string) (string, error) {
	var out bytes.Buffer
	a := &app{out: &out, errOut: io.Discard}
	c := a.command()
	c.SetOut(&out)
	c.SetErr(io.Discard)
	c.SetArgs(append([]string{"--root", t.TempDir(), "--assets", t.TempDir()}, args...))
	err := c.ExecuteContext(context.Background())
	return out.String(), err
}

// TestOutputs: programs can read what the command line asks for.
func TestOutputs(t *testing.T) {
	dry := []string{"create", "cluster", "demo", "--dry-run", "--kubernetes-version", "v1.36.3"}
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"--version":             {[]string{"--version"}, `^capstan \S+\n$`},
		"text":                  {[]string{"version"}, `^capstan \S+\n`},
		"JSON":                  {[]string{"version", "-o", "json"}, `^{\n  "capstan": "\S+",\n  "kubernetes": null\n}\n$`},
		"YAML":                  {[]string{"version", "-o", "yaml"}, `^capstan: \S+\nkubernetes: null\n$`},
		"manifests":             {dry, `^---\napiVersion: \S+\n(?s:.*)---\n`},
		"manifests as YAML":     {append(dry, "-o", "yaml"), `^---\napiVersion: \S+\n(?s:.*)---\n`},
		"manifests as JSON":     {append(dry, "-o", "json"), `^{\n  "apiVersion": "v1",\n  "items": \[\n(?s:.*)"kind": "List"\n}\n$`},
		"flavors":               {[]string{"__complete", "create", "cluster", "demo", "--flavor", ""}, `(?m)^ha$`},
		"formats":               {[]string{"__complete", "top", "--output", ""}, `^json\nyaml\n:4\n`},
		"formats of a progress": {[]string{"__complete", "up", "--progress", ""}, `^auto\nplain\njson\nnone\n`},
	} {
		t.Run(name, func(t *testing.T) {
			if out, err := outputOf(t, test.args...); err != nil || !regexp.MustCompile(test.want).MatchString(out) {
				t.Errorf("%v, the output does not match %s:\n%s", err, test.want, out)
			}
		})
	}
}

func TestParseDescribed(t *testing.T) {
	for args, want := range map[string]string{
		"":             "",
		"demo":         "[cluster machine host pool machinepool] demo",
		"cluster demo": "[cluster] demo", "clusters demo": "[cluster] demo", "cluster/demo": "[cluster] demo", "machines/demo": "[machine] demo",
		"cluster": "", "hosts": "", "cluster/": "", "node demo": "", "node/demo": "", "cluster demo two": "",
	} {
		kinds, name, err := parseDescribed(strings.Fields(args))
		if got := fmt.Sprintf("%v %s", kinds, name); err == nil && got != want || err != nil && (want != "" || exitCode(err) != exitUsage) {
			t.Errorf("%q: %s, %v", args, got, err)
		}
	}
}

// The clients of all commands have a logger: without one, controller-runtime prints a stack into the progress of a long command.
func TestLibraryLogger(t *testing.T) {
	if err := execute(t, "version"); err != nil {
		t.Fatal(err)
	}
	if sink := fmt.Sprintf("%T", ctrllog.Log.WithName("client").GetSink()); sink == "*log.delegatingLogSink" {
		t.Errorf("controller-runtime still waits for a logger: its sink is %s", sink)
	}
}

func TestExitCodes(t *testing.T) {
	for _, test := range []struct {
		args []string
		code int
	}{
		{[]string{"version"}, exitOK},
		{[]string{"completion", "bash"}, exitOK},
		{[]string{"--help"}, exitOK},
		{[]string{"help"}, exitOK},
		{[]string{"help", "create", "cluster"}, exitOK},
		{[]string{"help", "nonsense"}, exitUsage},
		{[]string{"help", "create", "nonsense"}, exitUsage},
		{[]string{"completion", "nonsense"}, exitUsage},
		{[]string{"completion", "bash", "more"}, exitUsage},
		{[]string{"status"}, exitNotFound},
		{[]string{"get", "clusters"}, exitNotFound},
		{[]string{"down"}, exitOK},
		{[]string{"up", "--tracing-insecure"}, exitUsage},
		{[]string{"up", "--tracing-endpoint", "none", "--tracing-ca-file", "ca.crt"}, exitUsage},
		{[]string{"status", "--nonsense"}, exitUsage},
		{[]string{"status", "-o", "xml"}, exitUsage},
		{[]string{"status", "too", "many"}, exitUsage},
		{[]string{"create", "cluster"}, exitUsage},
		{[]string{"create", "cluster", "UPPER"}, exitUsage},
		{[]string{"logs"}, exitUsage},
		{[]string{"shell"}, exitUsage},
		{[]string{"top", "nodes"}, exitUsage},
		{[]string{"top", "cluster"}, exitNotFound},
		{[]string{"describe", "cluster"}, exitUsage},
		{[]string{"host", "join"}, exitUsage},
		{[]string{"host", "join", "https://10.0.0.1:6443"}, exitUsage},
		{[]string{"scale", "cluster", "a"}, exitUsage},
		{[]string{"upgrade", "cluster", "a"}, exitUsage},
		{[]string{"create", "cluster", "a", "--flavor", "ha", "--from", "x"}, exitUsage},
		{[]string{"load", "image", "/nonexistent", "--cluster", "a"}, exitNotFound},
		{[]string{"nonsense"}, exitUsage},
		{[]string{"get", "nonsense"}, exitUsage},
		{[]string{"delete", "cluster", ""}, exitUsage},
		{[]string{"logs", "a", ""}, exitUsage},
		{[]string{"shell", "a", "--", "echo", ""}, exitNotFound},
		{[]string{"load", "image", "/dev/null", "--cluster", ""}, exitUsage},
		{[]string{"host", "leave", "--dir", ""}, exitUsage},
		{[]string{"status", "--root", ""}, exitUsage},
		{[]string{"get", "clusters", "--namespace", ""}, exitNotFound},
		{[]string{"scale", "cluster", "a", "--workers", "-1"}, exitUsage},
		{[]string{"scale", "cluster", "a", "--control-plane-machines", "0"}, exitUsage},
		{[]string{"scale", "cluster", "a", "--control-plane-machines", "3"}, exitNotFound},
		{[]string{"create", "cluster", "a", "--workers", "-1"}, exitUsage},
		{[]string{"create", "cluster", "a", "--timeout", "-1s"}, exitUsage},
		{[]string{"logs", "a", "--tail", "-1"}, exitUsage},
		{[]string{"dashboard", "--port", "65536"}, exitUsage},
		{[]string{"dashboard", "--port", "65535"}, exitNotFound},
		{[]string{"support-bundle", "--keep", "name"}, exitUsage},
		{[]string{"support-bundle", "--keep", "a/b"}, exitNotFound},
		{[]string{"support-bundle", "--file", "/dev/null"}, exitUsage},
		{[]string{"create", "cluster", "a", "--flavor", "nonsense"}, exitUsage},
		{[]string{"create", "cluster", "a", "--flavor", "ha"}, exitNotFound},
		{[]string{"doctor", "--peer", "nonsense"}, exitUsage},
		{[]string{"create", "cluster", "a", "--kubernetes-version", "v1.36.3", "--dry-run", "--from", "/nonexistent"}, exitNotFound},
		{[]string{"host", "token", "create", "--hosts", "0"}, exitUsage},
		{[]string{"host", "token", "create", "--server", "foo"}, exitUsage},
		{[]string{"host", "token", "create", "--server", "https://10.0.0.1:6443"}, exitNotFound},
		{[]string{"host", "prune", "a", "b", "--yes"}, exitUsage},
		{[]string{"host", "prune", "a", "b"}, exitNotFound},
		{[]string{"host", "versions", "add", "/", "--version", "x"}, exitUsage},
		{[]string{"host", "versions", "remove", "../x"}, exitUsage},
		{[]string{"restore", "/nonexistent"}, exitNotFound},
		{[]string{"restore", "/"}, exitUsage},
		{[]string{"restore", "s3://bucket"}, exitUsage},
	} {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			err := execute(t, test.args...)
			code := exitOK
			if err != nil {
				code = exitCode(err)
			}
			if code != test.code {
				t.Errorf("exit code %d, want %d: %v", code, test.code, err)
			}
		})
	}
	if err := execute(t, "logs"); err == nil || err.Error() != "expected `capstan logs MACHINE [SERVICE]`, found 0 arguments; see `capstan logs --help`" {
		t.Errorf("the error does not name the arguments: %v", err)
	}
	if err := execute(t, "upgrade", "cluster", "a"); err == nil || !strings.Contains(err.Error(), `"kubernetes-version" not set; see `) {
		t.Errorf("the error does not name the flag: %v", err)
	}
	if code := exitCode(errors.Join(errors.New("x"), context.DeadlineExceeded)); code != exitTimeout {
		t.Errorf("exit code of a timeout: %d", code)
	}
}
