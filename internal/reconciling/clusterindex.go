package reconciling

import (
	"context"
	"slices"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// The indexes of IndexByCluster. A list by label alone walks over all objects of the namespace, which can have the machines of
// hundreds of clusters.
const (
	clusterIndex      = "capstan.clusterName"
	controlPlaneIndex = "capstan.controlPlaneOf"
)

// IndexByCluster adds the indexes for OfCluster and ControlPlaneOf on the kind of an object.
func IndexByCluster(ctx context.Context, indexer client.FieldIndexer, kind client.Object) error {
	if err := indexer.IndexField(ctx, kind, clusterIndex, ofCluster); err != nil {
		return err
	}
	return indexer.IndexField(ctx, kind, controlPlaneIndex, func(o client.Object) []string {
		if _, member := o.GetLabels()[clusterv1.MachineControlPlaneLabel]; !member {
			return nil
		}
		return ofCluster(o)
	})
}

func ofCluster(o client.Object) []string {
	if name := o.GetLabels()[clusterv1.ClusterNameLabel]; name != "" {
		return []string{name}
	}
	return nil
}

// OfCluster selects the objects with the label of a cluster, with a client of Live or in a cache with the indexes of IndexByCluster.
func OfCluster(cluster client.ObjectKey) client.ListOption {
	return indexed{cluster, clusterIndex}
}

// ControlPlaneOf selects those of OfCluster that belong to the control plane.
func ControlPlaneOf(cluster client.ObjectKey) client.ListOption {
	return indexed{cluster, controlPlaneIndex}
}

type indexed struct {
	cluster client.ObjectKey
	index   string
}

// ApplyToList implements client.ListOption.
func (i indexed) ApplyToList(o *client.ListOptions) {
	client.InNamespace(i.cluster.Namespace).ApplyToList(o)
	client.MatchingFields{i.index: i.cluster.Name}.ApplyToList(o)
}

// Live returns a client of the API server that accepts OfCluster and ControlPlaneOf. The API server has no indexes, so the client
// sends the labels instead.
func Live(c client.Client) client.Client { return live{c} }

type live struct{ client.Client }

// List implements client.Client.
func (l live) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	opts = slices.Clone(opts)
	for i := range opts {
		if o, ok := opts[i].(indexed); ok {
			opts[i] = labelled(o)
		}
	}
	return l.Client.List(ctx, list, opts...)
}

type labelled indexed

// ApplyToList implements client.ListOption.
func (l labelled) ApplyToList(o *client.ListOptions) {
	client.InNamespace(l.cluster.Namespace).ApplyToList(o)
	client.MatchingLabels{clusterv1.ClusterNameLabel: l.cluster.Name}.ApplyToList(o)
	if l.index == controlPlaneIndex {
		client.HasLabels{clusterv1.MachineControlPlaneLabel}.ApplyToList(o)
	}
}
