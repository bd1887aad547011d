// metrics-server collects the CPU and memory usage of nodes and pods from the kubelets, and serves it as metrics.k8s.io. It is
// upstream's program, built from its pinned module.
package main

import (
	"os"

	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/component-base/cli"

	"sigs.k8s.io/metrics-server/cmd/metrics-server/app"
)

func main() {
	os.Exit(cli.Run(app.NewMetricsServerCommand(genericapiserver.SetupSignalHandler())))
}
