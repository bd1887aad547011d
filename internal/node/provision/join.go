package provision

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/node/backup"
	"capstan.dev/capstan/internal/node/etcd"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/supervisor"
)

// joinEtcd makes this machine's etcd a voting member of the cluster's etcd. It creates its EtcdMember before it asks for
// membership, so that the membership always has an owner.
func (n *node) joinEtcd(ctx context.Context) error {
	client, err := kube.NewEndpointClient(kubeconfigs["admin"], "https://"+n.Endpoint)
	if err != nil {
		return err
	}
	var members []etcdv1.EtcdMember
	err = kube.Retry(ctx, "announcing this machine's etcd at "+n.Endpoint, func(ctx context.Context) error {
		if err := n.announceEtcd(ctx, client); err != nil {
			return err
		}
		var err error
		members, err = listEtcdMembers(ctx, client)
		if err == nil && len(etcdEndpoints(members)) == 0 {
			err = errors.New("no EtcdMember has joined: the agent of the first machine has not reported its etcd yet")
		}
		return err
	})
	if err != nil {
		return err
	}
	tls, err := etcd.TLS(nodeconfig.PKIDir)
	if err != nil {
		return err
	}
	n.initialCluster = recordedInitialCluster()
	command := n.etcdService().Command
	return etcd.Join(ctx, etcd.Joining{
		Name: n.name, PeerURL: n.peerURL(), DataDir: valueOf(command, "data-dir"), WALDir: valueOf(command, "wal-dir"),
		Endpoints: etcdEndpoints(members), Local: etcd.LocalEndpoint, TLS: tls, Log: n.log,
		Start: func(ctx context.Context, initialCluster string) error {
			n.initialCluster = initialCluster
			return n.startServices(ctx, n.etcdService())
		},
		Restart: func(ctx context.Context) error { return n.init.Service(ctx, "etcd", "restart") },
		Others:  func(ctx context.Context) ([]string, error) { return announcedLately(ctx, client) },
		Wanted:  func(ctx context.Context) error { return n.announceEtcd(ctx, client) },
	})
}

// leaveFormerEtcd lets the first machine of a cluster begin a new etcd on the volumes of a former machine. Other machines decide this when they
// join. services is the folder with the services that this machine has started.
func (n *node) leaveFormerEtcd(services string) error {
	if n.Role != nodeconfig.RoleInit || n.ControlPlane.ExternalEtcd != nil || atomicfile.Exists(filepath.Join(services, "etcd.yaml")) {
		return nil
	}
	command := n.etcdService().Command
	dataDir, walDir := valueOf(command, "data-dir"), valueOf(command, "wal-dir")
	if restored, err := backup.Restored(dataDir, n.name); restored || err != nil {
		return err
	}
	if err := backup.SetAside(n.log, dataDir, n.name); err != nil {
		return fmt.Errorf("leaving the data of a former etcd: %w", err)
	}
	return etcd.EraseLog(walDir)
}

// announceEtcd applies the EtcdMember of this machine. It refuses permanently if the member must leave.
func (n *node) announceEtcd(ctx context.Context, client dynamic.Interface) error {
	applied, err := client.Resource(kube.EtcdMembers).Apply(ctx, n.name, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": etcdv1.GroupVersion.String(), "kind": "EtcdMember",
		"metadata": map[string]any{"name": n.name},
		"spec":     map[string]any{"peerURL": n.peerURL(), "clientURL": n.clientURL()},
	}}, metav1.ApplyOptions{FieldManager: kube.FieldManager, Force: true})
	if err != nil {
		return err
	}
	if leave, _, _ := unstructured.NestedBool(applied.Object, "spec", "leave"); leave {
		return &kube.FinalError{Err: fmt.Errorf("EtcdMember %s must leave, so this machine cannot join: delete its Machine", n.name)}
	}
	return nil
}

func listEtcdMembers(ctx context.Context, client dynamic.Interface) ([]etcdv1.EtcdMember, error) {
	list, err := client.Resource(kube.EtcdMembers).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var members []etcdv1.EtcdMember
	for _, item := range list.Items {
		m, err := etcd.FromUnstructured(&item)
		if err != nil {
			return nil, err
		}
		members = append(members, m)
	}
	return members, nil
}

// announcedLately returns the peer URLs of machines that were announced within lately.
func announcedLately(ctx context.Context, client dynamic.Interface) ([]string, error) {
	members, err := listEtcdMembers(ctx, client)
	var urls []string
	for _, m := range members {
		if !m.Spec.Leave && m.Status.MemberID == "" && time.Since(m.CreationTimestamp.Time) < lately {
			urls = append(urls, m.Spec.PeerURL)
		}
	}
	return urls, err
}

// lately is the maximum age of the announcement of a machine that is about to join, because machines join directly
// after it.
const lately = 20 * time.Second

// etcdEndpoints returns the client URLs of all members that have joined.
func etcdEndpoints(members []etcdv1.EtcdMember) []string {
	var out []string
	for _, m := range members {
		if apimeta.IsStatusConditionTrue(m.Status.Conditions, etcdv1.JoinedCondition) {
			out = append(out, m.Spec.ClientURL)
		}
	}
	slices.Sort(out)
	return out
}

// recordedInitialCluster returns the initial cluster of the previous start. etcd ignores it once it has data, and a change
// would restart etcd.
func recordedInitialCluster() string {
	services, _, _ := supervisor.Load(supervisor.Dir)
	for _, s := range services {
		if s.Name == "etcd" {
			return valueOf(s.Command, "initial-cluster")
		}
	}
	return ""
}
