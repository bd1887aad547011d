package infrastructure_test

import (
	"testing"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// IM-06: the backends of the load balancer have the port of the Cluster's API servers, when members join and when they leave.
// The port of the load balancer itself can differ.
func TestAPIServerPort_IM06(t *testing.T) {
	t.Parallel()
	b := newNamespace(t)
	b.host, b.fake = b.addHost(nil)
	b.addCluster(func(c *clusterv1.Cluster) { c.Spec.ClusterNetwork.APIServerPort = 8443 }, nil)
	b.provisioned()
	_, one := b.addMachine(controlPlane, nil)
	_, two := b.addMachine(controlPlane, nil)
	b.running(one)
	b.running(two)
	b.Eventually(b.backends).Should(ConsistOf(one.Spec.Network.Addresses[0].Address+":8443", two.Spec.Network.Addresses[0].Address+":8443"))
	b.Expect(b.fake.LoadBalancer(b.capstan.Spec.ID).GetListen()).To(Equal([]string{":6443"}))

	b.fake.Refuse("DeleteMachine", status.Error(codes.Internal, "wait"))
	b.delete(one)
	b.condition(one, "Deleting", metav1.ConditionTrue, "DeletionBlocked")
	b.Expect(b.backends()).To(ConsistOf(two.Spec.Network.Addresses[0].Address + ":8443"))
	b.fake.Refuse("DeleteMachine", nil)
}
