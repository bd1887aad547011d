package agent

import (
	"context"
	"fmt"
	"net/netip"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// published is a Service of the cluster with a process on each control plane machine.
type published struct {
	// service is the name of the Service in kube-system.
	service string
	// process is the service of PID 1.
	process string
	// every is true if the process listens on all addresses of the machine, and not only on the first.
	every bool
	ports []any
}

var (
	dns = published{service: "kube-dns", process: "coredns", every: true, ports: []any{
		map[string]any{"name": "dns", "port": int64(53), "protocol": "UDP"},
		map[string]any{"name": "dns-tcp", "port": int64(53), "protocol": "TCP"},
		map[string]any{"name": "metrics", "port": int64(9153), "protocol": "TCP"},
	}}
	metricsServer = published{service: nodeconfig.MetricsServer, process: nodeconfig.MetricsServer, ports: []any{
		map[string]any{"name": "https", "port": int64(nodeconfig.MetricsServerPort), "protocol": "TCP"},
	}}
)

// publish maintains this machine's EndpointSlices of a Service, which are ready while the process is. The Node owns them: they are
// deleted with it, and published again when the kubelet has registered the machine as a new Node.
func (a *agent) publish(ctx context.Context, p published) error {
	client, err := a.client(ctx, nodeconfig.AgentKubeconfig)
	if err != nil {
		return err
	}
	uids, readiness := make(chan string), make(chan bool)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return watchNodes(ctx, client, "metadata.name="+a.name, func(nodes []node) error {
			for _, n := range nodes {
				send(ctx, uids, n.uid)
			}
			return nil
		})
	})
	group.Go(func() error {
		// PID 1 reports when the process becomes ready or not ready.
		return initapi.NewClient(initapi.Socket).Watch(ctx, func(status initapi.Status) bool {
			return send(ctx, readiness, len(status.NotReady([]string{p.process})) == 0)
		})
	})
	group.Go(func() error {
		return atChanges(ctx, uids, readiness, func(uid string, ready bool) error {
			for _, slice := range p.slices(a.name, uid, a.ips, ready) {
				err := kube.Retry(ctx, "publishing "+p.service, func(ctx context.Context) error {
					_, err := client.Resource(kube.EndpointSlices).Namespace("kube-system").Apply(ctx, slice.GetName(), slice,
						metav1.ApplyOptions{FieldManager: "capstan-node-agent", Force: true})
					return err
				})
				if err != nil {
					return err
				}
			}
			a.log.Info("Endpoint published", "service", p.service, "ready", ready)
			return nil
		})
	})
	return group.Wait()
}

// send returns false if ctx ends before a receiver takes the value.
func send[T any](ctx context.Context, to chan<- T, value T) bool {
	select {
	case to <- value:
		return true
	case <-ctx.Done():
		return false
	}
}

// atChanges calls do when the uid of the Node and the readiness of the process are known, and when one of them has changed, until ctx
// ends or do returns an error.
func atChanges(ctx context.Context, uids <-chan string, readiness <-chan bool, do func(uid string, ready bool) error) error {
	type state struct {
		uid          string
		ready, known bool
	}
	for want, last := (state{}), (state{}); ; {
		select {
		case <-ctx.Done():
			return nil
		case want.uid = <-uids:
		case want.ready = <-readiness:
			want.known = true
		}
		if want == last || want.uid == "" || !want.known {
			continue
		}
		if err := do(want.uid, want.ready); err != nil {
			return err
		}
		last = want
	}
}

// slices returns one EndpointSlice for each IP family of the machine.
func (p published) slices(name, uid string, ips []netip.Addr, ready bool) []*unstructured.Unstructured {
	var slices []*unstructured.Unstructured
	if !p.every {
		ips = ips[:1]
	}
	seen := map[string]bool{}
	for _, ip := range ips {
		family, suffix := "IPv4", ""
		if ip.Is6() {
			family, suffix = "IPv6", "-ipv6"
		}
		if seen[family] {
			continue
		}
		seen[family] = true
		slices = append(slices, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
			"metadata": map[string]any{
				"name": fmt.Sprintf("%s-%s%s", p.service, name, suffix), "namespace": "kube-system",
				"labels": map[string]any{
					"kubernetes.io/service-name":             p.service,
					"endpointslice.kubernetes.io/managed-by": "node-agent.capstan.dev",
				},
				"ownerReferences": []any{map[string]any{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}},
			},
			"addressType": family,
			"endpoints": []any{map[string]any{
				"addresses": []any{ip.String()}, "nodeName": name,
				"conditions": map[string]any{"ready": ready, "serving": ready, "terminating": false},
			}},
			"ports": p.ports,
		}})
	}
	return slices
}
