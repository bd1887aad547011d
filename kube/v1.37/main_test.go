package main

import "testing"

// What envtest, capstan-init and the embedded management plane call.
func TestCommandsAreComplete(t *testing.T) {
	have := commands()
	for _, name := range []string{
		"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl",
	} {
		if have[name] == nil {
			t.Errorf("no %s", name)
		}
	}
}
