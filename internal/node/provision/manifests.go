package provision

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/provision/manifests"
)

// applyConcurrency limits parallel requests. Each manifest is one request to an API server that has just started.
const applyConcurrency = 6

// manifests returns the basic objects of the cluster.
func (n *node) manifests() ([]*unstructured.Unstructured, error) {
	names := manifests.ForAgents(n.ControlPlane.ExternalEtcd == nil)
	if n.Network.KubeProxy == nodeconfig.KubeProxyNFTables {
		names = append(names, manifests.KubeProxy)
	}
	if n.Network.DNS == nodeconfig.DNSCoreDNS {
		names = append(names, manifests.CoreDNS)
	}
	objects, err := manifests.Parse(n.Network, names...)
	if err != nil {
		return nil, err
	}
	volumes, err := manifests.ForLocalVolumes(n.ControlPlane.LocalVolumes)
	return append(objects, volumes...), err
}

// applyManifests applies the basic objects. The namespace of some appears a moment after the API server is ready, so
// refused objects are retried for a while.
func (n *node) applyManifests(ctx context.Context) error {
	client, err := kube.NewClient(kubeconfigs["admin"])
	if err != nil {
		return err
	}
	objects, err := n.manifests()
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(applyConcurrency)
	for _, object := range objects {
		group.Go(func() error {
			return kube.Retry(ctx, "applying "+object.GetKind()+" "+object.GetName(), func(ctx context.Context) error {
				return apply(ctx, client, object)
			})
		})
	}
	return group.Wait()
}

func apply(ctx context.Context, client dynamic.Interface, object *unstructured.Unstructured) error {
	kind := object.GroupVersionKind()
	resource, _ := meta.UnsafeGuessKindToResource(kind) // the plural of each kind in the manifests is regular
	var api dynamic.ResourceInterface = client.Resource(resource)
	if object.GetNamespace() != "" {
		api = client.Resource(resource).Namespace(object.GetNamespace())
	}
	_, err := api.Apply(ctx, object.GetName(), object, metav1.ApplyOptions{FieldManager: kube.FieldManager, Force: true})
	if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) {
		return &kube.FinalError{Err: err}
	}
	return err
}

// labelControlPlane sets the control plane label of the Node, which a kubelet must not set itself.
func (n *node) labelControlPlane(ctx context.Context) error {
	client, err := kube.NewClient(kubeconfigs["admin"])
	if err != nil {
		return err
	}
	err = kube.WaitFor(ctx, client, kube.Nodes, n.name, func(*unstructured.Unstructured) (bool, error) { return true, nil })
	if err != nil {
		return fmt.Errorf("the kubelet does not register its Node; see /var/log/capstan/kubelet.log: %w", err)
	}
	return kube.Retry(ctx, "labelling the node", func(ctx context.Context) error {
		return apply(ctx, client, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "v1", "kind": "Node",
			"metadata": map[string]any{
				"name": n.name,
				"labels": map[string]any{
					"node-role.kubernetes.io/control-plane":                   "",
					"node.kubernetes.io/exclude-from-external-load-balancers": "",
				},
			},
		}})
	})
}
