package cli

import (
	"bytes"
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
	noHostAdvice = "add a host, free memory or CPUs, change the hostSelector, or allow the namespace on a host"
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
    → ` + noHostAdvice + ` (docs/troubleshooting.md#no-host-for-a-machine)

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
