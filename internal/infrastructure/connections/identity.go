package connections

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ManagementCluster identifies the management cluster by the UID of its namespace kube-system. A restore of its etcd preserves it.
func ManagementCluster(ctx context.Context, c client.Reader) (string, error) {
	ns := &corev1.Namespace{}
	err := c.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, ns)
	return string(ns.UID), err
}
