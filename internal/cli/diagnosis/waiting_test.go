package diagnosis

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const (
	infraMachine = "apiVersion: infrastructure.capstan.dev/v1beta2\nkind: CapstanMachine\nmetadata: {name: a-1, namespace: team}\n"
	coreMachine  = "apiVersion: cluster.x-k8s.io/v1beta2\nkind: Machine\nmetadata: {name: a-1, namespace: team}\n"
)

func parseObject(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		t.Fatal(err)
	}
	return o
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
		"a machine before its cluster": {[]string{
			"apiVersion: cluster.x-k8s.io/v1beta2\nkind: Cluster\nmetadata: {name: a}\nstatus: {conditions: [{type: WorkersAvailable, status: 'False', reason: NotAvailable}]}",
			coreMachine + "status: {conditions: [{type: InfrastructureReady, status: 'False', reason: NotReady}]}",
		}, []string{"Machine a-1 InfrastructureReady=False NotReady", "Cluster a WorkersAvailable=False NotAvailable"}, ""},
		"a repeated message once": {[]string{
			coreMachine + "status: {conditions: [{type: InfrastructureReady, status: 'False', reason: NoHost, message: no host has 2Gi free}]}", noHost,
		}, []string{"CapstanMachine a-1 HostAssigned=False NoHost"}, "add a host"},
		"a summary without a cause": {[]string{infraMachine + "status: {conditions: [{type: Ready, status: 'False', reason: NotReady}]}"}, []string{"CapstanMachine a-1 Ready=False NotReady"}, ""},
		"unknown is waiting too":    {[]string{infraMachine + "status: {conditions: [{type: MachineRunning, status: Unknown, reason: HostUnreachable}]}"}, []string{"CapstanMachine a-1 MachineRunning=Unknown HostUnreachable"}, "repair the connection"},
		"an operation in progress": {[]string{coreMachine + "status: {conditions: [{type: Deleting, status: 'True', reason: DrainingNode, message: 2 pods are left}, {type: Available, status: 'False', reason: NotAvailable}]}"},
			[]string{"Machine a-1 Deleting=True DrainingNode"}, "look at the objects that the message names"},
		"paused":                            {[]string{infraMachine + "status: {conditions: [{type: Paused, status: 'True', reason: Paused}]}"}, []string{"CapstanMachine a-1 Paused=True Paused"}, "set spec.paused"},
		"a certificate that is not renewed": {[]string{coreMachine + "status: {conditions: [{type: CertificatesExpiring, status: 'True', reason: CertificatesExpiring}]}"}, []string{"Machine a-1 CertificatesExpiring=True CertificatesExpiring"}, "look for the machine, host or node agent that does not run: it renews its certificates by itself; renew an authority"},
		"False and good":                    {objects: []string{coreMachine + "status: {conditions: [{type: CertificatesExpiring, status: 'False'}, {type: RollingOut, status: 'False'}, {type: BootstrapTokenAvailable, status: 'False', reason: NoLongerNeeded}]}"}},
	} {
		t.Run(name, func(t *testing.T) {
			var objects []*unstructured.Unstructured
			for _, o := range test.objects {
				objects = append(objects, parseObject(t, o))
			}
			got := WaitingFor(objects)
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
