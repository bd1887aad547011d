// Package agent is `capstan-init node agent`, a service of every machine. It configures pod networking between machines (CNI
// configuration, routes, masquerading), enforces NetworkPolicies, provides local volumes, publishes the endpoints of the Services
// of DNS and metrics-server, serves the metrics of components, manages the members of etcd, and renews certificates.
//
// The CNI configuration must not wait until a certificate is approved, so the agent writes it with the kubelet's credential,
// which may read its own Node. Everything else uses the agent's own credential.
//
// Layer: node. Allowed imports: api, library, contract.
package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"capstan.dev/capstan/internal/changes"
	"capstan.dev/capstan/internal/node/endpoint"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/machine"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/provision"
	"capstan.dev/capstan/internal/wakeup"
)

// agent runs on one machine.
type agent struct {
	config *nodeconfig.NodeConfiguration
	log    *slog.Logger
	name   string
	ips    []netip.Addr
}

// Run runs until ctx ends.
func Run(ctx context.Context, log *slog.Logger) error {
	config, err := nodeconfig.Load(nodeconfig.Path)
	if err != nil {
		return err
	}
	metadata, err := machine.Load(machine.MetadataPath)
	if err != nil {
		return err
	}
	ips, err := metadata.IPs()
	if err != nil {
		return err
	}
	hostname, err := os.Hostname()
	if err != nil {
		return err
	}
	a := &agent{config: config, log: log, name: config.NodeName(hostname), ips: ips}
	group, ctx := errgroup.WithContext(ctx)
	if config.Network.PodNetwork == nodeconfig.PodNetworkRoutes {
		group.Go(func() error { return a.configureCNI(ctx) })
		group.Go(func() error { return a.routePods(ctx) })
		group.Go(func() error { return a.enforcePolicies(ctx) })
	}
	group.Go(func() error { return a.provideVolumes(ctx) })
	controlPlane := config.Role != nodeconfig.RoleWorker
	if controlPlane && config.Network.DNS == nodeconfig.DNSCoreDNS {
		group.Go(func() error { return a.publish(ctx, dns) })
	}
	if controlPlane && config.ControlPlane.MetricsServer {
		group.Go(func() error { return a.publish(ctx, metricsServer) })
	}
	if controlPlane {
		group.Go(func() error { return a.electEndpoint(ctx) })
	}
	expires := make(chan time.Time, 1)
	if controlPlane && config.ControlPlane.ExternalEtcd == nil {
		group.Go(func() error { return a.careForEtcd(ctx) })
		group.Go(func() error { return a.careForOwnMember(ctx, expires) })
		group.Go(func() error { return a.makeBackups(ctx) })
	}
	group.Go(func() error { return a.serveMetrics(ctx) })
	group.Go(func() error { return a.followAuthorities(ctx) })
	group.Go(func() error { return provision.RenewCertificates(ctx, config, a.name, latest(expires), log) })
	return group.Wait()
}

// electEndpoint takes part in the election of the host that has the endpoint's virtual address, through the machine's own API
// server: the endpoint may have no host.
func (a *agent) electEndpoint(ctx context.Context) error {
	client, err := a.client(ctx, nodeconfig.AgentKubeconfig)
	if err != nil {
		return err
	}
	elector := endpoint.Elector{
		Name: a.name, Dir: filepath.Dir(machine.MetadataPath), Log: a.log,
		Leases: client.Resource(kube.Leases).Namespace(metav1.NamespaceSystem),
	}
	elector.Run(ctx)
	return nil
}

// latest returns a function that sends a time to the channel and replaces a time that was not received yet.
func latest(times chan time.Time) func(time.Time) {
	return func(at time.Time) {
		select {
		case <-times:
		default:
		}
		times <- at
	}
}

// client returns a client with the credential of a kubeconfig when the file exists.
func (a *agent) client(ctx context.Context, kubeconfig string) (dynamic.Interface, error) {
	if err := changes.WaitFor(ctx, kubeconfig); err != nil {
		return nil, err
	}
	return kube.NewClient(kubeconfig)
}

// configureCNI writes the CNI configuration as soon as the Node has its pod networks.
func (a *agent) configureCNI(ctx context.Context) error {
	client, err := a.client(ctx, nodeconfig.KubeletKubeconfig)
	if err != nil {
		return err
	}
	// The kubelet may only read its own Node, hence the field selector.
	return watchNodes(ctx, client, "metadata.name="+a.name, func(nodes []node) error {
		for _, n := range nodes {
			if n.name != a.name || len(n.podCIDRs) == 0 {
				continue
			}
			changed, err := writeCNI(cniPath, n.podCIDRs)
			if err != nil {
				return err
			}
			if changed {
				a.log.Info("CNI configured", "podCIDRs", n.podCIDRs)
			}
		}
		return nil
	})
}

// routePods maintains the routes to the pods of other nodes, and masquerades packets that leave the pod networks.
func (a *agent) routePods(ctx context.Context) error {
	podNetworks, err := parsePrefixes(a.config.Network.PodCIDRs)
	if err != nil {
		return err
	}
	if err := forward(a.ips); err != nil {
		return err
	}
	if err := masquerade(ctx, podNetworks); err != nil {
		return err
	}
	client, err := a.client(ctx, nodeconfig.AgentKubeconfig)
	if err != nil {
		return err
	}
	return watchNodes(ctx, client, "", func(nodes []node) error {
		return syncRoutes(a.log, wantedRoutes(a.name, nodes), podNetworks)
	})
}

// node contains the relevant fields of a Node.
type node struct {
	name      string
	uid       string
	podCIDRs  []netip.Prefix
	addresses []netip.Addr
	// annotations of the node agent.
	annotations map[string]string
}

// watchNodes calls see with all Nodes that match: first when all are known, then at each change. After an error it calls see
// again at the next change, or a second later.
func watchNodes(ctx context.Context, client dynamic.Interface, fieldSelector string, see func([]node) error) error {
	wake := wakeup.New()
	store, err := follow(ctx, client, kube.Nodes, fieldSelector, stripNode, wake.Send)
	if err != nil {
		return err
	}
	wake.Send()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-wake:
		}
		var nodes []node
		for _, object := range store.List() {
			nodes = append(nodes, nodeOf(object.(*unstructured.Unstructured)))
		}
		if err := see(nodes); err != nil {
			slog.Default().Error("Cannot process the Nodes; the agent tries again", "error", err)
			// Routes can fail for reasons without an event, such as an interface that is still down.
			time.AfterFunc(time.Second, wake.Send)
		}
	}
}

// follow keeps the objects of a resource in a store and calls changed after each change. It returns when the store has all objects.
func follow(ctx context.Context, client dynamic.Interface, resource schema.GroupVersionResource, fieldSelector string, strip cache.TransformFunc, changed func()) (cache.Store, error) {
	return followGone(ctx, client, resource, fieldSelector, strip, changed, func(any) { changed() })
}

// followGone is follow with another function for the objects that are gone.
func followGone(ctx context.Context, client dynamic.Interface, resource schema.GroupVersionResource, fieldSelector string, strip cache.TransformFunc, changed func(), gone func(any)) (cache.Store, error) {
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: kube.ListWatch(ctx, client, resource, fieldSelector),
		ObjectType:    &unstructured.Unstructured{},
		Transform:     strip,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { changed() },
			UpdateFunc: func(any, any) { changed() },
			DeleteFunc: gone,
		},
	})
	go controller.RunWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), controller.HasSynced) {
		return nil, ctx.Err()
	}
	return store, nil
}

// stripNode removes the unneeded parts of a Node; most of them are images and conditions.
func stripNode(object any) (any, error) {
	full, ok := object.(*unstructured.Unstructured)
	if !ok {
		return object, nil
	}
	podCIDRs, _, _ := unstructured.NestedStringSlice(full.Object, "spec", "podCIDRs")
	addresses, _, _ := unstructured.NestedSlice(full.Object, "status", "addresses")
	slim := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Node",
		"spec": map[string]any{}, "status": map[string]any{"addresses": addresses},
	}}
	slim.SetName(full.GetName())
	slim.SetUID(full.GetUID())
	slim.SetResourceVersion(full.GetResourceVersion())
	slim.SetAnnotations(ownAnnotations(full.GetAnnotations()))
	return slim, unstructured.SetNestedStringSlice(slim.Object, podCIDRs, "spec", "podCIDRs")
}

func ownAnnotations(all map[string]string) map[string]string {
	var out map[string]string
	for _, key := range []string{
		nodeconfig.AuthoritiesAnnotation, nodeconfig.ChallengeAnnotation, nodeconfig.SignatureAnnotation,
		nodeconfig.TrustedAuthoritiesAnnotation, nodeconfig.KubeletAuthorityAnnotation,
	} {
		if value, ok := all[key]; ok {
			if out == nil {
				out = map[string]string{}
			}
			out[key] = value
		}
	}
	return out
}

func nodeOf(object *unstructured.Unstructured) node {
	n := node{name: object.GetName(), uid: string(object.GetUID()), annotations: object.GetAnnotations()}
	podCIDRs, _, _ := unstructured.NestedStringSlice(object.Object, "spec", "podCIDRs")
	for _, text := range podCIDRs {
		if prefix, err := netip.ParsePrefix(text); err == nil {
			n.podCIDRs = append(n.podCIDRs, prefix)
		}
	}
	addresses, _, _ := unstructured.NestedSlice(object.Object, "status", "addresses")
	for _, item := range addresses {
		address, _ := item.(map[string]any)
		if address["type"] != "InternalIP" {
			continue
		}
		if ip, err := netip.ParseAddr(fmt.Sprint(address["address"])); err == nil {
			n.addresses = append(n.addresses, ip)
		}
	}
	return n
}

func parsePrefixes(texts []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, err
		}
		out = append(out, prefix)
	}
	return out, nil
}
