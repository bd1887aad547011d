package etcd

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/wakeup"
)

// Field managers of an EtcdMember's status: the leader's agent and the machine's own agent.
const (
	careManager = "capstan-etcd-care"
	selfManager = "capstan-etcd-member"
)

// kubeObjects reads the EtcdMembers from a watch and writes them to the cluster's API.
type kubeObjects struct {
	client  dynamic.Interface
	store   cache.Store
	changed wakeup.Signal
}

// WatchObjects watches the cluster's EtcdMembers, or only the named one, until ctx ends. It returns when the cache is
// complete. It waits until the first machine has created the CRD and the API server answers.
func WatchObjects(ctx context.Context, client dynamic.Interface, name string) (Objects, error) {
	selector := ""
	if name != "" {
		selector = "metadata.name=" + name
	}
	err := kube.Retry(ctx, "watching EtcdMembers", func(ctx context.Context) error {
		_, err := client.Resource(kube.EtcdMembers).List(ctx, metav1.ListOptions{Limit: 1})
		return err
	})
	if err != nil {
		return nil, err
	}
	o := &kubeObjects{client: client, changed: wakeup.New()}
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: kube.ListWatch(ctx, client, kube.EtcdMembers, selector),
		ObjectType:    &unstructured.Unstructured{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { o.changed.Send() },
			UpdateFunc: func(any, any) { o.changed.Send() },
			DeleteFunc: func(any) { o.changed.Send() },
		},
	})
	o.store = store
	go controller.RunWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), controller.HasSynced) {
		return nil, ctx.Err()
	}
	o.changed.Send()
	return o, nil
}

// Changed implements Objects.
func (o *kubeObjects) Changed() <-chan struct{} { return o.changed }

// List implements Objects.
func (o *kubeObjects) List() map[string]etcdv1.EtcdMember {
	out := map[string]etcdv1.EtcdMember{}
	for _, item := range o.store.List() {
		if m, err := FromUnstructured(item.(*unstructured.Unstructured)); err == nil {
			out[m.Name] = m
		}
	}
	return out
}

// FromUnstructured converts an EtcdMember.
func FromUnstructured(o *unstructured.Unstructured) (etcdv1.EtcdMember, error) {
	var m etcdv1.EtcdMember
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &m)
	return m, err
}

// Create implements Objects.
func (o *kubeObjects) Create(ctx context.Context, name string, spec etcdv1.EtcdMemberSpec) error {
	object := named(name)
	object.Object["spec"] = map[string]any{"peerURL": spec.PeerURL, "clientURL": spec.ClientURL}
	_, err := o.client.Resource(kube.EtcdMembers).Create(ctx, object, metav1.CreateOptions{FieldManager: kube.FieldManager})
	if apierrors.IsAlreadyExists(err) {
		return nil // the watch delivers the object
	}
	return err
}

// ApplyStatus implements Objects. A deleted object is no error.
func (o *kubeObjects) ApplyStatus(ctx context.Context, name string, status etcdv1.EtcdMemberStatus) error {
	return applyStatus(ctx, o.client, careManager, name, status)
}

func applyStatus(ctx context.Context, client dynamic.Interface, manager, name string, status etcdv1.EtcdMemberStatus) error {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&status)
	if err != nil {
		return err
	}
	object := named(name)
	object.Object["status"] = fields
	_, err = client.Resource(kube.EtcdMembers).ApplyStatus(ctx, name, object, metav1.ApplyOptions{FieldManager: manager, Force: true})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func named(name string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": etcdv1.GroupVersion.String(), "kind": "EtcdMember", "metadata": map[string]any{"name": name},
	}}
}

// RenewLease implements Objects.
func (o *kubeObjects) RenewLease(ctx context.Context, holder string, now time.Time) error {
	lease := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
		"metadata": map[string]any{"name": etcdv1.CareLeaseName, "namespace": etcdv1.CareLeaseNamespace},
		"spec": map[string]any{
			"holderIdentity": holder, "leaseDurationSeconds": int64(etcdv1.CareLeaseDuration / time.Second),
			"renewTime": now.UTC().Format(metav1.RFC3339Micro),
		},
	}}
	_, err := o.client.Resource(kube.Leases).Namespace(etcdv1.CareLeaseNamespace).Apply(ctx, etcdv1.CareLeaseName, lease,
		metav1.ApplyOptions{FieldManager: careManager, Force: true})
	return err
}
