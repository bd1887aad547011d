package agent

import (
	"context"
	"net"
	"strconv"
	"time"

	"capstan.dev/capstan/internal/node/componentmetrics"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/provision"
)

// listenRetry is the pause after a failed attempt: a pod with the network of the machine can have the port.
const listenRetry = time.Minute

// serveMetrics serves the metrics of the machine's components, with certificate and credential of the kubelet.
func (a *agent) serveMetrics(ctx context.Context) error {
	client, err := a.client(ctx, nodeconfig.KubeletKubeconfig)
	if err != nil {
		return err
	}
	server := &componentmetrics.Server{
		Components: componentmetrics.Components(a.config), CAFile: nodeconfig.PKIDir + "/ca.crt", Certificate: provision.KubeletServing,
		Review: componentmetrics.Reviewer(client, a.name), Log: a.log,
	}
	for {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("", strconv.Itoa(componentmetrics.Port)))
		if err == nil {
			err = server.Serve(ctx, listener)
		}
		if ctx.Err() != nil {
			return nil
		}
		a.log.Error("Cannot serve the metrics of components; the agent tries again", "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(listenRetry):
		}
	}
}
