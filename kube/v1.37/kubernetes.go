package main

import (
	"context"
	"os"
	_ "time/tzdata" // CronJob time zones, wherever the machine has no zone files

	_ "k8s.io/client-go/plugin/pkg/client/auth" // kubectl
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // version metric
	kubectlcmd "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserverapp "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanagerapp "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxyapp "k8s.io/kubernetes/cmd/kube-proxy/app"
	schedulerapp "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubeletapp "k8s.io/kubernetes/cmd/kubelet/app"
)

// These are the main functions of k8s.io/kubernetes/cmd/*, which cannot be
// imported. Compare them when the version changes.

func apiserver() int { return cli.Run(apiserverapp.NewAPIServerCommand()) }

func controllerManager() int { return cli.Run(controllermanagerapp.NewControllerManagerCommand()) }

func scheduler() int { return cli.Run(schedulerapp.NewSchedulerCommand()) }

func proxy() int { return cli.Run(proxyapp.NewProxyCommand()) }

func kubelet() int { return cli.Run(kubeletapp.NewKubeletCommand(context.Background())) }

func kubectl() int {
	// The verbosity must be known before the command is built, or what happens
	// during its construction (plugins, kuberc) is not logged.
	_, _ = logs.GlogSetter(kubectlcmd.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(kubectlcmd.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
	return 0
}
