package main

import (
	"testing"

	"github.com/spf13/cobra"
)

// What envtest, capstan-init and the embedded management plane call.
func TestCommandsAreComplete(t *testing.T) {
	have := commands()
	for _, name := range []string{
		"etcd", "etcdctl", "etcdutl", "kube-apiserver", "kube-controller-manager",
		"kube-scheduler", "kube-proxy", "kubelet", "kubectl",
	} {
		if have[name] == nil {
			t.Errorf("no %s", name)
		}
	}
}

// Importing etcdctl must not change how kubectl reads its arguments.
func TestPrefixMatchingIsOff(t *testing.T) {
	if cobra.EnablePrefixMatching {
		t.Error("cobra matches prefixes: \"kubectl de\" would run \"delete\"")
	}
}
