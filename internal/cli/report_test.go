package cli

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

const (
	infraMachine = "apiVersion: infrastructure.capstan.dev/v1beta2\nkind: CapstanMachine\nmetadata: {name: a-1, namespace: team, uid: m}\n"
	coreMachine  = "apiVersion: cluster.x-k8s.io/v1beta2\nkind: Machine\nmetadata: {name: a-1, namespace: team, uid: c}\n"
)

func TestHumanSize(t *testing.T) {
	for value, want := range map[string]string{
		"20489788Ki": "19.5Gi", "264212084Ki": "252.0Gi", "2": "2", "": "", "v1.36.3": "v1.36.3", "unix:///sockets/Ki": "unix:///sockets/Ki",
	} {
		if got := humanSize(value); got != want {
			t.Errorf("%q: %q, want %q", value, got, want)
		}
	}
}

func TestWaitingFor(t *testing.T) {
	noHost := infraMachine + "status: {conditions: [{type: Ready, status: 'False', reason: NotReady, message: '* HostAssigned: no host'}, {type: HostAssigned, status: 'False', reason: NoHost, message: no host has 2Gi free, lastTransitionTime: '2026-01-01T00:00:00Z'}]}"
	for name, test := range map[string]struct {
		objects []string
		want    []string // object, condition, reason
		do      string   // advice of the first
	}{
		"healthy":           {objects: []string{infraMachine + "status: {conditions: [{type: Ready, status: 'True'}, {type: Paused, status: 'False'}]}"}},
		"no conditions yet": {objects: []string{infraMachine}},
		"a cause without the summary of its object": {[]string{noHost}, []string{"CapstanMachine a-1 HostAssigned=False NoHost"}, "add a host"},
		"a cause before its consequence": {[]string{
			coreMachine + "status: {conditions: [{type: InfrastructureReady, status: 'False', reason: NotReady, message: something else}]}", noHost,
		}, []string{"CapstanMachine a-1 HostAssigned=False NoHost", "Machine a-1 InfrastructureReady=False NotReady"}, "add a host"},
		"a repeated message once": {[]string{
			coreMachine + "status: {conditions: [{type: InfrastructureReady, status: 'False', reason: NoHost, message: no host has 2Gi free}]}", noHost,
		}, []string{"CapstanMachine a-1 HostAssigned=False NoHost"}, "add a host"},
		"a summary without a cause": {[]string{infraMachine + "status: {conditions: [{type: Ready, status: 'False', reason: NotReady}]}"}, []string{"CapstanMachine a-1 Ready=False NotReady"}, ""},
		"unknown is waiting too":    {[]string{infraMachine + "status: {conditions: [{type: MachineRunning, status: Unknown, reason: HostUnreachable}]}"}, []string{"CapstanMachine a-1 MachineRunning=Unknown HostUnreachable"}, "repair the connection"},
		"an operation in progress": {[]string{coreMachine + "status: {conditions: [{type: Deleting, status: 'True', reason: DrainingNode, message: 2 pods are left}, {type: Available, status: 'False', reason: NotAvailable}]}"},
			[]string{"Machine a-1 Deleting=True DrainingNode"}, "look at the objects that the message names"},
		"paused":                            {[]string{infraMachine + "status: {conditions: [{type: Paused, status: 'True', reason: Paused}]}"}, []string{"CapstanMachine a-1 Paused=True Paused"}, "set spec.paused"},
		"a certificate that is not renewed": {[]string{coreMachine + "status: {conditions: [{type: CertificatesExpiring, status: 'True', reason: CertificatesExpiring}]}"}, []string{"Machine a-1 CertificatesExpiring=True CertificatesExpiring"}, "look for the machine"},
		"False and good":                    {objects: []string{coreMachine + "status: {conditions: [{type: CertificatesExpiring, status: 'False'}, {type: RollingOut, status: 'False'}, {type: BootstrapTokenAvailable, status: 'False', reason: NoLongerNeeded}]}"}},
	} {
		t.Run(name, func(t *testing.T) {
			var objects []*unstructured.Unstructured
			for _, o := range test.objects {
				objects = append(objects, parseObject(t, o))
			}
			got := waitingFor(objects)
			var have []string
			for _, w := range got {
				have = append(have, w.Object+" "+w.Condition+" "+w.Reason)
			}
			if !slices.Equal(have, test.want) {
				t.Errorf("got %q, want %q", have, test.want)
			}
			if len(got) > 0 && (!strings.HasPrefix(got[0].Do, test.do) || (test.do == "") != (got[0].Do == "")) {
				t.Errorf("advice %q", got[0].Do)
			}
		})
	}
}

func TestDescribe(t *testing.T) {
	machine := parseObject(t, strings.Replace(coreMachine, "metadata", "spec: {clusterName: a}\nmetadata", 1)+"status: {phase: Provisioning}")
	infra := parseObject(t, infraMachine+"status: {conditions: [{type: HostAssigned, status: 'False', reason: NoHost, message: \"no host has\\n2Gi free\", lastTransitionTime: '2026-01-01T00:00:00Z'}]}")
	at := func(minute int) metav1.Time { return metav1.NewTime(time.Date(2026, 1, 1, 0, minute, 0, 0, time.UTC)) }
	var events []corev1.Event
	for i := range maxEvents + 2 {
		events = append(events, corev1.Event{InvolvedObject: corev1.ObjectReference{Kind: "CapstanMachine", Name: "a-1", UID: "m"}, LastTimestamp: at(i), Reason: "Number" + strconv.Itoa(i), Message: "x"})
	}
	slices.Reverse(events)
	events = append(events, corev1.Event{InvolvedObject: corev1.ObjectReference{UID: types.UID("other")}, LastTimestamp: at(50), Reason: "Other"},
		corev1.Event{InvolvedObject: corev1.ObjectReference{}, LastTimestamp: at(50), Reason: "NoUID"})
	r := diagnose(machine, []*unstructured.Unstructured{infra}, events)
	if len(r.Events) != maxEvents || r.Events[0].Reason != "Number2" || r.Events[maxEvents-1].Reason != "Number11" {
		t.Errorf("events: %+v", r.Events)
	}
	r.Events = r.Events[maxEvents-1:]
	var out bytes.Buffer
	if err := r.print(&out, time.Date(2026, 1, 1, 0, 12, 0, 0, time.UTC)); err != nil {
		t.Fatal(err)
	}
	want := `Machine team/a-1
  Phase:    Provisioning
  Cluster:  a

Waiting for:
  CapstanMachine a-1: HostAssigned=False (NoHost), for 12m
    no host has 2Gi free
    → ` + adviceByReason["NoHost"].do + ` (docs/troubleshooting.md#no-host-for-a-machine)

Last events:
  60s  CapstanMachine a-1  Number11  x
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

// A host has the names of its container images, and the archives without any.
func TestDescribeContainerImages(t *testing.T) {
	host := parseObject(t, `
kind: CapstanHost
metadata: {name: rack-1}
status:
  containerImages:
  - {archive: a.tar, names: ["registry.example.org/a:v1", "registry.example.org/a:v2"]}
  - {archive: b.tar, problem: "no\narchive"}
  - {archive: c.tar, names: ["registry.example.org/c:v1"]}
`)
	want := []fact{{"Container images", "registry.example.org/a:v1, registry.example.org/a:v2, none of b.tar (no archive), registry.example.org/c:v1"}}
	if got := diagnose(host, nil, nil).Facts; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestTopTable(t *testing.T) {
	cluster := func(name, conditions string) *unstructured.Unstructured {
		return parseObject(t, "apiVersion: cluster.x-k8s.io/v1beta2\nkind: Cluster\nmetadata: {name: "+name+", namespace: team}\nstatus: {phase: Provisioned, controlPlane: {desiredReplicas: 3}, conditions: ["+conditions+"]}")
	}
	waits := func(minute string) string {
		return "{type: InfrastructureReady, status: 'False', reason: NotReady, lastTransitionTime: '2026-01-01T00:" + minute + ":00Z'}"
	}
	checkTable(t, topTable("cluster", topRows([]*unstructured.Unstructured{cluster("healthy", ""), cluster("short", waits("08")), cluster("long", waits("02"))}), time.Date(2026, 1, 1, 0, 10, 0, 0, time.UTC)), []string{
		"NAMESPACE|CLUSTER|PHASE|CONTROL PLANE|WORKERS|WAITING FOR|SINCE",
		"team|long|Provisioned|0/3|-|InfrastructureReady=False NotReady|8m",
		"team|short|Provisioned|0/3|-|InfrastructureReady=False NotReady|2m",
		"team|healthy|Provisioned|0/3|-|-|-",
	})
}

// checkTable compares the rows of a table, whose cells are separated by |.
func checkTable(t *testing.T, rows [][]string, want []string) {
	t.Helper()
	var got []string
	for _, row := range rows {
		got = append(got, strings.Join(row, "|"))
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// A MachinePool and its CapstanMachinePool have one row, with the cause of the latter.
func TestTopOfMachinePools(t *testing.T) {
	pool := func(namespace, name string) *unstructured.Unstructured {
		return parseObject(t, "apiVersion: cluster.x-k8s.io/v1beta2\nkind: MachinePool\nmetadata: {name: "+name+", namespace: "+namespace+"}\nspec: {clusterName: c, replicas: 3, template: {spec: {version: v1.36.3, infrastructureRef: {kind: CapstanMachinePool, name: "+name+"-infra}}}}\nstatus: {readyReplicas: 1, conditions: [{type: Available, status: 'False', reason: NotAvailable, message: 1 of 3}]}")
	}
	infrastructure := func(name string) *unstructured.Unstructured {
		return parseObject(t, "apiVersion: infrastructure.capstan.dev/v1beta2\nkind: CapstanMachinePool\nmetadata: {name: "+name+", namespace: team}\nstatus: {conditions: [{type: ScalingUp, status: 'True', reason: ScalingUp, lastTransitionTime: '2026-01-01T00:02:00Z'}]}")
	}
	checkTable(t, topTable("machinepool", topRows([]*unstructured.Unstructured{pool("team", "a"), pool("other", "a"), infrastructure("a-infra"), infrastructure("orphan")}), time.Date(2026, 1, 1, 0, 10, 0, 0, time.UTC)), []string{
		"NAMESPACE|MACHINEPOOL|CLUSTER|VERSION|READY|UP TO DATE|WAITING FOR|SINCE",
		"other|a|c|v1.36.3|1/3|0/3|Available=False NotAvailable|unknown",
		"team|a|c|v1.36.3|1/3|0/3|ScalingUp=True ScalingUp|8m",
		"team|orphan|-|-|-|-|ScalingUp=True ScalingUp|8m",
	})
}

// goodReasons are the reasons of conditions that block nobody.
var goodReasons = []string{
	"Available", "Used", "NoLongerNeeded", "Succeeded", "Restored", "Healthy", "NotUpdating", "NotRotating", "Voting", "Left", "Approved", "Stopped", "Ready",
	"Connected", "Drained", "HostsAvailable", "NetworkReady", "LoadBalancerReady", "EndpointExternal", "BootAllowed", "HostAssigned", "AddressesAssigned", "MachineRunning",
	"BootstrapSucceeded", "ServicesHealthy", "UpdateSucceeded", "Valid", "InRange", "NotOverlapping", "AddressAllocated",
	"ServicesPublished", "TunnelReady", "FencingSet", "Rebooted", "Applied", "Free",
	"NotReady",   // summarizes other conditions
	"HostFenced", // an event
}

// TestAdvice: each reason of the API has advice, unless it blocks nobody. Each section exists and lists the reason.
func TestAdvice(t *testing.T) {
	page, err := os.ReadFile("../../" + troubleshooting)
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, section := range strings.Split(string(page), "\n## ")[1:] {
		title, content, _ := strings.Cut(section, "\n")
		sections[strings.ReplaceAll(strings.ToLower(title), " ", "-")] = content
	}
	reasons := reasonsOfAPI(t)
	if len(reasons) < 90 {
		t.Fatalf("found %d reasons", len(reasons))
	}
	for _, reason := range reasons {
		if _, found := adviceByReason[reason]; found == slices.Contains(goodReasons, reason) {
			t.Errorf("reason %s: has advice: %v; want advice, or an entry in goodReasons", reason, found)
		}
	}
	for reason, a := range adviceByReason {
		content, found := sections[a.section]
		if a.do == "" || !found || !strings.Contains(content, "`"+reason+"`") {
			t.Errorf("reason %s: want advice, and a section %q of %s with the reason", reason, a.section, troubleshooting)
		}
		if !slices.Contains(reasons, reason) {
			t.Errorf("reason %s does not exist in the API", reason)
		}
	}
	for _, kind := range []string{"Paused", "Deleting", "CertificatesExpiring"} {
		if a := adviceFor(kind, ""); sections[a.section] == "" {
			t.Errorf("condition %s: no section %q", kind, a.section)
		}
	}
}

// reasonsOfAPI returns the values of all constants whose name ends in Reason.
func reasonsOfAPI(t *testing.T) (reasons []string) {
	t.Helper()
	files, err := filepath.Glob("../../api/*/v1beta2/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 || !strings.HasSuffix(spec.Names[0].Name, "Reason") {
				return true
			}
			if literal, ok := spec.Values[0].(*ast.BasicLit); ok {
				reason, err := strconv.Unquote(literal.Value)
				if err != nil {
					t.Fatal(err)
				}
				reasons = append(reasons, reason)
			}
			return true
		})
	}
	slices.Sort(reasons)
	return slices.Compact(reasons)
}
