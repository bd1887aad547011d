// capstan-kube is Kubernetes 1.37 in one binary: the control plane, the node
// components and kubectl. Sharing one file makes a machine's image small and lets all
// machines of a host share its pages.
package main

import (
	"os"

	"capstan.dev/capstan/kube/multicall"
)

func commands() multicall.Commands {
	return multicall.Commands{
		"kube-apiserver":          apiserver,
		"kube-controller-manager": controllerManager,
		"kube-scheduler":          scheduler,
		"kube-proxy":              proxy,
		"kubelet":                 kubelet,
		"kubectl":                 kubectl,
	}
}

func main() {
	os.Exit(commands().Run(os.Stdout, os.Stderr))
}
