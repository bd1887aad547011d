package controlplane

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
)

// TestSizesInMetrics: the metric contains the size of each member. It is removed with the member and with the control plane.
func TestSizesInMetrics(t *testing.T) {
	member := func(size, inUse int64) etcdv1.EtcdMember {
		return etcdv1.EtcdMember{Status: etcdv1.EtcdMemberStatus{DBSizeBytes: ptr.To(size), DBInUseBytes: ptr.To(inUse)}}
	}
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: "sizes", Name: "demo"}}
	s := &scope{ControlPlane: &model.ControlPlane{Object: cp, Workload: &model.Workload{Members: map[string]etcdv1.EtcdMember{"a": member(8<<20, 3<<20), "b": member(9<<20, 3<<20), "new": {}}}}}
	measureSizes(s)
	if got := testutil.ToFloat64(etcdSize.WithLabelValues("sizes", "demo", "b")); got != 9<<20 {
		t.Errorf("the size of b is %v", got)
	}
	if got := testutil.ToFloat64(etcdInUse.WithLabelValues("sizes", "demo", "a")); got != 3<<20 {
		t.Errorf("a uses %v", got)
	}
	if n := testutil.CollectAndCount(etcdSize); n != 2 {
		t.Errorf("%d sizes", n)
	}
	stays := etcdSize.WithLabelValues("sizes", "demo", "a")
	delete(s.Workload.Members, "b")
	measureSizes(s)
	if etcdSize.WithLabelValues("sizes", "demo", "a") != stays {
		t.Error("the series of a was removed and made again")
	}
	if n := testutil.CollectAndCount(etcdSize); n != 1 {
		t.Errorf("%d sizes after a member has left", n)
	}
	forgetMetrics(client.ObjectKeyFromObject(cp))
	if n := testutil.CollectAndCount(etcdSize) + testutil.CollectAndCount(etcdInUse); n != 0 {
		t.Errorf("%d sizes of a deleted control plane remain", n)
	}
}
